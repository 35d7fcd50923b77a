"""The Plan: one frozen record of every parallel decision of a run.

It is made by `config.resolve()`, by the planner or by hand, and stored as `plan.json`; the
simulator and the trainer read nothing else about the layout.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ganglion.decide.topology import DEFAULT_RANK_ORDER, Mesh
from ganglion.errors import ConfigError, LayoutError, UnknownKeyError

PLAN_FORMAT = 1
# "bf16" computes in bf16 by autocast; with masters, weights and gradients are stored in half too.
FP32, BF16, BF16_MASTER, FP16_MASTER = "fp32", "bf16", "bf16_master", "fp16_master"
PRECISIONS: tuple[str, ...] = (FP32, BF16, BF16_MASTER, FP16_MASTER)
# "full" keeps only the input of each segment of blocks and computes the rest again in backward;
# "sqrt" does so with segments of about the square root of all blocks, "blocks" for some blocks,
# "budget" for those that do not fit a budget, which are chosen later.
RECOMPUTES: tuple[str, ...] = ("none", "full", "sqrt", "blocks", "budget")
# Where optimizer state and masters live between updates, or activations until their backward.
TIERS: tuple[str, ...] = ("none", "host", "disk")
# How replicas are kept in agreement: by summing gradients, or as workers of elastic averaging.
NO_AVERAGING, SYNC_EASGD, LOCAL_SGD = "none", "sync_easgd", "local_sgd"
SLOW_MOMENTUM, DILOCO = "slow_momentum", "diloco"
ORIGINAL_EASGD, ASYNC_EASGD, ASYNC_MEASGD = "original_easgd", "async_easgd", "async_measgd"
ASYNC_SGD, ASYNC_MSGD = "async_sgd", "async_msgd"
HOGWILD_EASGD, HOGWILD_SGD = "hogwild_easgd", "hogwild_sgd"
# Modes of ElasticAverage, as far as they have other names than methods; and those whose centre
# server processes can hold, or whose workers exchange on their own.
SYNC, SYNC_SGD, ASYNC, ROUND_ROBIN, HOGWILD = "sync", "sync_sgd", "async", "round_robin", "hogwild"
SERVER_MODES: tuple[str, ...] = (ASYNC, ROUND_ROBIN, ASYNC_SGD)
ASYNC_MODES: tuple[str, ...] = (*SERVER_MODES, HOGWILD, HOGWILD_SGD)
# The mode of ElasticAverage that runs each method.
MODE_OF_METHOD: dict[str, str] = {
    SYNC_EASGD: SYNC,
    LOCAL_SGD: SYNC,
    SLOW_MOMENTUM: SYNC,
    DILOCO: SYNC,
    ORIGINAL_EASGD: ROUND_ROBIN,
    ASYNC_EASGD: ASYNC,
    ASYNC_MEASGD: ASYNC,
    ASYNC_SGD: ASYNC_SGD,
    ASYNC_MSGD: ASYNC_SGD,
    HOGWILD_EASGD: HOGWILD,
    HOGWILD_SGD: HOGWILD_SGD,
}
AVERAGINGS: tuple[str, ...] = (NO_AVERAGING, *MODE_OF_METHOD)
# Methods with an elastic force, with servers, and with workers that do not wait for each other.
ELASTIC = (SYNC_EASGD, ORIGINAL_EASGD, ASYNC_EASGD, ASYNC_MEASGD, HOGWILD_EASGD)
SERVED: tuple[str, ...] = tuple(m for m, mode in MODE_OF_METHOD.items() if mode in SERVER_MODES)
ASYNCHRONOUS: tuple[str, ...] = tuple(
    m for m, mode in MODE_OF_METHOD.items() if mode in ASYNC_MODES
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Every parallel decision of a run.

    `schedule` is a name, an alias or "package.module:name" of your own. `limit`, `extra`, `chunks`
    and `priority` are its options; 0 and "" leave them to the schedule. `recompute_blocks` has the
    segments of recompute "blocks", such as "3" or "4-6"; the last block is one of them.

    `overlap` lets reductions and the collectives of split layers run while something computes.
    Weights stay gathered along z with `keep_gathered`, or as many as fit into `keep_gathered_mib`;
    with `share_pieces`, ranks along z of one host gather nothing. Gradients are reduced in buckets
    of `bucket_mib`; offloaded state moves in buckets of `bucket_size` elements.
    """

    data: int = 1
    pipe: int = 1
    x: int = 1
    y: int = 1
    z: int = 1
    rank_order: tuple[str, ...] = DEFAULT_RANK_ORDER
    schedule: str = "one_f_one_b"
    limit: int = 0
    extra: int = 0
    chunks: int = 0
    priority: str = ""
    microbatch_size: int = 1
    num_microbatches: int = 1
    stage_boundaries: tuple[int, ...] = ()
    recompute: str = "none"
    recompute_every: int = 0
    recompute_blocks: tuple[str, ...] = ()
    activation_mib: float = 0.0
    precision: str = FP32
    compute_fp32: bool = False
    offload: str = "none"
    offload_activations: str = "none"
    averaging: str = NO_AVERAGING
    servers: int = 0
    overlap: bool = True
    keep_gathered: bool = False
    keep_gathered_mib: float = 0.0
    share_pieces: bool = True
    bucket_mib: float = 25.0
    bucket_size: int = 4194304

    def __post_init__(self) -> None:
        self.mesh()
        for key in ("microbatch_size", "num_microbatches"):
            if getattr(self, key) < 1:
                raise LayoutError(f"{key} is {getattr(self, key)}; it must be at least 1")
        for key in ("limit", "extra", "chunks", "servers"):
            if getattr(self, key) < 0:
                raise LayoutError(f"{key} is {getattr(self, key)}; it must be 0 or more")
        if self.precision not in PRECISIONS:
            raise ConfigError(f"precision {self.precision!r} is not one of {list(PRECISIONS)}")
        if self.compute_fp32 and not self.has_masters:
            raise ConfigError(
                f"memory.compute_fp32 = true widens weights that are stored in half, but "
                f'train.precision = "{self.precision}" stores them in fp32: set train.precision = '
                f'"{BF16_MASTER}", or memory.compute_fp32 = false'
            )
        for key in ("offload", "offload_activations"):
            if getattr(self, key) not in TIERS:
                raise ConfigError(
                    f"memory.{key} = {getattr(self, key)!r} is not one of {list(TIERS)}: choose "
                    f"one of them (of a plan: {key})"
                )
        self._check_recompute()
        self._check_traffic()
        if self.averaging not in AVERAGINGS:
            raise ConfigError(
                f"averaging.method = {self.averaging!r} is not one of {list(AVERAGINGS)}: choose "
                f"one of them (of a plan: averaging); others are in ganglion.execute.averaging"
            )
        self._check_boundaries()

    def _check_recompute(self) -> None:
        if self.recompute not in RECOMPUTES:
            raise ConfigError(
                f"memory.recompute = {self.recompute!r} is not one of {list(RECOMPUTES)}: choose "
                f"one of them (of a plan: recompute)"
            )
        for field, (needed, unset) in _RECOMPUTE_OPTIONS.items():
            value = getattr(self, field)
            if value != unset and self.recompute != needed:
                raise ConfigError(
                    f"memory.{field} = {value!r} is for memory.recompute = {needed!r}, but it is "
                    f"{self.recompute!r}: remove one of them (of a plan: {field})"
                )
        if self.recompute_every < 0:
            raise ConfigError(f"memory.recompute_every = {self.recompute_every}: use 0 or more")
        if self.recompute == "budget" and not self.activation_mib > 0:
            raise ConfigError(
                f'memory.recompute = "budget" needs a budget, but memory.activation_mib = '
                f"{self.activation_mib}: set it to the MiB that activations of a rank may take"
            )
        self.recompute_spans()

    def _check_traffic(self) -> None:
        if self.keep_gathered and self.keep_gathered_mib:
            raise ConfigError(
                f"parallel.keep_gathered = true keeps all gathered weights, but parallel."
                f"keep_gathered_mib = {self.keep_gathered_mib:g} only some: leave one out"
            )
        for key in ("parallel.bucket_mib", "memory.bucket_size"):
            value = getattr(self, key.partition(".")[2])
            if value <= 0:
                raise ConfigError(f"{key} = {value} is not a size: use a number above 0")

    def recompute_spans(self) -> tuple[range, ...]:
        """Return the segments of recompute "blocks", as numbers of blocks."""
        spans = tuple(map(_span, self.recompute_blocks))
        for before, after in pairwise(spans):
            if before.stop > after.start:
                raise ConfigError(
                    f"memory.recompute_blocks = {list(self.recompute_blocks)} must rise, and no "
                    f"block may be in two segments: write them in order"
                )
        return spans

    def _check_boundaries(self) -> None:
        cuts = self.stage_boundaries
        # The schedule, which knows the number of chunks, checks the exact number of cuts.
        if cuts and (len(cuts) + 1) % self.pipe:
            raise LayoutError(
                f"parallel.stage_boundaries has {len(cuts)} cuts, but pipe={self.pipe} stages need "
                f"{self.pipe - 1} (pipe * chunks - 1 with several chunks a rank)"
            )
        if any(cut < 1 for cut in cuts) or list(cuts) != sorted(set(cuts)):
            raise LayoutError(
                f"parallel.stage_boundaries {list(cuts)} must rise strictly and begin at 1 or "
                f"later: each names the first block of a stage, and no stage may be empty"
            )

    @classmethod
    def from_arguments(
        cls, arguments: Sequence[str], *, global_batch_size: int, microbatch_size: int
    ) -> Plan:
        """Read `field=value` words, such as a script's `sys.argv[1:]`, into a plan.

        The number of microbatches follows from the batch, so that one script trains on the same
        global batches under every layout: `torchrun ... script.py data=2 schedule=2bw`.
        """
        fields = _parsed_arguments(arguments)
        shares = int(fields.get("data", 1)) * int(fields.get("z", 1))
        if shares < 1 or global_batch_size % (microbatch_size * shares):
            raise LayoutError(
                f"a global batch of {global_batch_size} cannot be cut into microbatches of "
                f"{microbatch_size} on data * z = {shares} replicas: choose a multiple of "
                f"{microbatch_size * max(1, shares)}"
            )
        fields["num_microbatches"] = global_batch_size // (microbatch_size * shares)
        return cls(**fields, microbatch_size=microbatch_size)

    def mesh(self) -> Mesh:
        """Return the mesh of this plan's axes."""
        return Mesh(
            data=self.data,
            pipe=self.pipe,
            x=self.x,
            y=self.y,
            z=self.z,
            rank_order=self.rank_order,
        )

    @property
    def num_ranks(self) -> int:
        """The number of processes, servers included."""
        return self.mesh().num_ranks + self.servers

    @property
    def share_size(self) -> int:
        """The samples of one (data, z) coordinate in a step."""
        return self.microbatch_size * self.num_microbatches

    @property
    def num_shares(self) -> int:
        """The number of (data, z) coordinates that share a global batch."""
        return self.data * self.z

    @property
    def computes_in(self) -> str:
        """The precision of products and of activations between blocks."""
        return FP32 if self.compute_fp32 else self.precision

    @property
    def has_masters(self) -> bool:
        """Whether weights and gradients are stored in half precision beside fp32 masters."""
        return self.precision in (BF16_MASTER, FP16_MASTER)

    @property
    def averages(self) -> bool:
        """Whether replicas are workers of elastic averaging, with weights of their own."""
        return self.averaging != NO_AVERAGING

    @property
    def drifts(self) -> bool:
        """Whether workers may be at different steps between evaluations and checkpoints."""
        return self.averaging in ASYNCHRONOUS

    @property
    def summed_axes(self) -> tuple[str, ...]:
        """The axes whose ranks see different samples and sum their gradients."""
        return ("z",) if self.averages else ("data", "z")

    @property
    def num_summed_shares(self) -> int:
        """The number of shares of a batch over which a gradient is averaged."""
        return self.z if self.averages else self.num_shares

    @property
    def global_batch_size(self) -> int:
        """The samples of one step over all ranks."""
        return self.share_size * self.num_shares

    def to_json(self) -> str:
        """Return the plan as JSON text; `from_json` reads it back to an equal plan."""
        return json.dumps({"format": PLAN_FORMAT, **dataclasses.asdict(self)}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str = "plan") -> Plan:
        """Return the plan of JSON text; `source` names the file in error messages."""
        try:
            record = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"{source} is not JSON: {error}; write it again with `ganglion train`"
            ) from error
        if not isinstance(record, dict) or record.pop("format", None) != PLAN_FORMAT:
            raise ConfigError(
                f'{source} is not a plan of format {PLAN_FORMAT}: it needs "format": {PLAN_FORMAT}'
            )
        return cls(**_checked_fields(record, source))

    def require_built(self) -> None:
        """Raise ConfigError for a plan that cannot run; every driver calls this first."""
        if self.servers and self.averaging not in SERVED:
            raise ConfigError(
                f"averaging.servers = {self.servers}, but averaging.method = {self.averaging!r} "
                f"needs none: set it to 0, or choose a method of {list(SERVED)}"
            )


