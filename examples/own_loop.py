"""Your own model, loss, optimizer and data, trained in parallel; run it again to go on.

python examples/own_loop.py
torchrun --nproc-per-node 2 examples/own_loop.py data=2
torchrun --nproc-per-node 2 examples/own_loop.py pipe=2 schedule=2bw
"""

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

import ganglion

STEPS = 200


def spirals(num_samples: int = 2000) -> TensorDataset:
    """Points on two interleaved spirals, and which spiral each is on."""
    generator = torch.Generator().manual_seed(0)
    angle = 8 * torch.rand(num_samples, generator=generator)
    arm = torch.arange(num_samples) % 2
    turned = angle + torch.pi * arm
    points = torch.stack([angle * turned.cos(), angle * turned.sin()], dim=1) / 8
    return TensorDataset(points, arm)


def main() -> None:
    plan = ganglion.Plan.from_arguments(sys.argv[1:], global_batch_size=128, microbatch_size=16)
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(2, 64), nn.SiLU()),
        nn.Sequential(nn.Linear(64, 64), nn.SiLU()),
        nn.Sequential(nn.Linear(64, 64), nn.SiLU()),
        nn.Linear(64, 2),
    ]
    run = ganglion.parallelize(
        blocks, nn.functional.cross_entropy, lambda named: torch.optim.AdamW(named, lr=1e-2), plan
    )
    run.load("runs/own_loop")
    data = spirals()
    for result in run.steps(run.batches(data), until=STEPS):
        if run.world.rank == 0 and result.step % 20 == 0:
            print(f"step {result.step}  loss {result.loss:.4f}")
        if result.step % 100 == 0:
            run.save("runs/own_loop")
    run.drain()
    loss = run.evaluate(data, num_batches=10)
    if run.world.rank == 0:
        print(f"done at step {run.step}  loss {loss:.4f}")
    run.close()


if __name__ == "__main__":
    main()
