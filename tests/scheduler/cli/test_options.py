"""Every option of every command is read, and reaches the nodes that a command starts."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from radixkv.scheduler.cli import serve, serve_on_nodes
from radixkv.scheduler.cli.generate_on_nodes import node_options
from radixkv.scheduler.cli.main import build_parser
from radixkv.scheduler.cli.options.generate import GUIDED
from radixkv.scheduler.cli.shared.prompts import Sizes
from radixkv.scheduler.engine import Engine
from radixkv.scheduler.request import SamplingParams
from radixkv.scheduler.serving import LLM

CLI = Path(__file__).parents[3] / "scheduler" / "cli"
BY_NAME = {*GUIDED, *(each.name for each in fields(SamplingParams))}
"""Read by names from a list: `tests/scheduler/cli/test_generate.py` has a case for each."""
OF_ONE_NODE = {
    *("help", "name", "gateway", "listen", "secret_file", "parent_pid", "storage"),
    *("kv_events", "kv_events_replay", "kv_events_topic"),
}
"""Options of a node that the command which starts it gives it for itself, or refuses."""

OF_SIZES = {"device_blocks", "token_budget", "max_running", "max_model_len"}


def commands(parser: Any, module: str = "") -> Iterator[tuple[str, argparse.ArgumentParser, str]]:
    """Yield name, parser and module of each command that runs something."""
    module = parser.get_default("module") or module
    below = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    if not below:
        yield parser.prog.removeprefix("radixkv "), parser, module
    for actions in below:
        for each in actions.choices.values():
            yield from commands(each, module)


PARSERS = {name: parser for name, parser, _ in commands(build_parser())}
MODULES = {name: module for name, _, module in commands(build_parser())}


def file_of(*names: str) -> Path | None:
    """Return the file of a module of the command line, or None."""
    path = CLI.joinpath(*names)
    return next(
        (each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file()), None
    )


def files_below(path: Path | None, found: set[Path]) -> set[Path]:
    """Add a module of the command line, and those that it imports, to `found`."""
    if path is None or path in found:
        return found
    found.add(path)
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        base = path.parents[node.level - 1]
        if base != CLI and CLI not in base.parents:
            continue
        folder = base.relative_to(CLI).parts
        module = (*folder, *(node.module or "").split(".")) if node.module else folder
        files_below(file_of(*module), found)
        for name in node.names:
            files_below(file_of(*module, name.name), found)
    return found


def names_read(path: Path) -> Iterator[str]:
    """Yield the attributes of parsed arguments that a module reads, and its names in quotes."""
    is_option = "options" in path.relative_to(CLI).parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            if getattr(node.value, "id", getattr(node.value, "attr", "")) in (
                *("arguments", "_arguments", "given"),
            ):
                yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not is_option:
            yield node.value


@pytest.mark.parametrize("command", PARSERS)
def test_every_option_is_read(command: str) -> None:
    files = files_below(file_of(*MODULES[command].split(".")), {CLI / "main.py"})
    read = {name for path in files for name in names_read(path)} | BY_NAME
    assert not {each.dest for each in PARSERS[command]._actions} - read - {"help"}


@pytest.mark.parametrize("command", ["generate", "serve"])
def test_the_help_says_what_a_command_waits_for(command: str) -> None:
    """Requests of a server wait for a role without nodes, however long."""
    told = " ".join(PARSERS[command].format_help().split())
    back = ", and for one to come back when none of its role is left"
    later = back if command == "generate" else ""
    assert f"how long to wait for nodes to connect{later} (default: 120)" in told


def another_value(action: argparse.Action, of_node: argparse.Action) -> list[str]:
    """Return an option and a value that both commands take and that is the default of neither."""
    option = action.option_strings[0]
    if action.nargs == 0:
        return [option]
    if action.choices:
        both = [each for each in action.choices if each in (of_node.choices or ())]
        return [
            option,
            next(each for each in both if each not in (action.default, of_node.default)),
        ]
    return [option, "0.5" if action.dest == "memory_fraction" else "7"]


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("command", ["generate", "serve"])
def test_nodes_get_the_options_of_the_command_that_starts_them(command: str, role: str) -> None:
    starting, node = PARSERS[command], PARSERS[f"{role}-node"]
    of_node = {each.dest: each for each in node._actions}
    of_both = of_node.keys() & {each.dest for each in starting._actions}
    passed_on = of_both - OF_ONE_NODE - OF_SIZES - {"model", "revision"}
    argv = ["a model"]
    for action in starting._actions:
        if action.dest in passed_on:
            argv += another_value(action, of_node[action.dest])
        elif action.required and action.option_strings:
            argv += [action.option_strings[0], "7"]
    given = starting.parse_args(argv)
    sizes = Sizes(num_blocks=8, token_budget=9, max_running=10, max_model_len=11)
    options = [str(each) for each in node_options(given, sizes, role)]
    got = node.parse_args(["a model", "--gateway", "127.0.0.1:1", *options])
    assert {dest: getattr(got, dest) for dest in OF_SIZES} == dict(
        device_blocks=8, token_budget=9, max_running=10, max_model_len=11
    )
    for dest in passed_on:
        assert getattr(got, dest) == getattr(given, dest), dest
        assert getattr(got, dest) != node.get_default(dest), dest


def test_the_engine_of_serve_gets_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    makes = MagicMock()
    monkeypatch.setattr(serve, "LLM", makes)
    monkeypatch.setattr(serve, "gc", MagicMock())
    of_engine = {*signature(LLM).parameters, *signature(Engine).parameters}
    of_engine -= {"host"}  # the command's own is its address
    own_names = {"num_blocks": "device_blocks", "mesh": "tp"}
    actions = {each.dest: each for each in PARSERS["serve"]._actions}
    named = {name: own_names.get(name, name) for name in of_engine}
    named = {name: dest for name, dest in named.items() if dest in actions}
    assert {"storage_max_bytes", "preempt", "num_blocks", "memory_fraction"} <= named.keys()
    argv = ["a model"]
    for dest in sorted({*named.values()} - {"model", "tp", "revision"}):
        argv += another_value(actions[dest], actions[dest])
    given = PARSERS["serve"].parse_args([*argv, "--revision", "main"])
    on_events = MagicMock()
    serve._load(given, on_events, None)
    [call] = makes.mock_calls
    got = {"model": call.args[0], **call.kwargs}
    assert got["on_events"] is on_events and got["mesh"] is None
    for name in named.keys() - {"mesh"}:
        assert got[name] == getattr(given, named[name]), name


def test_the_help_of_serve_says_what_nodes_have() -> None:
    helps = {each.dest: str(each.help) for each in PARSERS["serve"]._actions}
    assert helps["max_running"].endswith(f", or 16 on a CPU; nodes: {serve_on_nodes._MAX_RUNNING})")
    budget = serve_on_nodes._TOKEN_BUDGET
    assert helps["token_budget"].endswith(f", or 256 on a CPU; nodes: {budget})")


@pytest.mark.parametrize("command", ["generate", "serve", "prefill-node", "decode-node"])
def test_the_help_of_transports_says_what_storage_needs(command: str) -> None:
    [transport] = [each for each in PARSERS[command]._actions if each.dest == "transport"]
    assert "the server of --storage, which needs --host-blocks" in str(transport.help)


def test_the_help_of_fuzz_says_what_each_factory_takes() -> None:
    actions = {each.dest: each for each in PARSERS["fuzz"]._actions}
    made_of_sizes = {"cache": "(num_blocks, block_size)", "pool": "(num_blocks)"}
    assert made_of_sizes.keys() < {*(actions["what"].choices or ())}
    for kind, sizes in made_of_sizes.items():
        assert f"of a {kind} from {sizes}, " in str(actions["target"].help)
    assert "of every other kind from a dictionary; " in str(actions["target"].help)
