"""`ganglion doctor`: versions, hardware and extras, and a test that two processes can talk."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os
import platform
import tempfile

import psutil
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import ganglion
from ganglion.cli.environment import usable_cores
from ganglion.cli.launch import SIZES, Probe, probe_ranks
from ganglion.units import format_bytes, format_time

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
        state = escape(f"pip install 'ganglion[{extra}]'") if missing else "installed"
        table.add_row(extra, enables, state)
    return table


def _probe(console: Console) -> int:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import elastic_launch

    from ganglion.cli.launch import launch_config

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        with tempfile.TemporaryDirectory(prefix="ganglion-doctor-") as logs:
            config = launch_config(2, DefaultLogsSpecs(log_dir=logs))
            results = elastic_launch(config, probe_ranks)()
    except Exception as error:  # of any kind: it belongs into the report
        console.print("two ranks", style="bold")
        console.print(f"all-reduce FAILED: {error}", markup=False)
        return 1
    first: Probe = results[0]
    console.print(_speeds(first))
    correct = all(probe.correct for probe in results.values())
    verdict = "correct" if correct else "WRONG: 1 + 2 did not give 3"
    console.print(f" sums over two ranks: {verdict}; transport auto chose {first.way}")
    return 0 if correct else 1


def _speeds(probe: Probe) -> Table:
    """Return the times of a message (one way) and an all-reduce between two ranks."""
    table = Table(title="two ranks", title_justify="left", title_style="bold", box=None)
    carriers = list(dict.fromkeys(carrier for carrier, _, _ in probe.times_s))
    for column in ("", *carriers):
        table.add_column(column, justify="left" if not column else "right")
    for what in ("message", "all-reduce"):
        for size in SIZES:
            cells = [format_time(probe.times_s[carrier, what, size]) for carrier in carriers]
            table.add_row(f"{what} of {size}", *cells)
    return table
