"""All small mutants of `kvcache/`, hunted by the random engine: ``python -m tests.spec.mutants``.

A mutant is one small change of the syntax tree: a comparison, a constant, an operator, a condition
or a statement. Whoever survives is in `equivalent_mutants.toml` with the reason why it is no bug,
or stands for a rule that the specification lacks.
"""

from __future__ import annotations

import argparse
import ast
import copy
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from signal import ITIMER_PROF, SIGPROF, setitimer, signal
from types import CodeType
from typing import TypeAlias

from radixkv.scheduler.fuzz import cache_adapter, pool_adapter
from radixkv.spec.cache_world import CacheSubject
from radixkv.spec.pool_world import PoolSubject
from radixkv.spec.random_engine import run

from .planted.matrix import default_jobs
from .planted.plant import FOLDER, load_code, sources

FILES = (
    "radix_tree.py",
    "radix_node.py",
    "manager.py",
    "lease.py",
    "block_pool.py",
    "block_tables.py",
    "tokens.py",
)
Key: TypeAlias = tuple[str, str, str]
"""File, function and change."""

LEFT_ALONE = {
    "check": "it is there to check",
    "nodes": "only `check` needs it",
    "idle_nodes": "only checks need it",
    "make_namespace": "no operation of the cache calls it: tests/kvcache/test_tokens.py",
    "_encode": "a part of make_namespace",
}
"""Functions whose mutants are not hunted, and why."""

EQUIVALENT = Path(__file__).with_name("equivalent_mutants.toml")
# A mutant may loop without end; then it is found, too. Seconds of the processor, several times
# what is needed: at once, and per step.
LIMIT_S, LIMIT_PER_STEP_S = 3.0, 0.001

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
        elif isinstance(node, ast.FunctionDef) and node.name not in LEFT_ALONE:
            for place in _places(ast.Module(node.body, [])):
                yield prefix + node.name, place


def sites(tree: ast.Module) -> Iterator[tuple[str, Place, ast.AST]]:
    """Yield each change that can be made to a tree: the function, the place, the new node."""
    for function, place in _functions(tree):
        yield from ((function, place, new) for new in changes(place.node))


def all_mutants(file: str) -> list[Mutant]:
    """Return every mutant of a file, without the code. Of equal changes the second ends in [2]."""
    found: list[Mutant] = []
    seen: Counter[tuple[str, str]] = Counter()
    for number, (function, place, new) in enumerate(sites(ast.parse(sources()[file]))):
        change = place.change_to(new)
        seen[function, change] += 1
        if seen[function, change] > 1:
            change += f"  [{seen[function, change]}]"
        found.append(Mutant(file, number, function, getattr(place.node, "lineno", 0), change))
    return found


def code_of(mutant: Mutant) -> CodeType:
    """Compile the file of a mutant, changed."""
    tree = ast.parse(sources()[mutant.file])
    _, place, new = next(islice(sites(tree), mutant.number, None))
    place.put(ast.copy_location(new, place.node))
    return compile(ast.fix_missing_locations(tree), str(FOLDER / mutant.file), "exec")


def kill(mutant: Mutant, num_steps: int) -> str:
    """Return what finds a mutant: a rule, an error; "" if it survives."""
    # What nobody has explained may be rare, and is hunted for longer.
    last = num_steps if mutant.key in explained() else 10 * num_steps
    signal(SIGPROF, _expired)
    try:
        module = load_code({mutant.file: code_of(mutant)})
        pool = PoolSubject(pool_adapter.make_factory(module))
        cache = CacheSubject(cache_adapter.make_factory(module), "full")
        for subject, steps in (cache, num_steps // 10), (pool, num_steps), (cache, last):
            setitimer(ITIMER_PROF, LIMIT_S + LIMIT_PER_STEP_S * steps)
            finding = run(subject, steps, steps).finding
            if finding is not None:
                return finding.rule
    except Exception as error:
        return type(error).__name__
    finally:
        setitimer(ITIMER_PROF, 0)
    return ""


def _expired(number: int, frame: object) -> None:
    raise TimeoutError("a mutant loops without end")


def hunt(mutants: Sequence[Mutant], num_steps: int, num_jobs: int) -> list[str]:
    """Return what finds each mutant."""
    with ProcessPoolExecutor(num_jobs, get_context("spawn")) as pool:
        return list(pool.map(partial(kill, num_steps=num_steps), mutants, chunksize=8))


def explained() -> dict[Key, str]:
    """Return the reasons by file, function and change.

    Raises:
        ValueError: if a change is explained twice.
    """
    reasons: dict[Key, str] = {}
    for entry in tomllib.loads(EQUIVALENT.read_text("utf-8"))["equivalent"]:
        for change in entry["changes"]:
            key = entry["file"], entry["function"], change
            if key in reasons:
                raise ValueError(f"{key} is explained twice")
            reasons[key] = entry["why"]
    return reasons


def report(mutants: Sequence[Mutant], results: Sequence[str], reasons: Mapping[Key, str]) -> int:
    """Print who survived; return how many survivors and explanations lack their counterpart."""
    survivors = [mutant for mutant, result in zip(mutants, results, strict=True) if not result]
    unexplained = [mutant for mutant in survivors if mutant.key not in reasons]
    for mutant in survivors:
        why = reasons.get(mutant.key, "UNEXPLAINED")
        print(f"kvcache/{mutant.file}:{mutant.line}: {mutant.function}: {mutant.change}\n    {why}")
    files = {mutant.file for mutant in mutants}
    stale = {key for key in reasons if key[0] in files} - {mutant.key for mutant in survivors}
    for file, function, change in sorted(stale):
        print(f"kvcache/{file}: {function}: {change}\n    is explained, and does not survive")
    print(
        f"{len(mutants)} mutants, {len(mutants) - len(survivors)} killed, "
        f"{len(survivors) - len(unexplained)} explained, {len(unexplained)} unexplained, "
        f"{len(stale)} explanations of none"
    )
    return len(unexplained) + len(stale)


def main(arguments: Sequence[str] | None = None) -> int:
    """Hunt every mutant; the exit status is 1 if a survivor has no reason, or a reason no survivor.

    Args:
        arguments: of the command line; None for those of the process.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.spec.mutants")
    parser.add_argument("--steps", type=int, default=30_000)
    parser.add_argument("--jobs", type=int, default=default_jobs())
    parser.add_argument("--file", choices=FILES, action="append", help="its mutants only")
    chosen = parser.parse_args(arguments)
    reasons = explained()
    mutants = [mutant for file in chosen.file or FILES for mutant in all_mutants(file)]
    results = hunt(mutants, chosen.steps, chosen.jobs)
    return 1 if report(mutants, results, reasons) else 0


if __name__ == "__main__":
    sys.exit(main())
