"""An ordinary training loop, and the three lines that make its workers average elastically.

python examples/elastic_averaging.py
torchrun --nproc-per-node 2 examples/elastic_averaging.py
torchrun --nproc-per-node 2 examples/elastic_averaging.py mode=async tau=4
torchrun --nproc-per-node 3 examples/elastic_averaging.py mode=async servers=1    # two workers
"""

import os
import sys

import torch
from torch import Tensor, nn

from ganglion import ElasticAverage

STEPS = 300


def spirals(num_samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points on two interleaved spirals, and which spiral each is on."""
    generator = torch.Generator().manual_seed(seed)
    angle = 8 * torch.rand(num_samples, generator=generator)
    arm = torch.arange(num_samples) % 2
    turned = angle + torch.pi * arm
    return torch.stack([angle * turned.cos(), angle * turned.sin()], dim=1) / 8, arm


def wishes(words: list[str]) -> dict[str, str | int | float]:
    """Turn mode=async tau=4 beta=0.5 into arguments of ElasticAverage."""
    given = dict(word.split("=", 1) for word in words)
    kinds = {"tau": int, "beta": float, "servers": int}
    return {"beta": 0.9, "tau": 2} | {k: kinds.get(k, str)(v) for k, v in given.items()}


def main() -> None:
    worker = int(os.environ.get("RANK", "0"))
    torch.set_num_threads(1)
    torch.manual_seed(worker)
    layers = [nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # any torch optimizer

    average = ElasticAverage(model, optimizer, **wishes(sys.argv[1:]))  # 1
    if average.is_server:  # only with servers=
        average.serve()
        return
    with average:  # 2
        for step in range(STEPS):
            points, arms = spirals(64, seed=1000 * worker + step)  # each worker has its own data
            loss = nn.functional.cross_entropy(model(points), arms)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if worker == 0 and (step + 1) % 100 == 0:
                print(f"step {step + 1}  loss of worker 0 {loss.item():.4f}", flush=True)

    points, arms = spirals(2000, seed=10**6)
    with average.center_weights(), torch.no_grad():  # 3
        accuracy = (model(points).argmax(dim=1) == arms).float().mean().item()
    seen = average.metrics()
    if worker == 0:
        print(
            f"workers {seen.num_workers}  exchanges {seen.num_exchanges}  "
            f"distance from the centre {seen.consensus:.4f}"
        )
        print(f"accuracy of the centre {accuracy:.4f}")
    average.close()


if __name__ == "__main__":
    main()
