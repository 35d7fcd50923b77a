"""When workers exchange together: after which steps exchanges start and end, and if they commit.

An exchange of weights after `step` steps starts when that many are done, and is due `delay` steps
later. With fragments, each part of the weights has its own turn (streaming). For tau = 4:

    steps done             0   1   2   3   4   5   6   7   8
    1 fragment             0*              0*              0*       0*: starts and ends
    2 fragments, delay 1           1s  1e  0s  0e  1s  1e  0s       0s: starts, 0e: ends

All members vote at the end of every exchange: it is applied by all of them or by none. Members
change only while nothing is in flight, so P and alpha change for all at the same exchange.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ganglion.errors import CommError, ConfigError, ProtocolError


@dataclass(frozen=True, slots=True)
class Exchange:
    """One exchange of one fragment between some members."""

    number: int
    fragment: int
    step: int  # the weights are those after that many steps
    due: int  # and the result is applied when that many are done
    members: tuple[int, ...]

    @property
    def num_workers(self) -> int:
        """How many weights are summed."""
        return len(self.members)


class SyncExchange:
    """Counts steps, and decides which exchanges start, end and are applied.

    With `begins_at_zero` the weights before the first step are exchanged, too (spec of EASGD);
    other methods have nothing to average there.
    """

    def __init__(
        self,
        members: Iterable[int],
        *,
        tau: int,
        num_fragments: int = 1,
        delay: int = 0,
        begins_at_zero: bool = True,
        max_discarded: int = 3,
    ) -> None:
        """Begin at step 0; `max_discarded` exchanges in a row may fail to commit."""
        _check("tau", tau, 1, None)
        _check("fragments", num_fragments, 1, tau)
        _check("delay", delay, 0, tau)
        self.members = _distinct(members)
        self.tau, self.num_fragments, self.delay = tau, num_fragments, delay
        self.step = 0
        self.version = 0  # exchanges that were committed
        self.num_discarded = 0
        self._begins_at_zero = begins_at_zero
        self._max_discarded = max_discarded
        self._num_discarded_in_a_row = 0
        self._num_started = 0
        self._in_flight: list[Exchange] = []
        self._started_here: set[int] = set()  # fragments, at the present step
        self._next_members: tuple[int, ...] | None = None
        self._given_up: tuple[Exchange, ...] = ()

    @property
    def in_flight(self) -> tuple[Exchange, ...]:
        """The exchanges that have started and not ended, oldest first."""
        return tuple(self._in_flight)

    def starting(self) -> list[Exchange]:
        """Start and return the exchanges whose turn it is now; none when called again."""
        self._admit()
        turns = [f for f in range(self.num_fragments) if self._has_turn(f)]
        return [self._start(f, self.step + self.delay) for f in turns]

    def start_now(self) -> list[Exchange]:
        """Start all fragments out of turn, to end at once; nothing may be in flight."""
        if self._in_flight:
            numbers = [exchange.number for exchange in self._in_flight]
            raise ProtocolError(f"exchanges {numbers} are in flight: finish them with flush()")
        self._admit()
        return [self._start(f, self.step) for f in range(self.num_fragments)]

    def ending(self) -> list[Exchange]:
        """Return the exchanges that are due now, oldest first; call `on_votes` for each."""
        return [exchange for exchange in self._in_flight if exchange.due <= self.step]

    def on_votes(self, exchange: Exchange, votes: Mapping[int, bool]) -> bool:
        """End an exchange with the votes of its members; return whether all apply it."""
        if exchange not in self._in_flight:
            raise ProtocolError(f"exchange {exchange.number} is not in flight: it was voted on")
        if set(votes) != set(exchange.members):
            raise ProtocolError(
                f"exchange {exchange.number} has votes of workers {sorted(votes)}, its members "
                f"are {list(exchange.members)}"
            )
        self._in_flight.remove(exchange)
        against = sorted(worker for worker, agrees in votes.items() if not agrees)
        self._count(exchange, against)
        return not against

    def on_step(self) -> None:
        """Record a step of the optimizer."""
        late = [exchange.number for exchange in self.ending() if exchange.due < self.step]
        assert not late, f"exchanges {late} were due before step {self.step}"
        self.step += 1
        self._started_here.clear()

    def change_members(self, members: Iterable[int]) -> None:
        """Set the members from the next exchange on that starts with none in flight."""
        self._next_members = _distinct(members)

    def discard(self) -> None:
        """Drop the exchanges in flight, whose group is lost; turns of this step come again."""
        self._started_here -= {e.fragment for e in self._in_flight if e.step == self.step}
        self.num_discarded += len(self._in_flight)
        self._given_up = self.in_flight or self._given_up
        self._in_flight.clear()

    def missed(self, version: int) -> tuple[Exchange, ...]:
        """Return the exchanges dropped here but applied by another worker, which has `version`.

        When a member dies, all votes of an exchange may have reached some workers and not others.
        """
        return self._given_up[: max(0, version - self.version)]

    def move_to(self, step: int, version: int) -> None:
        """Continue at the step and version of another worker, with nothing in flight."""
        assert not self._in_flight, "discard first"
        if step != self.step:
            self._started_here.clear()
        self.step, self.version = step, version

    def resume(self, exchange: Exchange) -> None:
        """Put an exchange in flight whose sum is in a checkpoint."""
        self._in_flight.append(exchange)
        self._num_started = max(self._num_started, exchange.number + 1)
        if exchange.step == self.step:
            self._started_here.add(exchange.fragment)

    def _has_turn(self, fragment: int) -> bool:
        if self.step == 0 and not self._begins_at_zero:
            return False
        offset = fragment * self.tau // self.num_fragments
        return (self.step - offset) % self.tau == 0 and fragment not in self._started_here

    def _start(self, fragment: int, due: int) -> Exchange:
        exchange = Exchange(self._num_started, fragment, self.step, due, self.members)
        self._num_started += 1
        self._given_up = ()
        self._started_here.add(fragment)
        self._in_flight.append(exchange)
        return exchange

    def _admit(self) -> None:
        if self._next_members is not None and not self._in_flight:
            self.members, self._next_members = self._next_members, None

    def _count(self, exchange: Exchange, against: Sequence[int]) -> None:
        if not against:
            self.version, self._num_discarded_in_a_row = self.version + 1, 0
            return
        self.num_discarded += 1
        self._num_discarded_in_a_row += 1
        if self._num_discarded_in_a_row > self._max_discarded:
            raise CommError(
                f"workers {list(against)} refused exchange {exchange.number}, as members did the "
                f"{self._max_discarded} before it: their weights are not finite; lower the "
                f"learning rate, or load the centre of a checkpoint"
            )


def _distinct(members: Iterable[int]) -> tuple[int, ...]:
    found = tuple(sorted(members))
    if not found or len(set(found)) < len(found):
        raise ConfigError(f"workers {list(found)} are no group: name each worker once")
    return found


def _check(name: str, value: int, least: int, most: int | None) -> None:
    if value < least or (most is not None and value > most):
        bounds = f"{least} or more" if most is None else f"{least} to tau = {most}"
        raise ConfigError(f"{name} = {value} makes no sense for exchanges: give {bounds}")
