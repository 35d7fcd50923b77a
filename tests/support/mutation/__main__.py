"""The command line: see the package's docstring for the order of the commands."""

from __future__ import annotations

import argparse
import json
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict
from pathlib import Path

from tests.support.mutation.runs import Runner
from tests.support.mutation.trees import Mutant, apply, choose, mark, revert


def main() -> None:
    """Run one command, which takes some of the options."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.mutation")
    commands = ("choose", "apply", "revert", "mark", "durations", "run")
    parser.add_argument("command", choices=commands)
    parser.add_argument("id", nargs="*", default=[])
    parser.add_argument("--ids", nargs="*", default=[])
    for name in ("tree", "mutants", "touched", "junit", "json", "out"):
        parser.add_argument(f"--{name}", type=lambda text: Path(text).resolve())
    parser.add_argument("--order", nargs=2, metavar=("fast-first", "DURATIONS"))
    parser.add_argument("--moved", action="append", default=[], metavar="OLD=NEW")
    parser.add_argument("--count", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget-s", type=float, default=float("inf"))
    _obey(parser.parse_args())


def _obey(args: argparse.Namespace) -> None:
    moved = dict(pair.split("=", 1) for pair in args.moved)
    match args.command:
        case "choose":
            chosen = choose(Path.cwd(), args.count, args.seed)
            _write(args.out, [asdict(each) for each in chosen])
        case "apply":
            (mutant,) = _asked(args)
            apply(args.tree, mutant, moved)
        case "revert":
            revert(args.tree)
        case "mark":
            mark(args.tree, _asked(args), moved)
        case "durations":
            _write(args.out, _durations(args.junit))
        case "run":
            _run(args, moved)


def _durations(junit: Path) -> dict[str, float]:
    """Return the duration of each test by its node id, which JUnit files hold in two parts."""
    seconds = {}
    for case in ElementTree.parse(junit).iter("testcase"):
        file = case.get("classname", "").replace(".", "/") + ".py"
        seconds[f"{file}::{case.get('name')}"] = float(case.get("time", "0"))
    return seconds


def _run(args: argparse.Namespace, moved: dict[str, str]) -> None:
    """Judge the mutants that the results do not hold yet, as long as the time lasts."""
    revert(args.tree)  # an interrupted run may have left a mutant
    results = json.loads(args.json.read_text()) if args.json.exists() else []
    done = {each["id"] for each in results}
    known = json.loads(Path(args.order[1]).read_text()) if args.order else {}
    end_s = time.monotonic() + args.budget_s
    for mutant in (each for each in _asked(args) if each.id not in done):
        if time.monotonic() < end_s:
            tests = _touching(args.touched / mutant.id, known)
            results.append(asdict(Runner(args.tree, known, moved).judge(mutant, tests)))
            _write(args.json, results)
            print(mutant.path, mutant.function, results[-1], flush=True)
    caught = sum(each["verdict"] in ("caught", "timeout") for each in results)
    print(f"{caught} of {len(results)} caught")


def _touching(record: Path, known: dict[str, float]) -> list[str]:
    """Return the tests that ran a function; runs outside of any test are recorded as `?`."""
    tests = set(record.read_text().splitlines()) - {"?"} if record.exists() else set()
    return sorted(test for test in tests if not known or test in known)


def _asked(args: argparse.Namespace) -> list[Mutant]:
    asked = [*args.id, *args.ids]
    mutants = [Mutant(**each) for each in json.loads(args.mutants.read_text())]
    return [each for each in mutants if not asked or each.id in asked]


def _write(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=1) + "\n")


if __name__ == "__main__":
    main()
