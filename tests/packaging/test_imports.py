"""Which folder may import which, and what an import loads."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Arrows point down only: scheduler -> kvcache -> kernels; spec stands alone, and only the fuzz
# command points at it.
ALLOWED = {
    "spec": {"spec"},
    "kernels": {"kernels"},
    "kvcache": {"kvcache", "kernels"},
    "scheduler": {"scheduler", "kvcache", "kernels", "spec"},
}
FUZZ = {"scheduler/fuzz", "scheduler/cli/fuzz.py"}


def _imports(path: Path) -> Iterator[str]:
    """Absolute names of the modules that a file of the library imports, at any depth in it."""
    package = ["radixkv", *path.relative_to(ROOT).parent.parts]
    for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            assert node.module is not None
            yield node.module
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - (node.level - 1)]
            assert base, f"{path}:{node.lineno}: relative import above the distribution"
            if base == ["radixkv"] and node.module is None:
                yield from (f"radixkv.{alias.name}" for alias in node.names)
            else:
                yield ".".join([*base, *(node.module or "").split(".")]).rstrip(".")


@pytest.mark.parametrize("folder", ALLOWED)
def test_a_folder_imports_only_what_lies_below_it(folder: str) -> None:
    found = {
        name.split(".")[1]: path.relative_to(ROOT)
        for path in (ROOT / folder).rglob("*.py")
        for name in _imports(path)
        if name.startswith("radixkv.")
    }
    assert set(found) <= ALLOWED[folder], found


def test_only_the_fuzz_command_imports_the_specification() -> None:
    for path in (ROOT / "scheduler").rglob("*.py"):
        name = path.relative_to(ROOT).as_posix()
        if not any(name == fuzz or name.startswith(f"{fuzz}/") for fuzz in FUZZ):
            found = [each for each in _imports(path) if each.startswith("radixkv.spec")]
            assert found == [], path


@pytest.mark.parametrize("folder", ALLOWED)
def test_imports_inside_the_library_are_relative(folder: str) -> None:
    absolute = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Import) and any(a.name.startswith("radixkv") for a in node.names))
        or (
            isinstance(node, ast.ImportFrom)
            and node.level == 0
            and (node.module or "").startswith("radixkv")
        )
    ]
    assert absolute == []


def _loaded(program: str) -> set[str]:
    """Top-level modules in memory after a fresh interpreter has run the program."""
    report = "import sys; print('\\n' + ' '.join({m.split('.')[0] for m in sys.modules}))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"{program}\n{report}"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("package", ["radixkv.kvcache", "radixkv.spec"])
def test_the_control_plane_loads_no_jax(package: str) -> None:
    loaded = _loaded(f"import {package}")
    assert "radixkv" in loaded
    assert loaded.isdisjoint({"jax", "jaxlib", "jaxtyping"})
    assert package != "radixkv.spec" or loaded.isdisjoint({"numpy", "hypothesis", "pytest"})


HELP = """
from radixkv.scheduler.cli.main import main
try:
    status = main(["--help"])
except SystemExit as stop:
    status = stop.code
assert not status, status
"""


def test_help_loads_neither_jax_nor_numpy() -> None:
    assert _loaded(HELP).isdisjoint({"jax", "jaxlib", "numpy", "hypothesis"})
