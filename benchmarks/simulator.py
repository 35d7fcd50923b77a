"""How fast the simulator is: forwards and backwards a second of every schedule, trace recorded.

    python -m benchmarks.simulator --json

A backward cut in two counts as two actions where the name ends in `_halves`; otherwise as one.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from benchmarks.harness import Row, arguments, report, spread
from ganglion.decide.costs import StageTimes
from ganglion.decide.schedules.pipeline import SCHEDULES, make_schedule
from ganglion.decide.schedules.pipeline.action import BACKWARD, FORWARD, WEIGHT
from ganglion.decide.simulator import Simulation, SimulationOptions, simulate

SIZES = ((8, 2000), (64, 256))
QUICK_SIZES = ((8, 100), (16, 32))
REPLICAS = 16
UNIT = StageTimes(forward_s=1.0, backward_s=1.0, weight_s=1.0)


def run_once(name: str, num_ranks: int, num_microbatches: int) -> Simulation:
    """Simulate one batch on a pipeline of equal stages."""
    num_stages = make_schedule(name, 0, num_ranks).stage_map.num_stages
    return simulate(
        lambda rank: make_schedule(name, rank, num_ranks),
        [UNIT] * num_stages,
        [num_microbatches],
        SimulationOptions(num_replicas=REPLICAS),
    )


def main() -> None:
    """Let all schedules take turns, and print actions a second."""
    options = arguments(__doc__.splitlines()[0] if __doc__ else "")
    rounds = options.rounds or (5 if options.quick else 7)
    sizes = QUICK_SIZES if options.quick else SIZES
    turns = {
        f"{name}_{ranks}x{count}": _turn(name, ranks, count)
        for name in SCHEDULES
        for ranks, count in sizes
    }
    rows = _rows(turns, rounds)
    report("simulator", rows, as_json=options.json, notes={"replicas": REPLICAS, "rounds": rounds})


def _turn(name: str, num_ranks: int, num_microbatches: int) -> Callable[[], Simulation]:
    return lambda: run_once(name, num_ranks, num_microbatches)


def _rows(turns: dict[str, Callable[[], Simulation]], rounds: int) -> list[Row]:
    rates: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        for name, turn in turns.items():
            start_s = time.perf_counter()
            run = turn()
            taken_s = time.perf_counter() - start_s
            if number > 0:  # the first round warms up
                for counted, actions in _num_actions(name, run).items():
                    rates.setdefault(counted, []).append(actions / taken_s)
    return [_row(name, taken) for name, taken in rates.items()]


def _row(name: str, rates: list[float]) -> Row:
    middle, low, high = spread(rates)
    return Row(name, middle, "actions/s", low, high, ratio_to=None, ratio=None)


def _num_actions(name: str, run: Simulation) -> dict[str, int]:
    kinds = [row[0].kind for row in run.rows]
    whole = sum(kind in (FORWARD, BACKWARD) for kind in kinds)
    halves = kinds.count(WEIGHT)
    return {name: whole} | ({f"{name}_halves": whole + halves} if halves else {})


if __name__ == "__main__":
    main()
