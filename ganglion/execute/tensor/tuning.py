"""Matmul tuning: each product is timed once with its operands stored in every way; the best wins.

A product C = A B runs as NN, NT or TN, which says whose rows lie one after another in memory (N)
and whose columns (T). Libraries have slow cases: on MI250X one default TN of GPT-320B ran at 6 % of
peak and another way of storing was 8 times as fast (2502.08145, section V-C). Storing an operand
the other way is a copy, which is timed with the product.

Winners are kept in a folder, one file for each (device, dtype, role, m, n, k, torch version). The
first rank of a group decides for all: ranks that computed in different ways would round
differently. So do the ways themselves; nothing else changes.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import time
import uuid
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from ganglion.errors import ConfigError
from ganglion.execute.comm import Group
from ganglion.execute.tensor.products import FlippedProduct, LinearProduct, Product, Sizes

NN, NT, TN = "NN", "NT", "TN"
VARIANTS = (NN, NT, TN)
OUTPUT, INPUT_GRADIENT, WEIGHT_GRADIENT = "output", "input_gradient", "weight_gradient"
MIN_GAIN = 0.03  # what another way must save: less than that is noise

Timer = Callable[[Callable[[], Tensor], torch.device], float]


@dataclass(frozen=True, slots=True)
class Signature:
    """What a winner depends on: C (m, n) is the sum over k of A (m, k) and B (k, n)."""

    device: str
    dtype: str
    role: str
    m: int
    n: int
    k: int
    torch: str

    @classmethod
    def of(cls, role: str, a: Tensor, b: Tensor) -> Signature:
        """Describe the product of two matrices on this machine."""
        return cls(
            device=_device_name(a.device),
            dtype=str(a.dtype).removeprefix("torch."),
            role=role,
            m=a.shape[0],
            n=b.shape[1],
            k=a.shape[1],
            torch=torch.__version__,
        )

    def path(self, folder: Path) -> Path:
        """Return the file of this signature."""
        digest = hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:24]
        return folder / f"matmul-{digest}.json"


class Tuner:
    """Finds the best way of each product; all members of a group must meet products in one order.

    `timer(run, device)` returns the seconds of one call of `run`.
    """

    def __init__(self, folder: Path, group: Group, timer: Timer | None = None) -> None:
        """Keep winners in `folder`, which the first member of the group reads and writes."""
        self._folder = folder
        self._group = group
        self._timer = _median_s if timer is None else timer
        self._known: dict[Signature, str] = {}
        if group.index == 0:
            _make_folder(folder)

    def multiply(self, role: str, a: Tensor, b: Tensor) -> Tensor:
        """Return the product of two matrices, computed in the best way."""
        signature = Signature.of(role, a, b)
        variant = self._known.get(signature)
        if variant is None:
            variant = self._known[signature] = self._agree(signature, a, b)
        return multiply_as(variant, a, b)

    def _agree(self, signature: Signature, a: Tensor, b: Tensor) -> str:
        number = torch.zeros(1, dtype=torch.int64)
        if self._group.index == 0:
            number[0] = VARIANTS.index(self._decide(signature, a, b))
        self._group.broadcast(number).wait()
        return VARIANTS[int(number)]

    def _decide(self, signature: Signature, a: Tensor, b: Tensor) -> str:
        path = signature.path(self._folder)
        cached = _read(path, signature)
        if cached is not None:
            return cached
        seconds = {v: self._timer(lambda v=v: multiply_as(v, a, b), a.device) for v in VARIANTS}  # type: ignore[misc]
        winner = _winner(seconds, natural_variant(a, b))
        _write(path, {**asdict(signature), "winner": winner, "seconds": seconds})
        return winner


class TunedProduct:
    """The product of a linear layer, each of its three matmuls computed in the best way."""

    def __init__(self, tuner: Tuner, *, flipped: bool = False) -> None:
        """Take weights of (outputs, inputs), or `flipped` of (inputs, outputs)."""
        self._tuner = tuner
        self._flipped = flipped

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the product."""
        made = self._tuner.multiply(OUTPUT, _rows(x), weight if self._flipped else weight.T)
        return made.view(*x.shape[:-1], -1)

    def input_gradient(self, gradient: Tensor, weight: Tensor, x: Tensor) -> Tensor:
        """Return the gradient of `x`."""
        turned = weight.T if self._flipped else weight
        return self._tuner.multiply(INPUT_GRADIENT, _rows(gradient), turned).view(x.shape)

    def weight_gradient(self, gradient: Tensor, x: Tensor, shape: Sizes) -> Tensor:
        """Return the gradient of the weight."""
        first, second = (x, gradient) if self._flipped else (gradient, x)
        return self._tuner.multiply(WEIGHT_GRADIENT, _rows(first).T, _rows(second))


