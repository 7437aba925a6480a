"""Draw the states that the chapters speak of, with the rules that guard each change.

A rule that a drawing names and that no page has is an error, so that a drawing cannot be outdated.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import Final

from tables import OUTPUT

from radixkv.spec.rules.rule import RULES

WHITE, ORANGE, BLUE, GREY = "#fff", "#fde3c8", "#cfe0f3", "#eee"
BOX_WIDTH: Final = 150
BOX_HEIGHT: Final = 44


@dataclass(frozen=True)
class Box:
    """A state: its text, and its upper left corner."""

    text: str
    x: int
    y: int
    fill: str = WHITE


@dataclass(frozen=True)
class Arrow:
    """A change of state: an SVG path, and its label in the middle of (x, y)."""

    path: str
    x: int
    y: int
    text: str
    rules: tuple[str, ...] = ()


def write_drawings() -> None:
    """Write the drawings."""
    _write("block_life", 820, 250, BLOCK_BOXES, BLOCK_ARROWS)
    _write("residency", 820, 310, TIER_BOXES, TIER_ARROWS)
    _write("request_life", 820, 250, REQUEST_BOXES, REQUEST_ARROWS)


BLOCK_BOXES: Final = (
    Box("free", 20, 95),
    Box("private", 230, 95, ORANGE),
    Box("published, used", 440, 95, BLUE),
    Box("published, unused", 650, 95, BLUE),
)
BLOCK_ARROWS: Final = (
    Arrow("M170 117 H230", 200, 84, "allocated", ("A1 allocate-only-free",)),
    Arrow("M380 117 H440", 410, 84, "published", ("P1 publish-own", "P3 publish-computed")),
    Arrow("M590 117 H650", 620, 84, "last release", ("R3 release-ends-lease",)),
    Arrow("M690 95 C690 40 515 40 515 95", 602, 22, "hit", ("H1 hit-is-published",)),
    Arrow("M270 95 C270 40 95 40 95 95", 182, 22, "freed", ("F1 free-only-own",)),
    Arrow(
        "M725 139 C725 235 95 235 95 139",
        410,
        228,
        "evicted",
        ("E2 evict-unused", "E3 evict-leaves-first", "E4 evict-least-recently-used"),
    ),
)

TIER_BOXES: Final = (
    Box("device", 20, 140, BLUE),
    Box("in flight to the host", 235, 60, GREY),
    Box("in flight to the device", 235, 220, GREY),
    Box("host", 450, 140, BLUE),
    Box("storage", 650, 140, BLUE),
)
TIER_ARROWS: Final = (
    Arrow(
        "M95 140 V82 H235",
        150,
        57,
        "copied out",
        (
            "T20 evicted-blocks-are-demoted",
            "T19 write-through-copies-due-blocks",
            "T34 parking-keeps-blocks-until-copied",
        ),
    ),
    Arrow("M385 82 H525 V140", 460, 57, "has arrived", ("T14 copied-block-is-found",)),
    Arrow(
        "M310 60 V32 H600",
        480,
        12,
        "failed, or given up: nowhere",
        ("T15 failed-copy-is-not-found",),
    ),
    Arrow(
        "M525 184 V242 H385",
        470,
        258,
        "loaded for an admission",
        ("T6 admission-loads-whole-host-hit",),
    ),
    Arrow(
        "M235 242 H95 V184", 150, 258, "has arrived", ("T7 request-continues-after-loaded-blocks",)
    ),
    Arrow(
        "M600 152 H650",
        625,
        110,
        "stored",
        ("T27 host-copy-is-stored-once", "T28 stored-value-matches-its-key"),
    ),
    Arrow("M650 174 H600", 660, 210, "prefetched", ("T5 prefetched-blocks-are-found",)),
    Arrow(
        "M560 184 V290 H640", 705, 287, "dropped for room", ("T23 host-drops-least-recently-used",)
    ),
)

REQUEST_BOXES: Final = (
    Box("waiting", 20, 95),
    Box("running", 330, 95, ORANGE),
    Box("ended", 650, 95, GREY),
    Box("preempted", 330, 195),
)
REQUEST_ARROWS: Final = (
    Arrow(
        "M170 117 H330", 250, 84, "admitted", ("Q7 admit-what-fits", "Q8 admission-reserves-growth")
    ),
    Arrow("M480 117 H650", 565, 84, "last token", ("Q28 output-is-the-models",)),
    Arrow("M390 139 V195", 330, 165, "preempted", ("Q24 preempt-only-when-short",)),
    Arrow("M430 195 V139", 520, 165, "resumed", ("Q4 resumed-before-new",)),
    Arrow("M95 95 C95 20 725 20 725 95", 410, 12, "aborted", ("Q32 abort-ends-at-once",)),
    Arrow("M480 217 C600 217 700 200 725 139", 660, 215, "aborted", ("Q32 abort-ends-at-once",)),
)


def _write(
    name: str, width: int, height: int, boxes: Iterable[Box], arrows: Iterable[Arrow]
) -> None:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z" fill="#555"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for box in boxes:
        parts.append(
            f'<rect x="{box.x}" y="{box.y}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6" '
            f'fill="{box.fill}" stroke="#555"/>'
        )
        parts.append(_text(box.x + BOX_WIDTH // 2, box.y + BOX_HEIGHT // 2 + 5, box.text, 13))
    for arrow in arrows:
        codes = ", ".join(RULES[rule].code for rule in arrow.rules)
        parts.append(f'<path d="{arrow.path}" fill="none" stroke="#555" marker-end="url(#tip)"/>')
        parts.append(_text(arrow.x, arrow.y, arrow.text, 12))
        parts.append(_text(arrow.x, arrow.y + 14, codes, 11, "#777"))
    parts.append("</svg>")
    (OUTPUT / f"{name}.svg").write_text("\n".join(parts), encoding="utf-8")


def _text(x: int, y: int, text: str, size: int, fill: str = "#000") -> str:
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" fill="{fill}" text-anchor="middle">'
        f"{escape(text)}</text>"
    )
