"""The directive ``{command-options}``: usage and options of a command, from its argument parser."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from radixkv.scheduler.cli.main import build_parser


class CommandOptions(SphinxDirective):
    """``{command-options} bench cache``: what ``radixkv bench cache --help`` says.

    Each option can be linked: ``{option}`radixkv replay --gpu` ``. A command that does not exist is
    an error, so the page cannot outlive it.
    """

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """Return the usage and the options."""
        parser = build_parser()
        for word in self.arguments[0].split():
            choices = _subcommands(parser)
            if word not in choices:
                raise self.error(f"{parser.prog} has no command {word!r}")
            parser = choices[word]
        container = nodes.container(classes=["command-options"])
        self.state.nested_parse(StringList(list(_describe(parser))), 0, container)
        return list(container.children)


def _subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= action.choices
    return found


def _describe(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield MyST. What argparse calls groups are paragraphs in bold, with their options below."""
    usage = " ".join(parser.format_usage().removeprefix("usage: ").split())
    yield from ("```console", usage, "```", "", f"```{{program}} {parser.prog}", "```", "")
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if action.dest != "help"]
        if not actions or any(isinstance(a, argparse._SubParsersAction) for a in actions):
            continue
        yield from (f"**{(group.title or '').capitalize()}**", "")
        for action in actions:
            yield from (f":::{{option}} {_signature(action)}", _help(parser, action), ":::", "")


def _signature(action: argparse.Action) -> str:
    """Return an option as it is typed, such as ``--dtype {auto,float32}``."""
    value = ""
    if action.nargs != 0:
        choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else ""
        value = str(action.metavar or choices or action.dest.upper())
    return ", ".join(f"{name} {value}".strip() for name in action.option_strings or [""])


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """Return the help of an option, with options and addresses as code."""
    text = parser._get_formatter()._expand_help(action)
    text = text.replace("`", "")
    text = re.sub(r"(?<![\w-])--[a-z][\w-]*|\w+://[^\s,]+|\w+:[A-Z]+\b", r"`\g<0>`", text)
    return text[:1].upper() + text[1:] + "."


def setup(app: Sphinx) -> None:
    """Add the directive."""
    app.add_directive("command-options", CommandOptions)
