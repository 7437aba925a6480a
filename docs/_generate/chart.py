"""The directive ``{peers-chart}``: bars of the managers' times, from a table of ``figures.md``."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from typing import Final

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from tables import DOCS

PAGE: Final = DOCS / "figures.md"

ROW_HEIGHT: Final = 30
NAMES: Final = 305
"""Width of the names."""

BARS: Final = 370
"""Width of the longest bar."""


class PeersChart(SphinxDirective):
    """Draw the first table of the section "Other managers". Its colours follow the page's theme."""

    def run(self) -> list[nodes.Node]:
        """Return the drawing."""
        self.env.note_dependency(str(PAGE))
        return [nodes.raw("", _draw(sorted(_measured(PAGE.read_text("utf-8")))), format="html")]


def _measured(page: str) -> Iterator[tuple[float, float, str]]:
    """Yield each manager: its microseconds per request, the ratio to ours, and its name."""
    section = page.split("## Other managers", 1)[1].split("\n\n| Manager", 1)[1].split("\n\n")[0]
    for name, time, ratio in re.findall(r"^\| (\w.*?) \| (\d+).*? \| ([\d.]+) \|", section, re.M):
        yield float(time), float(ratio), name


def _draw(rows: list[tuple[float, float, str]]) -> str:
    most, _, _ = rows[-1]
    height = ROW_HEIGHT * len(rows)
    lines = [
        f'<svg class="chart" viewBox="0 0 {NAMES + BARS + 170} {height}" role="img" '
        'aria-label="CPU time per request of cache managers">'
    ]
    for i, (time, ratio, name) in enumerate(rows):
        y, width = i * ROW_HEIGHT, time / most * BARS
        middle = y + ROW_HEIGHT / 2
        label = f"{time:.0f} µs" if i == 0 else f"{time:.0f} µs, {ratio:.0f} times"
        lines += [
            f'<text x="{NAMES - 10}" y="{middle}" text-anchor="end">{html.escape(name)}</text>',
            f'<rect class="{"theirs" if i else "ours"}" x="{NAMES}" y="{y + 5}" '
            f'width="{width:.0f}" height="{ROW_HEIGHT - 10}"/>',
            f'<text x="{NAMES + width + 8:.0f}" y="{middle}">{label}</text>',
        ]
    return "\n".join([*lines, "</svg>"])


def setup(app: Sphinx) -> None:
    """Add the directive."""
    app.add_directive("peers-chart", PeersChart)