def tuned(product: Product, tuner: Tuner | None) -> Product:
    """Return the tuned form of a product; what is no matmul of two matrices stays as it is."""
    if tuner is not None and isinstance(product, LinearProduct | FlippedProduct):
        return TunedProduct(tuner, flipped=isinstance(product, FlippedProduct))
    return product


def multiply_as(variant: str, a: Tensor, b: Tensor) -> Tensor:
    """Return A B with operands stored as the variant says, copied if they are not yet."""
    a = _by_columns(a) if variant == TN else a.contiguous()
    b = _by_columns(b) if variant == NT else b.contiguous()
    return torch.mm(a, b)


def natural_variant(a: Tensor, b: Tensor) -> str:
    """Return the way that copies nothing, or NN if there is none."""
    if a.is_contiguous():
        return NN if b.is_contiguous() or not b.T.is_contiguous() else NT
    return TN if a.T.is_contiguous() and b.is_contiguous() else NN


def _by_columns(matrix: Tensor) -> Tensor:
    return matrix.T.contiguous().T


def _rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2)


def _winner(seconds: dict[str, float], natural: str) -> str:
    best = min(VARIANTS, key=lambda variant: seconds[variant])
    return best if seconds[best] < (1 - MIN_GAIN) * seconds[natural] else natural


def _median_s(run: Callable[[], Tensor], device: torch.device) -> float:
    """Return the median time of a call; a GPU is timed by its own clock."""
    for _ in range(3):
        run()
    once = _device_s if device.type == "cuda" else _host_s
    return statistics.median(once(run) for _ in range(9))


def _host_s(run: Callable[[], Tensor]) -> float:
    start_s = time.perf_counter()
    run()
    return time.perf_counter() - start_s


def _device_s(run: Callable[[], Tensor]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    # Threads change what is fastest, and torch names the instructions it may use.
    return f"{device.type} {torch.backends.cpu.get_cpu_capability()} x{torch.get_num_threads()}"


# --- files ---------------------------------------------------------------------------------------


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"winners of matmul tuning cannot be kept in {folder}: {error}; name a folder that can "
            f"be written, or leave tuning off"
        ) from error


def _read(path: Path, signature: Signature) -> str | None:
    """Return the winner that a file holds; None, with a warning if the file is there but bad."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        winner = record["winner"]
        same = {key: record[key] for key in asdict(signature)} == asdict(signature)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        _warn(path, f"{type(error).__name__}: {error}")
        return None
    if not same or winner not in VARIANTS:
        _warn(path, f"it is of another product, or its winner {winner!r} is none of {VARIANTS}")
        return None
    return str(winner)


def _warn(path: Path, why: str) -> None:
    warnings.warn(
        f"{path} holds no winner of matmul tuning ({why}): it is timed and written anew",
        stacklevel=2,
    )


def _write(path: Path, record: dict[str, object]) -> None:
    """Write a file that others see whole or not at all."""
    try:
        part = path.with_name(f"{path.stem}.{uuid.uuid4().hex}.part")
        part.write_text(json.dumps(record, indent=2), encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise ConfigError(
            f"the winner of matmul tuning cannot be written to {path}: {error}; free some space or "
            f"leave tuning off"
        ) from error
