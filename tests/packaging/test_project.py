"""What pyproject.toml says agrees with CI, with the release workflow and with the README."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from radixkv.scheduler.cli.main import build_parser

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
OURS = {"test", "docs", "lint", "dev"}


def _pythons() -> list[str]:
    prefix = "Programming Language :: Python :: 3."
    return [f"3.{name.removeprefix(prefix)}" for name in PROJECT["classifiers"] if prefix in name]


def test_ci_tries_each_python_that_is_newer_than_the_oldest() -> None:
    oldest, *newer = _pythons()
    assert PROJECT["requires-python"] == f">={oldest}"
    found = re.search(r"for version in ([\d. ]+); do", (ROOT / ".ci/run").read_text("utf-8"))
    assert found is not None
    assert found[1].split() == newer[::-1]


def test_the_readme_names_every_extra() -> None:
    named = set(re.findall(r"`([\w-]+)`", (ROOT / "README.md").read_text("utf-8")))
    extras = set(PROJECT["optional-dependencies"])
    assert extras >= OURS
    assert extras - OURS - named == set()


def _requirements(extra: str) -> Iterator[str]:
    """The distributions that an extra names, with those of the extras in it."""
    for each in PROJECT["optional-dependencies"][extra]:
        name, *extras = re.findall(r"[\w-]+", each.partition("]")[0] if "[" in each else each)
        if name == "radixkv":
            for other in extras:
                yield from _requirements(other)
        else:
            yield name


def test_the_extra_docs_has_what_the_pages_and_the_examples_import() -> None:
    """Those of the nodes that an example starts, too."""
    pages = "".join(each.read_text("utf-8") for each in (ROOT / "docs/reference").rglob("*.md"))
    documented = re.findall(r"automodule:: radixkv\.(\S+)", pages)
    examples = [*(ROOT / "docs/examples").glob("*.py")]
    files = [ROOT / f"{name.replace('.', '/')}.py" for name in documented] + examples
    assert len(examples) > 5 < len(documented)
    imported: set[str] = set()
    for tree in (ast.parse(each.read_text("utf-8")) for each in files):
        for node in tree.body:
            if isinstance(node, ast.Import):
                imported |= {each.name.partition(".")[0] for each in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(str(node.module).partition(".")[0])
    ours = {"radixkv", *(each.name for each in (ROOT / "docs/examples").iterdir())}
    needed = (imported | set(_requirements("nodes"))) - sys.stdlib_module_names - ours
    assert needed >= {"cryptography", "hypothesis", "jax", "pytest"}
    always = {re.findall(r"[\w-]+", each)[0] for each in PROJECT["dependencies"]}
    assert needed - always - set(_requirements("docs")) == set()


WORKFLOW: Any = importlib.import_module("yaml").safe_load(
    (ROOT / ".github/workflows/release.yml").read_text("utf-8")
)
JOBS: dict[str, Any] = WORKFLOW["jobs"]


def _commands(job: str) -> list[str]:
    """The lines of all scripts of a job."""
    return "\n".join(step.get("run", "") for step in JOBS[job]["steps"]).splitlines()


def test_a_release_is_built_then_tested_then_published() -> None:
    triggers = WORKFLOW[True]  # YAML 1.1 reads the key `on` so
    assert triggers == {"push": {"tags": ["v*"]}, "workflow_dispatch": None}
    assert [(name, job.get("needs")) for name, job in JOBS.items()] == [
        ("build", None),
        ("test", "build"),
        ("publish", "test"),
    ]
    for job in JOBS.values():
        assert job["timeout-minutes"] <= 20
        assert all(("uses" in step) != ("run" in step) for step in job["steps"])
    stored = [step["with"] for step in JOBS["build"]["steps"] if "upload" in step.get("uses", "")]
    assert [(each["name"], each["path"]) for each in stored] == [("dist", "dist/")]
    for name in ("test", "publish"):
        assert JOBS[name]["steps"][0]["with"] == {"name": "dist", "path": "dist/"}


def test_only_the_publisher_may_prove_who_it_is_and_only_for_a_tag() -> None:
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert JOBS["publish"]["permissions"] == {"id-token": "write"}
    assert JOBS["publish"]["if"] == "github.event_name == 'push'"
    assert [name for name, job in JOBS.items() if "permissions" in job] == ["publish"]
    text = (ROOT / ".github/workflows/release.yml").read_text("utf-8")
    assert "secrets." not in text and "password" not in text
    assert [step["uses"] for step in JOBS["publish"]["steps"][1:]] == [
        "pypa/gh-action-pypi-publish@release/v1"
    ]


def test_both_files_are_tested_with_each_python_in_a_bare_environment() -> None:
    job = JOBS["test"]
    assert job["strategy"]["matrix"] == {"python": _pythons(), "file": ["*.whl", "*.tar.gz"]}
    assert job["container"] == "python:${{ matrix.python }}-slim"
    assert not any("checkout" in step.get("uses", "") for step in job["steps"])


def test_the_tests_of_a_release_run_commands_that_exist() -> None:
    lines = [line for line in _commands("test") if "/bin/radixkv " in line]
    assert len(lines) >= 5
    for line in lines:
        words = line.split("/bin/radixkv ")[1].split()
        if words[-1].lstrip("-") in ("help", "version"):
            words.pop()  # it would exit
        if words:
            build_parser().parse_args(words)
    [line] = [line for line in _commands("test") if "[" in line]
    extras = re.findall(r"\[([\w,-]+)\]", line)[0].split(",")
    assert set(extras) <= set(PROJECT["optional-dependencies"]) - OURS


@pytest.mark.parametrize(
    ("tag", "changelog", "error"),
    [
        ("v{}", "## {} (2027-01-01)", None),
        ("v{}.1", "## {} (2027-01-01)", "the tag is v{0}.1, the version {0}\n"),
        ("v{}", "## {} (unreleased)", "CHANGELOG.md has no date for {}\n"),
    ],
)
def test_the_tag_and_the_changelog_name_the_version(
    tmp_path: Path, tag: str, changelog: str, error: str | None
) -> None:
    version = PROJECT["version"]
    (tmp_path / "pyproject.toml").write_text(f'[project]\nversion = "{version}"\n')
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n{changelog.format(version)}\n")
    [script] = [step["run"] for step in JOBS["build"]["steps"] if "tag" in step.get("name", "")]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "GITHUB_REF_NAME": tag.format(version), "PATH": path}
    done = subprocess.run(
        ["bash", "-ec", script], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (bool(error), (error or "").format(version))
