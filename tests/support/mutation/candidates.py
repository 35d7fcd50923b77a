"""The faults that can be put into a function: each is a minimal edit of its source text."""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterator
from itertools import pairwise

Function = ast.FunctionDef | ast.AsyncFunctionDef
Edit = tuple[int, int, str]  # bytes of a file, from and to, and their replacement
Candidate = tuple[str, list[Edit]]  # an operator and its edits

# Not `//` to `/`: a float where an index is due fails anywhere, and shows nothing.
_SWAPS: dict[type[ast.AST], tuple[str, str, str]] = {
    getattr(ast, kind): (operator, old, new)
    for operator, rows in {
        "boundary": "Lt < <=, LtE <= <, Gt > >=, GtE >= >",
        "equality": "Eq == !=, NotEq != ==",
        "plus_minus": "Add + -, Sub - +",
        "times_over": "Mult * //, Div / *, FloorDiv // *",
        "and_or": "And and or, Or or and",
    }.items()
    for kind, old, new in map(str.split, rows.split(","))
}
# No test can see these without sleeping, or the linter asks for them everywhere.
_SKIPPED_KEYWORDS = ("strict", "stacklevel", "timeout", "timeout_s", "deadline_s")


class Source:
    """A file as bytes, with the places of its nodes."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.tree = ast.parse(data)
        self._lines = [0, *(match.end() for match in re.finditer(b"\n", data))]

    def whole(self, node: ast.expr | ast.stmt, text: str = "") -> Edit:
        """Edit a node from its first to its last byte."""
        start = self._lines[node.lineno - 1] + node.col_offset
        return start, self._lines[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0), text

    def token(self, left: ast.expr, right: ast.expr, old: str, new: str) -> Edit:
        """Edit the operator between two operands, where only brackets and comments are beside."""
        first, last = self.whole(left)[1], self.whole(right)[0]
        pattern = rb"#[^\n]*|(" + re.escape(old.encode()) + rb")"
        found = next(m for m in re.finditer(pattern, self.data[first:last]) if m[1])
        return first + found.start(), first + found.end(), new

    def edited(self, edits: list[Edit]) -> bytes:
        """Return the file after edits, byte for byte the same elsewhere."""
        data = self.data
        for start, end, text in sorted(edits, reverse=True):
            data = data[:start] + text.encode() + data[end:]
        return data


def functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Yield all functions with their qualified names."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            yield prefix + child.name, child
        inner = f"{child.name}." if isinstance(child, Function | ast.ClassDef) else ""
        yield from functions(child, prefix + inner)


def sha_of(function: Function) -> str:
    """Return a digest of a function that does not depend on its place."""
    return hashlib.sha256(ast.unparse(function).encode()).hexdigest()[:16]


def candidates(source: Source, function: Function) -> list[Candidate]:
    """Return all faults of a function, without those of the functions inside it."""
    if function.name in ("__repr__", "__str__"):
        return []
    return [each for statement in function.body for each in _below(source, statement)]


def _below(source: Source, node: ast.AST) -> Iterator[Candidate]:
    if _is_skipped(node):
        return
    yield from _at(source, node)
    for child in ast.iter_child_nodes(node):
        if not (isinstance(node, ast.AnnAssign) and child is node.annotation):
            yield from _below(source, child)


def _is_skipped(node: ast.AST) -> bool:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return True
        case ast.Raise() | ast.Assert() | ast.JoinedStr():
            return True
        case ast.keyword(arg=str(name)):
            return name in _SKIPPED_KEYWORDS
        case ast.Call(func=called) | ast.Expr(value=ast.Call(func=called)):
            name = ast.unparse(called)
            return name.endswith("Error") or name.startswith(("logger.", "warnings."))
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
    return False


def _at(source: Source, node: ast.AST) -> Iterator[Candidate]:
    """Yield the faults of one node alone."""
    match node:
        case ast.Compare(left=left, ops=ops, comparators=others):
            for op, pair in zip(ops, pairwise([left, *others]), strict=True):
                yield from _swapped(source, op, *pair)
        case ast.BinOp(left=left, op=op, right=right) if not (_is_text(left) or _is_text(right)):
            yield from _swapped(source, op, left, right)
        case ast.BoolOp(op=op, values=values):
            yield from _swapped(source, op, *values)
        case ast.UnaryOp(op=ast.Not()):
            start = source.whole(node)[0]
            yield "not", [(start, start + len("not "), "")]
        case ast.Constant(value=bool(value)):
            yield "true_false", [source.whole(node, str(not value))]
        case ast.Constant(value=int(value)):
            yield "constant", [source.whole(node, str(value + 1))]
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            yield "return", [source.whole(value, "None")]
        case ast.Expr(value=ast.Call() | ast.Await()):
            yield "removed", [source.whole(node, "pass")]
        case ast.Call(func=ast.Name(id="max" | "min" as name) as called):
            yield "max_min", [source.whole(called, "min" if name == "max" else "max")]
        # Not the condition of a loop, which would never end.
        case ast.If(test=test) | ast.IfExp(test=test) | ast.comprehension(ifs=[test]):
            first, last, _ = source.whole(test)
            yield "negated", [(first, first, "not ("), (last, last, ")")]


def _swapped(source: Source, op: ast.AST, *operands: ast.expr) -> Iterator[Candidate]:
    if type(op) in _SWAPS:
        name, old, new = _SWAPS[type(op)]
        yield name, [source.token(*pair, old, new) for pair in pairwise(operands)]


def _is_text(operand: ast.expr) -> bool:
    """Return whether texts are joined: there another operator fails whatever they are."""
    if isinstance(operand, ast.Constant):
        return isinstance(operand.value, str | bytes)
    return isinstance(operand, ast.JoinedStr | ast.List | ast.ListComp | ast.Tuple)
