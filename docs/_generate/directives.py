"""The role and the directive of the specification's pages."""

from __future__ import annotations

from typing import Any

import tables
from docutils import nodes
from docutils.statemachine import StringList
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective, SphinxRole

from radixkv.spec.rules.rule import RULES


class RuleRole(SphinxRole):
    """``{rule}`P3 publish-computed` ``: the name of a rule, linked to its trace.

    A name that no rule has is a warning, so a page cannot outlive a rule.
    """

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        """Return a reference to the rule's place in the appendix."""
        rule = RULES.get(self.text)
        if rule is None:
            message = self.inliner.reporter.warning(f"no rule is called {self.text!r}")
            return [nodes.literal(text=self.text)], [message]
        reference: Any = addnodes.pending_xref(
            "",
            nodes.literal(text=self.text),
            reftype="ref",
            refdomain="std",
            reftarget=f"rule-{rule.code.lower()}",
            refexplicit=True,
            refwarn=True,
            refdoc=self.env.docname,
        )
        return [reference], []


class PlantedBug(SphinxDirective):
    """``{planted-bug} "name"``: the change of our source, its shortest trace and a drawing."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """Return the change, the trace and the drawing."""
        lines = list(tables.show_bug(self.arguments[0].strip('"')))
        container = nodes.container(classes=["planted-bug"])
        self.state.nested_parse(StringList("\n".join(lines).split("\n")), 0, container)
        return [container]


def setup(app: Sphinx) -> None:
    """Add the role and the directive."""
    app.add_role("rule", RuleRole())
    app.add_directive("planted-bug", PlantedBug)
