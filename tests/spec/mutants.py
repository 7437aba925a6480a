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
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from signal import ITIMER_REAL, SIGALRM, setitimer, signal

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
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.toml")
LIMIT_S = 60.0  # a mutant may loop without end; then it is found, too

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
    """One change: the number-th of a file, at a line, from one text to another."""

    file: str
    number: int
    line: int
    old: str
    new: str

    @property
    def change(self) -> str:
        """The change as text; with the file, its name in the list of the equivalent."""
        return f"{self.old}  ->  {self.new}"


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


def _bodies(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield the statements of functions that are not there to check: what can be wrong."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name not in ("check", "nodes", "idle_nodes"):
            for statement in node.body:
                if not (
                    isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
                ):
                    yield statement


def sites(tree: ast.Module) -> Iterator[tuple[ast.AST, str, int | None, ast.AST]]:
    """Yield each place of a mutation: the parent, its field, the index in it, the new node."""
    for statement in _bodies(tree):
        for parent in ast.walk(statement):
            if isinstance(parent, ast.Assert | ast.AnnAssign):
                continue
            for field, value in ast.iter_fields(parent):
                for index, child in enumerate(value if isinstance(value, list) else [value]):
                    if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                        place = index if isinstance(value, list) else None
                        yield from ((parent, field, place, new) for new in changes(child))
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        if function.name not in ("check", "nodes", "idle_nodes"):
            for index, statement in enumerate(function.body):
                yield from ((function, "body", index, new) for new in changes(statement))


def _mutate(tree: ast.Module, number: int) -> Mutant | None:
    """Make the number-th change to a tree; None if it has fewer."""
    for count, (parent, field, index, new) in enumerate(sites(tree)):
        if count < number:
            continue
        value = getattr(parent, field)
        old = value if index is None else value[index]
        ast.copy_location(new, old)
        if index is None:
            setattr(parent, field, new)
        else:
            value[index] = new
        ast.fix_missing_locations(tree)
        return Mutant("", number, getattr(old, "lineno", 0), _text(old), _text(new))
    return None


def _text(node: ast.AST) -> str:
    return ast.unparse(node).split("\n")[0]


def all_mutants() -> list[Mutant]:
    """Return every mutant, without the code."""
    found = []
    for file in FILES:
        for number in range(sum(1 for _ in sites(ast.parse(sources()[file])))):
            mutant = _mutate(ast.parse(sources()[file]), number)
            assert mutant is not None, "a change is counted and not found"
            found.append(Mutant(file, number, mutant.line, mutant.old, mutant.new))
    return found


def kill(mutant: Mutant, num_steps: int) -> str:
    """Return what finds a mutant: a rule, an error; "" if it survives."""
    tree = ast.parse(sources()[mutant.file])
    _mutate(tree, mutant.number)
    signal(SIGALRM, _expired)
    setitimer(ITIMER_REAL, LIMIT_S)
    try:
        module = load_code({mutant.file: compile(tree, str(FOLDER / mutant.file), "exec")})
        pool = PoolSubject(pool_adapter.make_factory(module))
        cache = CacheSubject(cache_adapter.make_factory(module), "full")
        for subject, steps in (
            (cache, num_steps // 10),
            (pool, num_steps // 10),
            (cache, num_steps),
        ):
            finding = run(subject, steps, steps).finding
            if finding is not None:
                return finding.rule
    except Exception as error:
        return type(error).__name__
    finally:
        setitimer(ITIMER_REAL, 0)
    return ""


def _expired(number: int, frame: object) -> None:
    raise TimeoutError("a mutant loops without end")


def explained() -> dict[tuple[str, str], str]:
    """Return the reasons by file and change."""
    entries = tomllib.loads(EQUIVALENT.read_text("utf-8"))["equivalent"]
    return {
        (entry["file"], change): entry["why"] for entry in entries for change in entry["changes"]
    }


def report(mutants: Sequence[Mutant], results: Sequence[str]) -> list[Mutant]:
    """Print who survived; return those that nobody has explained."""
    reasons = explained()
    survivors = [mutant for mutant, result in zip(mutants, results, strict=True) if not result]
    unexplained = [each for each in survivors if (each.file, each.change) not in reasons]
    for mutant in survivors:
        why = reasons.get((mutant.file, mutant.change), "UNEXPLAINED")
        print(f"kvcache/{mutant.file}:{mutant.line}: {mutant.change}\n    {why}")
    for file, change in reasons.keys() - {(each.file, each.change) for each in survivors}:
        if file in {mutant.file for mutant in mutants}:
            print(f"kvcache/{file}: {change}\n    is explained, and does not survive (any more)")
    print(
        f"{len(mutants)} mutants, {len(mutants) - len(survivors)} killed, "
        f"{len(survivors) - len(unexplained)} explained, {len(unexplained)} unexplained"
    )
    return unexplained


def main() -> int:
    """Hunt every mutant; the exit status is 1 if one survives unexplained."""
    parser = argparse.ArgumentParser(prog="python -m tests.spec.mutants")
    parser.add_argument("--steps", type=int, default=30_000)
    parser.add_argument("--jobs", type=int, default=default_jobs())
    parser.add_argument("--file", choices=FILES, help="only the mutants of one file")
    arguments = parser.parse_args()
    mutants = [each for each in all_mutants() if arguments.file in (None, each.file)]
    with ProcessPoolExecutor(arguments.jobs, get_context("spawn")) as pool:
        task = partial(kill, num_steps=arguments.steps)
        results = list(pool.map(task, mutants, chunksize=8))
    return 1 if report(mutants, results) else 0


if __name__ == "__main__":
    sys.exit(main())
