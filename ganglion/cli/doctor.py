"""`ganglion doctor`: what this machine offers, and proof that two processes can talk."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os
import platform
import time

import psutil
from rich.console import Console
from rich.table import Table

import ganglion
from ganglion.cli.machine import usable_cores
from ganglion.units import format_bytes

PACKAGES = ("torch", "numpy", "pydantic", "typer", "rich", "safetensors", "tensorboard", "psutil")
EXTRAS = {
    "hf": (("transformers", "tokenizers", "datasets"), "BPE tokenizers, Hugging Face models"),
    "mpi": (("mpi4py",), "ranks that talk over MPI"),
    "plot": (("matplotlib",), "pictures as PNG"),
    "wandb": (("wandb",), "metrics sent to Weights & Biases"),
}


def doctor_command() -> int:
    """Print the report; return 0 if two ranks could sum a tensor, else 1."""
    console = Console()
    console.print(_versions())
    console.print(_machine())
    console.print(_extras())
    return _probe(console)


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None)


def _versions() -> Table:
    table = _table("versions")
    table.add_row("ganglion", ganglion.__version__)
    table.add_row("python", platform.python_version())
    for package in PACKAGES:
        table.add_row(package, importlib.metadata.version(package))
    return table


def _machine() -> Table:
    import torch
    import torch.distributed as dist

    memory = psutil.virtual_memory()
    backends = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
    }
    table = _table("machine")
    table.add_row("cores", f"{usable_cores()} usable of {os.cpu_count()}")
    table.add_row(
        "memory", f"{format_bytes(memory.available)} free of {format_bytes(memory.total)}"
    )
    table.add_row("gpus", str(torch.cuda.device_count()))
    table.add_row("backends", ", ".join(f"{k} {'yes' if v else 'no'}" for k, v in backends.items()))
    return table


def _extras() -> Table:
    table = _table("extras")
    for extra, (modules, enables) in EXTRAS.items():
        missing = [name for name in modules if importlib.util.find_spec(name) is None]
        state = f"pip install 'ganglion[{extra}]'" if missing else "installed"
        table.add_row(extra, enables, state)
    return table


def _probe(console: Console) -> int:
    from torch.distributed.launcher.api import elastic_launch

    from ganglion.cli.launcher import launch_config

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    console.print("two ranks", style="bold")
    try:
        results = elastic_launch(launch_config(2), sum_over_ranks)()
    except Exception as error:  # whatever went wrong, the report must say it
        console.print(f"all-reduce FAILED: {error}", markup=False)
        return 1
    values = [value for value, _ in results.values()]
    correct = values == [3.0, 3.0]
    fastest_s = min(seconds for _, seconds in results.values())
    verdict = "correct" if correct else f"WRONG: 1 + 2 gave {values}"
    console.print(f" all-reduce of 1 MiB over gloo: {verdict}, {fastest_s * 1e3:.2f} ms")
    return 0 if correct else 1


def sum_over_ranks() -> tuple[float, float]:
    """Sum rank + 1 over the ranks; return the result and the fastest time of a few."""
    import torch

    from ganglion.comm import open_world
    from ganglion.topology import Mesh, read_launch

    launch = read_launch(os.environ)
    world = open_world(launch, Mesh(data=launch.num_ranks), timeout_s=60.0)
    times = []
    for _ in range(5):
        tensor = torch.full((2**18,), float(launch.rank + 1))
        world.barrier()
        start_s = time.perf_counter()
        world.group("data").all_reduce(tensor).wait()
        times.append(time.perf_counter() - start_s)
    world.close()
    return float(tensor.mean()), min(times)