# For each option of recomputation: the setting that it belongs to, and its value when unset.
_RECOMPUTE_OPTIONS: dict[str, tuple[str, object]] = {
    "recompute_every": ("full", 0),
    "recompute_blocks": ("blocks", ()),
    "activation_mib": ("budget", 0.0),
}


def _span(text: str) -> range:
    """Return the blocks of a segment, written "4-6" or "4"."""
    first, dash, last = text.partition("-")
    numbers = [first, last] if dash else [first]
    if all(number.isdecimal() for number in numbers) and int(first) <= int(numbers[-1]):
        return range(int(first), int(numbers[-1]) + 1)
    raise ConfigError(
        f"memory.recompute_blocks has {text!r}, which is no block or run of blocks: write "
        f'"3" or "4-6"'
    )


def _parsed_arguments(arguments: Sequence[str]) -> dict[str, Any]:
    known = {field.name: field.default for field in dataclasses.fields(Plan)}
    for derived in ("microbatch_size", "num_microbatches"):
        del known[derived]
    fields: dict[str, Any] = {}
    for argument in arguments:
        name, equals, text = argument.partition("=")
        if not equals or name not in known:
            raise UnknownKeyError(
                f"{argument!r} is not field=value of a plan; the fields are {sorted(known)}"
            )
        fields[name] = _parsed_value(name, text, known[name])
    return fields


