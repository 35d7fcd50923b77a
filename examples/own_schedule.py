"""A pipeline schedule of your own: held to the laws, drawn by the simulator, used for training.

python examples/own_schedule.py
torchrun --nproc-per-node 2 examples/own_schedule.py pipe=2
cd examples && ganglion schedule own_schedule:Eager --latency-s 0.25 --compare 1f1b
cd examples && ganglion train --nproc 2 --parallel.pipe 2 --parallel.schedule own_schedule:Eager
"""

import sys

import ganglion
from ganglion import BUILT_IN, ListedSchedule, StageMap, StageTimes, rehearse, render_grid, simulate


class Eager(ListedSchedule):
    """1F1B with nearly twice as many forwards ahead: messages travel while others are computed."""

    def __init__(self, stage: int, num_stages: int) -> None:
        super().__init__(stage, StageMap(num_stages))
        self.num_ahead = 2 * (num_stages - stage) - 1

    def _list(self, num_microbatches: int) -> list[tuple[str, int, int]]:
        """The order of one batch: F or B, the stage, and the microbatch."""
        order = []
        for k in range(num_microbatches + self.num_ahead):
            if k < num_microbatches:
                order.append(("F", self.rank, k))
            if k + 1 >= self.num_ahead and k + 1 - self.num_ahead < num_microbatches:
                order.append(("B", self.rank, k + 1 - self.num_ahead))
        return order

    @property
    def live_bound(self) -> int:
        """The most microbatches between their forward and their backward on this stage."""
        return self.num_ahead


SCHEDULES = BUILT_IN.register("eager", Eager)  # a new registry: the old one stays as it was


def draw(name: str, stages: int = 4, microbatches: int = 12) -> None:
    times = StageTimes(forward_s=1, backward_s=1, weight_s=1, latency_s=0.5)
    result = simulate(
        lambda rank: SCHEDULES.make(name, rank, stages), [times] * stages, [microbatches]
    )
    print(f"{name}  bubble {result.bubble():.3f}  live {result.peak_live()}")
    print(*render_grid(result.events(), 100), sep="\n")


def train() -> None:
    import torch  # only here: drawing needs no torch
    from torch import nn

    words = ["schedule=eager", *sys.argv[1:]]
    plan = ganglion.Plan.from_arguments(words, global_batch_size=32, microbatch_size=4)
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 32), nn.Tanh()), nn.Linear(32, 1)]
    inputs = torch.randn(32, 8)
    batch = (inputs, inputs.prod(dim=1, keepdim=True).sign())
    run = ganglion.parallelize(
        blocks,
        nn.functional.mse_loss,
        lambda named: torch.optim.AdamW(named, lr=1e-2),
        plan,
        ganglion.RunSettings(schedules=SCHEDULES),
    )
    for result in run.steps([batch] * 100):
        if run.world.rank == 0 and result.step % 20 == 0:
            print(f"step {result.step}  loss {result.loss:.4f}")
    run.close()


def main() -> None:
    rehearse(lambda rank: SCHEDULES.make("eager", rank, 4), 4, (12, 12), "eager")
    if not sys.argv[1:]:
        draw("eager")
        draw("one_f_one_b")
    train()


if __name__ == "__main__":
    main()
