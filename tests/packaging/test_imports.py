"""Imports inside the library are relative, and an import loads no more than it needs.

`lint-imports` checks the layers, by the contracts in pyproject.toml.
"""

import ast
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import radixkv
from radixkv.scheduler.serving import LLM

ROOT = Path(__file__).parents[2]

FOLDERS = ("package", "spec", "kernels", "kvcache", "scheduler")


@pytest.mark.parametrize("folder", FOLDERS)
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


@pytest.mark.parametrize("folder", FOLDERS)
def test_what_is_named_in_a_message_or_a_docstring_exists(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        for name in re.findall(rf"\bradixkv\.(?:{'|'.join(FOLDERS)})(?:\.\w+)*", path.read_text()):
            try:
                pkgutil.resolve_name(name)
            except (ImportError, AttributeError):
                pytest.fail(f"{path.relative_to(ROOT)}: there is no {name}")


def _loaded(program: str) -> set[str]:
    """Top-level modules in memory after a fresh interpreter has run the program."""
    report = "import sys; print('\\n' + ' '.join({m.split('.')[0] for m in sys.modules}))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"{program}\n{report}"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("package", ["radixkv", "radixkv.kvcache", "radixkv.spec"])
def test_the_control_plane_loads_no_jax(package: str) -> None:
    loaded = _loaded(f"import {package}")
    assert "radixkv" in loaded
    assert loaded.isdisjoint({"jax", "jaxlib", "jaxtyping"})
    assert package == "radixkv.kvcache" or loaded.isdisjoint({"numpy", "hypothesis", "pytest"})


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


def test_the_root_has_the_version_and_the_llm() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        version = tomllib.load(file)["project"]["version"]
    assert radixkv.__version__ == version
    assert radixkv.LLM is LLM
    with pytest.raises(AttributeError, match=r"^module 'radixkv' has no attribute 'nothing'$"):
        radixkv.nothing  # noqa: B018
