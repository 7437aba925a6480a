"""All small mutants of a source file: one change of its syntax tree each."""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from types import CodeType
from typing import TypeAlias

from .planted.plant import FOLDER, sources

Key: TypeAlias = tuple[str, str, str]
"""File, function and change."""

LEFT_ALONE = {
    "check": "it is there to check",
    "nodes": "only `check` needs it",
    "idle_nodes": "only checks need it",
    "make_namespace": "no operation of the cache calls it: tests/kvcache/test_tokens.py",
    "_encode": "a part of make_namespace",
    "count_held": "no operation of the cache calls it: tests/kvcache/test_count_held.py",
    "CacheManager.__repr__": "no operation of the cache calls it: tests/kvcache/test_repr.py",
    "Lease.__repr__": "the same",
    "Match.__repr__": "the same",
}
"""Functions whose mutants are not made, by any class or by one, and why."""

OPPOSITES: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift,
}


@dataclass(frozen=True)
class Mutant:
    """One change: the number-th of a file, at a line of a function, from one text to another."""

    file: str
    number: int
    function: str
    line: int
    change: str

    @property
    def key(self) -> Key:
        """By what it is explained."""
        return self.file, self.function, self.change


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what a node can become."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in OPPOSITES:
            yield _with(node, ops=[OPPOSITES[type(op)]()])
        case ast.BoolOp(op=op) | ast.BinOp(op=op) if type(op) in OPPOSITES:
            yield _with(node, op=OPPOSITES[type(op)]())
        case ast.AugAssign(op=op) if type(op) in OPPOSITES:
            yield _with(node, op=OPPOSITES[type(op)]())
            yield ast.Pass()
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield ast.Constant(value + 1)
            yield ast.Constant(value - 1)
        case ast.If(test=test):
            yield _with(node, test=ast.UnaryOp(ast.Not(), test))
            yield _with(node, test=ast.Constant(False))
        case ast.IfExp(test=test):
            yield _with(node, test=ast.UnaryOp(ast.Not(), test))
        case ast.Return(value=ast.expr() as value):
            if not isinstance(value, ast.Constant):
                yield ast.Return(ast.Constant(None))
        case ast.Expr(value=ast.Call()) | ast.Assign() | ast.Delete() | ast.Raise():
            yield ast.Pass()
        case ast.Break() | ast.Continue():
            yield ast.Pass()


def _with(node: ast.AST, **fields: object) -> ast.AST:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


@dataclass(frozen=True)
class Place:
    """Where a node stands: in a field of its parent, or at an index of a list there."""

    parent: ast.AST
    field: str
    index: int | None
    node: ast.AST

    def put(self, node: ast.AST) -> None:
        """Put a node there."""
        if self.index is None:
            setattr(self.parent, self.field, node)
        else:
            getattr(self.parent, self.field)[self.index] = node

    def change_to(self, new: ast.AST) -> str:
        """Tell a change as text: of a number or sign, that of the expression that has it."""
        shown = self.parent if isinstance(self.node, ast.Constant | ast.UnaryOp) else None
        old = _text(shown or self.node)
        self.put(new)
        text = f"{old}  ->  {_text(shown or new)}"
        self.put(self.node)
        return text


def _text(node: ast.AST) -> str:
    return ast.unparse(node).split("\n")[0]


def _places(parent: ast.AST) -> Iterator[Place]:
    """Yield the place of every node below one, but for annotations and what is there to check."""
    for field, value in ast.iter_fields(parent):
        for index, child in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(child, ast.AST) and not (
                isinstance(child, ast.Assert) or field == "annotation"
            ):
                yield Place(parent, field, index if isinstance(value, list) else None, child)
                yield from _places(child)


def _functions(parent: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[tuple[str, Place]]:
    """Yield the places in each function, with its name."""
    for node in parent.body:
        if isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not LEFT_ALONE.keys() & {
            node.name,
            prefix + node.name,
        }:
            for place in _places(ast.Module(node.body, [])):
                yield prefix + node.name, place


def sites(tree: ast.Module) -> Iterator[tuple[str, Place, ast.AST]]:
    """Yield each change that can be made to a tree: the function, the place, the new node."""
    for function, place in _functions(tree):
        yield from ((function, place, new) for new in changes(place.node))


def all_mutants(file: str, source: str | None = None) -> list[Mutant]:
    """Return every mutant of a file, without the code. Of equal changes the second ends in [2].

    Args:
        file: its path, which names it.
        source: its text; None for that of a file of `kvcache/`.
    """
    found: list[Mutant] = []
    seen: Counter[tuple[str, str]] = Counter()
    tree = ast.parse(sources()[file] if source is None else source)
    for number, (function, place, new) in enumerate(sites(tree)):
        change = place.change_to(new)
        seen[function, change] += 1
        if seen[function, change] > 1:
            change += f"  [{seen[function, change]}]"
        found.append(Mutant(file, number, function, getattr(place.node, "lineno", 0), change))
    return found


def tree_of(mutant: Mutant, source: str) -> ast.Module:
    """Return the syntax tree of a source file, changed."""
    tree = ast.parse(source)
    _, place, new = next(islice(sites(tree), mutant.number, None))
    place.put(ast.copy_location(new, place.node))
    return ast.fix_missing_locations(tree)


def code_of(mutant: Mutant) -> CodeType:
    """Compile the file of a mutant of `kvcache/`, changed."""
    tree = tree_of(mutant, sources()[mutant.file])
    return compile(tree, str(FOLDER / mutant.file), "exec")
