"""Schedules by name: from the name a user typed to the state machine of one rank.

A registry never changes. `BUILT_IN` holds the schedules of this package; `register` returns a
larger registry, to be passed on:

    mine = BUILT_IN.register("zigzag", Zigzag, aliases=("zz",))
    run = ganglion.parallelize(blocks, loss_fn, optimizer_factory, plan,
                               ganglion.RunSettings(schedules=mine))

Every registry also imports "package.module:Zigzag": so a run file, a plan or a command can name the
user's own schedule.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields

from ganglion.decide.schedules.pipeline.listed import GPipe, Interleaved, OneFOneB
from ganglion.decide.schedules.pipeline.message_driven import MessageDriven, TwoBW
from ganglion.decide.schedules.pipeline.schedule import RankSchedule, StageMap
from ganglion.decide.schedules.pipeline.stash import Stash
from ganglion.decide.schedules.pipeline.zero_bubble import ZeroBubble, ZeroBubbleV
from ganglion.errors import ConfigError
from ganglion.reference import load_function

SCHEDULES: dict[str, tuple[str, ...]] = {
    "gpipe": (),
    "one_f_one_b": ("1f1b", "pipedream_flush"),
    "interleaved": ("interleaved_1f1b",),
    "zero_bubble": ("zb", "zbh1", "zb_h1"),
    "zero_bubble_v": ("zbv", "zb_v"),
    "message_driven": ("axonn",),
    "two_bw": ("2bw", "pipedream_2bw"),
    "stash": ("pipedream",),
}

# A class or a function, called with (rank, num_ranks) and those options that it has parameters for.
Make = Callable[..., object]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleOptions:
    """Options that some schedules take; the others refuse them."""

    limit: int | None = None
    extra: int | None = None
    priority: str | None = None
    chunks: int | None = None

    def given(self) -> dict[str, int | str]:
        """Return the options that were chosen, by name."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


def canonical_schedule(
    name: str,
    key: str = "parallel.schedule",
    known: Mapping[str, Sequence[str]] = SCHEDULES,
) -> str:
    """Return the canonical name of a schedule; `key` names the user's setting in the error.

    `known` maps names to aliases. A reference to the user's own code is returned as it is.
    """
    if ":" in name:
        return name
    wanted = name.lower().replace("-", "_")
    for schedule, aliases in known.items():
        if wanted == schedule or wanted in aliases:
            return schedule
    every = [*known, *(alias for aliases in known.values() for alias in aliases)]
    near = difflib.get_close_matches(wanted, every, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"choose one of {list(known)}"
    raise ConfigError(f"{key} = {name!r} is not a schedule; {hint}")


@dataclass(frozen=True, slots=True)
class Registry:
    """Schedules by name, immutable: `register` returns a larger one."""

    makers: Mapping[str, Make]
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def register(self, name: str, make: Make, aliases: tuple[str, ...] = ()) -> Registry:
        """Return a registry with one more schedule, made by `make(rank, num_ranks)`.

        `make` also gets those of limit, extra, chunks and priority that were chosen, as keyword
        arguments.
        """
        taken = {*self.makers, *(alias for known in self.aliases.values() for alias in known)}
        for word in (name, *aliases):
            if word in taken or not word.isidentifier() or word != word.lower():
                why = "is taken" if word in taken else "is not a word of small letters"
                raise ConfigError(f"schedule name {word!r} {why}: choose another")
        return Registry({**self.makers, name: make}, {**self.aliases, name: aliases})

    def canonical(self, name: str, key: str = "parallel.schedule") -> str:
        """Return the canonical name of a schedule; `key` names the user's setting in the error."""
        known = {one: self.aliases.get(one, ()) for one in self.makers}
        return canonical_schedule(name, key, known)

    def options_of(self, name: str, key: str = "parallel.schedule") -> tuple[str, ...]:
        """Return the names of the options that a schedule takes."""
        return _options_of(self._maker(name, key))

    def make(
        self,
        name: str,
        rank: int,
        num_ranks: int,
        options: ScheduleOptions | None = None,
        key: str = "schedule",
    ) -> RankSchedule:
        """Return the schedule called `name` for one rank of a pipeline."""
        make = self._maker(name, key)
        chosen = (options or ScheduleOptions()).given()
        unknown = [option for option in chosen if option not in _options_of(make)]
        if unknown:
            canonical = self.canonical(name, key)
            raise ConfigError(f"{canonical} has no {unknown[0]}: leave out --{unknown[0]}")
        setting = f"{key} = {name!r}"
        _check_signature(make, chosen, setting)
        made = make(rank, num_ranks, **chosen)
        if not isinstance(made, RankSchedule):
            raise ConfigError(
                f"{setting} made a {type(made).__name__}, not a schedule: derive a class from "
                f"ganglion.decide.schedules.pipeline.ListedSchedule, StageSchedule or RankSchedule"
            )
        return made

    def _maker(self, name: str, key: str) -> Make:
        if ":" in name:
            return load_function(name, key)
        return self.makers[self.canonical(name, key)]


def _options_of(make: Make) -> tuple[str, ...]:
    parameters = inspect.signature(make).parameters
    return tuple(one.name for one in fields(ScheduleOptions) if one.name in parameters)


def _check_signature(make: Make, chosen: Mapping[str, object], setting: str) -> None:
    signature = inspect.signature(make)
    try:
        signature.bind(0, 1, **chosen)
    except TypeError as error:
        raise ConfigError(
            f"{setting} is called as (rank, num_ranks), but takes {signature}: {error}"
        ) from error


BUILT_IN = Registry(
    {
        "gpipe": GPipe,
        "one_f_one_b": OneFOneB,
        "interleaved": Interleaved,
        "zero_bubble": ZeroBubble,
        "zero_bubble_v": ZeroBubbleV,
        "message_driven": MessageDriven,
        "two_bw": TwoBW,
        "stash": Stash,
    },
    SCHEDULES,
)


def make_schedule(
    name: str, rank: int, num_ranks: int, options: ScheduleOptions | None = None
) -> RankSchedule:
    """Return the built-in or imported schedule called `name` for one rank of a pipeline."""
    return BUILT_IN.make(name, rank, num_ranks, options)


def stage_map_of(name: str, num_ranks: int, options: ScheduleOptions | None = None) -> StageMap:
    """Return which stages each rank holds under the schedule called `name`."""
    return make_schedule(name, 0, num_ranks, options).stage_map