def _parsed_value(name: str, text: str, default: object) -> Any:
    parts = [part for part in text.split(",") if part]
    try:
        if name == "stage_boundaries":
            return tuple(int(part) for part in parts)
        if isinstance(default, bool):
            return ("false", "true").index(text.lower()) == 1
        return tuple(parts) if isinstance(default, tuple) else type(default)(text)  # type: ignore[call-arg]
    except ValueError as error:
        wanted = "true" if isinstance(default, bool) else "2"
        kind = "true or false" if isinstance(default, bool) else "a number"
        raise ConfigError(f"{name}={text!r} is not {kind}; write {name}={wanted}, say") from error


def _checked_fields(record: Mapping[str, object], source: str) -> dict[str, Any]:
    fields = {field.name: field for field in dataclasses.fields(Plan)}
    unknown = sorted(set(record) - set(fields))
    if unknown:
        raise UnknownKeyError(
            f"{source} has the unknown field {unknown[0]!r}; a plan has {sorted(fields)}"
        )
    return {name: _checked_value(name, value, source) for name, value in record.items()}


def _checked_value(name: str, value: object, source: str) -> object:
    default = next(field.default for field in dataclasses.fields(Plan) if field.name == name)
    if isinstance(default, tuple):
        kind = int if name == "stage_boundaries" else str
        if isinstance(value, list) and all(type(item) is kind for item in value):
            return tuple(value)
        raise ConfigError(f"{source}: {name} must be a list of {kind.__name__}, not {value!r}")
    if type(default) is float and type(value) is int:
        return float(value)
    if type(value) is not type(default):
        raise ConfigError(
            f"{source}: {name} must be of type {type(default).__name__}, not {value!r}"
        )
    return value
