"""The README's example prints what it says, and what the docs name exists."""

import argparse
import doctest
import re
from collections.abc import Iterator
from pathlib import Path

from radixkv.scheduler.cli.main import build_parser

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"

FILE = re.compile(r"`((?:kernels|kvcache|scheduler|spec|tests|benchmarks)/[\w/]+\.py)`")


def test_the_example_prints_what_the_readme_says() -> None:
    result = doctest.testfile(str(README), module_relative=False, encoding="utf-8")
    assert result.attempted > 5
    assert result.failed == 0


def test_the_files_that_the_docs_name_exist() -> None:
    pages = [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "docs/howto").rglob("*.md"),
    ]
    named = {name for page in pages for name in FILE.findall(page.read_text(encoding="utf-8"))}
    assert len(named) > 30
    roots = (ROOT, ROOT / "tests")  # tests/README.md names files beside it
    missing = [name for name in named if not any((root / name).is_file() for root in roots)]
    assert sorted(missing) == []


def test_the_reference_describes_every_command() -> None:
    page = (ROOT / "docs/reference/cli.md").read_text(encoding="utf-8")
    described = re.findall(r"^```\{command-options\} (.+)$", page, re.MULTILINE)
    assert sorted(described) == sorted(name for name, _ in _commands(build_parser()))


def _commands(
    parser: argparse.ArgumentParser,
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield the commands that have no commands of their own, by name."""
    groups = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not groups:
        yield parser.prog.removeprefix("radixkv "), parser
    for group in groups:
        for command in group.choices.values():
            yield from _commands(command)


def test_the_docs_name_the_commands_that_keep_compiled_programs() -> None:
    option = "--no-compilation-cache"
    keep = {name for name, each in _commands(build_parser()) if option in each.format_help()}
    assert keep >= {"prefill-node", "decode-node"}
    for page, line in (
        ("docs/architecture.md", r"^\*\*The compilation cache\.\*\* (.+) keep"),
        ("docs/reference/cli.md", r"^- (.+) keep compiled programs"),
    ):
        [found] = re.findall(line, (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
        named = {name.removeprefix("radixkv ") for name in re.findall(r"`(.+?)`", found)}
        assert "the nodes" in found
        assert named == keep - {"prefill-node", "decode-node"}


def test_every_paragraph_of_the_changelog_has_its_beginning() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert [each for each in text.split("\n\n") if each[0].isspace()] == []


def test_the_pages_about_nodes_name_every_transport() -> None:
    nodes = dict(_commands(build_parser()))["decode-node"]
    [action] = [each for each in nodes._actions if each.dest == "transport"]
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| KV, `(\w+)` \|", text, re.MULTILINE) == list(action.choices or ())
    for page, line in (
        ("README.md", r"JAX transfers.* move the KV"),
        ("docs/architecture.md", r"moves KV between nodes: .*"),
        ("docs/comparison.md", r"Prefill and decode on separate nodes .*"),
        ("docs/handoff.md", r"\*\*A transport\*\* .*"),
        ("docs/index.md", r"Start nodes, and move KV .*"),
        ("docs/glossary.md", r"A \*transfer engine\* is .*"),
    ):
        found = re.findall(line, (ROOT / page).read_text(encoding="utf-8"))
        lines = [each.lower() for each in found]
        assert any(all(str(each) in line for each in action.choices or ()) for line in lines), page


def test_the_reference_has_every_protocol_of_the_specification() -> None:
    page = (ROOT / "docs/reference/spec.md").read_text(encoding="utf-8")
    named = {name.rpartition(".")[2] for name in re.findall(r"^[\w.]+$", page, re.MULTILINE)}
    files = [*(ROOT / "spec/adapters").glob("*.py"), *(ROOT / "spec/harness").glob("*_world.py")]
    text = "".join(each.read_text(encoding="utf-8") for each in files)
    protocols = re.findall(r"^class (\w+)\([\w, ]*\bProtocol\):", text, re.MULTILINE)
    factories = re.findall(r"^(\w*Factory): TypeAlias = ", text, re.MULTILINE)
    promises = re.findall(r"^class (\w*Promises)\b", text, re.MULTILINE)
    assert {"Scheduler", "TierManager", "HandoffSystem", "Pool"} < {*protocols}
    assert {*protocols, *factories, *promises} - named == set()
