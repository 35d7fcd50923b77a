"""Mutants by name, and trees in which one of them is applied or all are marked."""

from __future__ import annotations

import ast
import json
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tests.support.mutation.candidates import Edit, Function, Source, candidates, functions, sha_of

LEAST = 3  # mutants of every folder
_STATE = ".mutant.json"
# Reads bytes, which is cheap. A fork may keep the seen set: its parent has written it.
_RECORDER = """import builtins, os
seen, folder, environment = set(), os.environ.get("GANGLION_TOUCHED"), os.environ._data

def touched(mutant):
    pair = mutant, environment.get(b"PYTEST_CURRENT_TEST", b"?")
    if folder and pair not in seen:
        seen.add(pair)
        test = pair[1].rpartition(b" (")[0] or pair[1]
        file = os.open(folder + "/" + mutant, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(file, test + b"\\n")
        os.close(file)

builtins.__touched__ = touched
"""
Place = tuple[str, Source, str, Function]  # the file, its text, a function of it


class Changed(SystemExit):
    """The function of a mutant has changed since the mutant was chosen."""


@dataclass(frozen=True)
class Mutant:
    """A fault, named so that it is found again after other functions of the file have changed."""

    id: str
    path: str
    function: str
    operator: str
    ordinal: int  # among the faults of that operator in the function
    sha: str
    shown: str  # for people: the line before and after


def choose(root: Path, count: int, seed: int) -> list[Mutant]:
    """Choose mutants over all folders, at most one of a function, of all operators alike."""
    units: dict[str, list[Place]] = {}
    for file in sorted((root / "ganglion").rglob("*.py")):
        path, source = file.relative_to(root).as_posix(), Source(file.read_bytes())
        found = [(name, each) for name, each in functions(source.tree) if candidates(source, each)]
        unit = path.split("/")[1] if path.count("/") > 1 else "."  # the top's modules are one
        units.setdefault(unit, []).extend((path, source, *each) for each in found)
    used: Counter[str] = Counter()
    chosen: list[Mutant] = []
    for unit, share in _shares(units, count).items():
        dice = random.Random(f"{seed}:{unit}")
        dice.shuffle(units[unit])
        for _ in range(share):
            chosen.append(_pick(units[unit], used, dice, f"m{len(chosen):02}"))
    return chosen


def _shares(units: dict[str, list[Place]], count: int) -> dict[str, int]:
    """Give each folder its least, and the rest by lines to those that are furthest behind."""
    files = {unit: {p[0]: p[1].data.count(b"\n") for p in units[unit]} for unit in sorted(units)}
    shares = dict.fromkeys(files, LEAST)
    while sum(shares.values()) < count:
        behind = max(shares, key=lambda u: sum(files[u].values()) / (shares[u] - LEAST + 1))
        shares[behind] += 1
    return shares


def _pick(left: list[Place], used: Counter[str], dice: random.Random, name: str) -> Mutant:
    """Take one of the operator, and then of the file, that was used least so far."""
    pairs = [(place, each[0]) for place in left for each in candidates(place[1], place[3])]
    place, operator = min(pairs, key=lambda pair: (used[pair[1]], used[pair[0][0]]))
    left.remove(place)
    path, source, qualified, function = place
    used.update([operator, path])
    same = [edits for kind, edits in candidates(source, function) if kind == operator]
    ordinal = dice.randrange(len(same))
    shown = _shown(source, same[ordinal])
    return Mutant(name, path, qualified, operator, ordinal, sha_of(function), shown)


def _shown(source: Source, edits: list[Edit]) -> str:
    line = source.data.count(b"\n", 0, edits[0][0])
    texts = (source.data, source.edited(edits))
    old, new = (text.split(b"\n")[line].decode().strip() for text in texts)
    return f"{line + 1}: {old}  ->  {new}"


def apply(tree: Path, mutant: Mutant, moved: dict[str, str]) -> None:
    """Put the fault into the tree, which must hold no other."""
    if (tree / _STATE).exists():
        raise Changed(f"{tree} already holds a mutant: revert it first")
    path, source, function = _find(tree, mutant, moved)
    same = [edits for kind, edits in candidates(source, function) if kind == mutant.operator]
    state = {"path": str(path), "original": source.data.decode()}
    (tree / _STATE).write_text(json.dumps(state))
    path.write_bytes(source.edited(same[mutant.ordinal]))


def revert(tree: Path) -> None:
    """Take the fault out again, if there is one."""
    if (tree / _STATE).exists():
        state = json.loads((tree / _STATE).read_text())
        Path(state["path"]).write_bytes(state["original"].encode())
        (tree / _STATE).unlink()


def _find(tree: Path, mutant: Mutant, moved: dict[str, str]) -> tuple[Path, Source, Function]:
    path = tree / moved.get(mutant.path, mutant.path)
    if not path.exists():
        raise Changed(f"{mutant.id}: there is no {path}; name its new place with --moved")
    source = Source(path.read_bytes())
    for name, function in functions(source.tree):
        if name == mutant.function and sha_of(function) == mutant.sha:
            return path, source, function
    raise Changed(f"{mutant.id}: {mutant.function} of {path} is gone or changed")


def mark(tree: Path, mutants: list[Mutant], moved: dict[str, str]) -> None:
    """Insert a mark into the function of each mutant, which records that it ran."""
    marks: dict[Path, tuple[Source, list[Edit]]] = {}
    for mutant in mutants:
        path, source, function = _find(tree, mutant, moved)
        marks.setdefault(path, (source, []))[1].append(_mark(source, function, mutant.id))
    for path, (source, edits) in marks.items():
        path.write_bytes(source.edited(edits))
    (tree / "sitecustomize.py").write_text(_RECORDER)


def _mark(source: Source, function: Function, name: str) -> Edit:
    first = function.body[1 if ast.get_docstring(function) is not None else 0]
    # In the line of the statement where that can be, so that functions grow no longer.
    compound = hasattr(first, "body") or isinstance(first, ast.Match)
    between = "\n" + " " * first.col_offset if compound else "; "
    decorators = getattr(first, "decorator_list", None)
    start = source.whole(decorators[0])[0] - len("@") if decorators else source.whole(first)[0]
    return start, start, f'__touched__("{name}"){between}'
