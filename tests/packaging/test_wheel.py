"""The wheel holds every module and data file of the library's folders, and nothing else."""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "package": "radixkv",
    "spec": "radixkv/spec",
    "kernels": "radixkv/kernels",
    "kvcache": "radixkv/kvcache",
    "scheduler": "radixkv/scheduler",
}
"""Where each is installed."""
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


def _pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def _files(pattern: str) -> set[str]:
    """Files of the folders that match, as paths inside a wheel."""
    return {
        f"{installed}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, installed in FOLDERS.items()
        for path in (ROOT / folder).rglob(pattern)
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names in a wheel built from a copy of the sources: no build/ is left in the checkout."""
    source = tmp_path_factory.mktemp("source")
    for folder in FOLDERS:
        shutil.copytree(
            ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    built = subprocess.run(
        [sys.executable, "-c", BUILD, "dist"], cwd=source, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = (source / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_every_module_is_in_the_wheel(wheel_names: set[str]) -> None:
    assert {name for name in wheel_names if name.endswith(".py")} == _files("*.py")


def test_data_files_are_in_the_wheel(wheel_names: set[str]) -> None:
    data = {name for name in wheel_names if not name.endswith(".py")}
    assert {f"{installed}/py.typed" for installed in FOLDERS.values()} <= data
    assert "radixkv/scheduler/data/conversation_1000.jsonl" in data
    assert data == {name for name in _files("*") if PurePosixPath(name).suffix != ".py"}


def test_package_list_covers_every_folder_with_an_init() -> None:
    setuptools_table = _pyproject()["tool"]["setuptools"]
    names = [PurePosixPath(name).parent.parts for name in _files("__init__.py")]
    found = {".".join(parts): "/".join(parts[1:]) or "package" for parts in names}
    assert set(setuptools_table["packages"]) == set(found)
    assert setuptools_table["package-dir"] == found


def test_command_line_entry_point() -> None:
    assert _pyproject()["project"]["scripts"] == {"radixkv": "radixkv.scheduler.cli.main:main"}
