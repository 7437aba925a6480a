"""Draw the life of a block, with the rules that guard each change of its owner."""

from __future__ import annotations

from html import escape
from typing import Final

from tables import OUTPUT

from radixkv.spec.rules.rule import RULES

BOXES: Final = (
    ("free", 20),
    ("private", 230),
    ("published, used", 440),
    ("published, unused", 650),
)
"""Owner of the block, and the left edge of its box."""

FORWARD: Final = (
    (0, "allocated", ("A1 allocate-only-free", "A3 allocate-distinct")),
    (1, "published", ("P1 publish-own", "P2 publish-once", "P3 publish-computed")),
    (2, "last release", ("R4 release-ends-it",)),
)
"""Index of the box before the arrow, the event, and its rules."""

WIDTH: Final = 150


def write_drawings() -> None:
    """Write ``block_life.svg``, which the chapter about the cache shows."""
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 820 250" font-family="sans-serif">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z" fill="#555"/></marker></defs>',
        '<rect width="820" height="250" fill="#fff"/>',
    ]
    for name, left in BOXES:
        fill = "#fff" if name == "free" else "#fde3c8" if name == "private" else "#cfe0f3"
        parts.append(
            f'<rect x="{left}" y="95" width="{WIDTH}" height="46" rx="6" fill="{fill}" '
            f'stroke="#555"/>{_text(left + WIDTH / 2, 123, name, 15)}'
        )
    for index, event, rules in FORWARD:
        left = BOXES[index][1] + WIDTH
        middle = (left + BOXES[index + 1][1]) / 2
        parts.append(_arrow(f"M{left} 118 H{BOXES[index + 1][1]}"))
        parts += [_text(middle, 84, event, 12), _text(middle, 160, _codes(rules), 11)]
    parts += [
        _arrow("M690 95 C690 45 515 45 515 95"),
        _text(602, 36, f"hit: {_codes(('H1 hit-is-published', 'H2 hit-is-longest'))}", 12),
        _arrow("M725 141 C725 235 95 235 95 141"),
        _text(
            520, 228, "evicted: " + _codes(("E2 evict-unused", "E3 evict-leaf", "E4 evict-coldest"))
        ),
        _arrow("M270 95 C270 30 95 30 95 95"),
        _text(180, 36, f"freed: {_codes(('F1 free-only-own', 'F2 free-only-spare'))}", 12),
        "</svg>",
    ]
    (OUTPUT / "block_life.svg").write_text("\n".join(parts), encoding="utf-8")


def _arrow(path: str) -> str:
    return f'<path d="{path}" fill="none" stroke="#555" marker-end="url(#tip)"/>'


def _text(x: float, y: float, text: str, size: int = 12) -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="middle">{escape(text)}</text>'


def _codes(names: tuple[str, ...]) -> str:
    return ", ".join(RULES[name].code for name in names)
