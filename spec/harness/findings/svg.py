"""A finding as an SVG: its calls, and the blocks before the failing one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from html import escape
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Final

from ...model.cache import CACHED, EVICTED, FREE, LEFT, CacheModel
from ...model.ghost import POISON, UNWRITTEN, Tag
from ...rules.rule import Violation
from ..engine import Finding, Subject
from .program import to_call, world_before

if TYPE_CHECKING:
    from ..cache.world import CacheWorld

LINE: Final = 18
MARGIN: Final = 12
CELL: Final = 26
BOX: Final = (118, 34)
GAP: Final = (22, 26)
CHAR: Final = 7.5
WIDEST: Final = 110
"""Characters in a line."""
LABEL: Final = 14
"""Characters in a box."""
SLOTS: Final = 8
"""Slots of a block that are shown."""

FILL: Final = {
    "free": "#ffffff", "private": "#ffd9a8", "cached": "#bfe3c6", "used": "#7cc48d",
    "evicted": "#f4b6b6", "shared": "#7cc48d",
}  # fmt: skip

STYLE: Final = (
    "text{font:12px monospace;fill:#222}rect{stroke:#555}"
    "line{stroke:#555}.bad{fill:#b00020;font-weight:bold}.background{fill:#fff;stroke:none}"
)


def to_svg(subject: Subject, finding: Finding, *, calls: bool = True) -> str:
    """Draw a finding as an SVG document.

    The calls are at the top, the failing one in red. Below is the state before it. At depth ``api``
    of a cache these are the block tables, what was last written to each block, and the same when
    the rule is broken. With a model, it is the tree of published blocks and the pool. Other worlds
    are drawn as text.

    Args:
        subject: the subject of the finding.
        finding: the finding, preferably shrunk.
        calls: whether to include the calls.
    """
    world: Any = world_before(subject, finding)
    canvas = _Canvas()
    if calls:
        _calls(canvas, subject, finding)
    model: CacheModel | None = getattr(world, "model", None)
    if getattr(model, "cached", None) is not None and model is not None:
        _Tree(canvas, world, model).draw()
        _strip(canvas, model)
        for line in world.picture().split("\n"):
            if " block " not in line and not line.startswith("blocks |"):
                canvas.text(line)
    elif hasattr(world, "device") and hasattr(world, "past"):
        for title in ("before the last call", "when the rule is broken"):
            canvas.text(title)
            _Tables(canvas, world).draw(finding.why)
            with suppress(Violation):
                world.apply(finding.trace[-1])
        canvas.text("in a block: the position and the token of each slot, and who has this prefix")
    else:
        for line in world.picture().split("\n"):
            canvas.text(line)
    return canvas.document()


def _calls(canvas: _Canvas, subject: Subject, finding: Finding) -> None:
    for operation in finding.trace[:-1]:
        canvas.text(to_call(operation, subject))
    if finding.trace:
        canvas.text(to_call(finding.trace[-1], subject), "bad")
    for line in wrap(f"{finding.rule}: {finding.why}", WIDEST):
        canvas.text(line, "bad")
    canvas.skip(LINE // 2)


class _Canvas:
    """SVG elements from top to bottom, and their extent."""

    def __init__(self) -> None:
        self.elements: list[str] = []
        self.bottom = float(MARGIN)
        self.right = 0.0

    def skip(self, height: float) -> None:
        self.bottom += height

    def text(self, text: str, style: str = "") -> None:
        self.bottom += LINE
        self.text_at(MARGIN, self.bottom - 5, text, style)

    def text_at(self, x: float, y: float, text: str, style: str = "") -> None:
        attribute = f' class="{style}"' if style else ""
        self.elements.append(
            f'<text x="{x:g}" y="{y:g}" xml:space="preserve"{attribute}>{escape(text)}</text>'
        )
        self.right = max(self.right, x + CHAR * len(text))

    def box(self, x: float, y: float, size: tuple[float, float], fill: str) -> None:
        width, height = size
        self.elements.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"/>'
        )
        self.right = max(self.right, x + width)

    def line(self, x1: float, y1: float, x2: float, y2: float) -> None:
        self.elements.append(f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"/>')

    def document(self) -> str:
        width, height = round(self.right + MARGIN), round(self.bottom + MARGIN)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}"><style>{STYLE}</style>'
            f'<rect class="background" width="{width}" height="{height}"/>'
            f"{''.join(self.elements)}</svg>\n"
        )


class _Tables:
    r"""Block tables above, and below each block with what was last written to it.

    ::

        r1  [1][4]      r2  [0]
             |  \          |
            [1] [4]        [0]
    """

    def __init__(self, canvas: _Canvas, world: CacheWorld) -> None:
        self.canvas, self.world = canvas, world
        self.words: dict[Tag, tuple[str, str]] = {}  # where a token stands, and the token
        for request in world.past:
            for position, (tag, token) in enumerate(zip(request.tags, request.tokens, strict=True)):
                where, _ = self.words.get(tag, ("", ""))
                where = f"{where} {request.name}" if where else request.name
                self.words[tag] = where, f"{position}: {token}"

    def draw(self, why: str) -> None:
        """Draw the running requests, the blocks that are known, and who points where."""
        running = self.world.running()
        blocks = sorted({b for r in running for b in r.table} | self.world.device.blocks.keys())
        column = {block: MARGIN + place * (BOX[0] + GAP[0]) for place, block in enumerate(blocks)}
        users = Counter(block for request in running for block in request.table)
        named = {int(number) for number in re.findall(r"block (\d+)", why)}
        top = self.canvas.bottom + 8
        memory = top + CELL + 90
        x = float(MARGIN)
        for request in running:
            label = f"{request.name} {request.written}/{len(request.tokens)}"
            self.canvas.text_at(x, top + 17, label)
            x += CHAR * (len(label) + 1)
            for block in request.table:
                self.canvas.line(x + CELL / 2, top + CELL, column[block] + BOX[0] / 2, memory)
                self.canvas.box(
                    x, top, (CELL, CELL), FILL["shared" if users[block] > 1 else "private"]
                )
                self.canvas.text_at(x + 5, top + 17, str(block))
                x += CELL
            x += 2 * CELL
        for block in blocks:
            kind = "free" if not users[block] else "shared" if users[block] > 1 else "private"
            self._block(block, column[block], memory, "evicted" if block in named else kind)
        height = LINE * (1 + min(SLOTS, self.world.block_size)) + 8
        self.canvas.skip(memory + height + 2 * MARGIN - self.canvas.bottom)

    def _block(self, block: int, x: float, y: float, kind: str) -> None:
        slots = self.world.device.content(block)[:SLOTS]
        self.canvas.box(x, y, (BOX[0], LINE * (1 + len(slots)) + 6), FILL[kind])
        self.canvas.text_at(x + 5, y + 14, f"block {block}")
        for place, tag in enumerate(slots, 2):
            where, word = self.words.get(
                tag, ("", {UNWRITTEN: "-", POISON: "garbage"}.get(tag, "?"))
            )
            self.canvas.text_at(x + 5, y + 14 + LINE * (place - 1), _cut(f"{word} {where}"))


class _Tree:
    """Layout of the published prefixes: one column per leaf, parents above their children."""

    def __init__(self, canvas: _Canvas, world: CacheWorld, model: CacheModel) -> None:
        self.canvas, self.model = canvas, model
        self.top = canvas.bottom
        self.columns = 0
        size = world.block_size
        self.words: dict[Tag, str] = {}
        for request in world.past:
            for index, tag in enumerate(request.path(size)):
                self.words[tag] = " ".join(map(str, request.tokens[index * size :][:size]))
        self.children: dict[Tag, list[int]] = {}
        for block, entry in model.cached.items():
            self.children.setdefault(entry.parent, []).append(block)

    def draw(self) -> None:
        """Draw every tree of the forest: one per namespace."""
        depth = max((entry.depth + 1 for entry in self.model.cached.values()), default=0)
        for root in [parent for parent in self.children if parent not in self.model.copies]:
            for block in self.children.pop(root):
                self._draw(block, 0)
        self.canvas.skip(depth * (BOX[1] + GAP[1]))

    def _draw(self, block: int, depth: int) -> float:
        y = self.top + depth * (BOX[1] + GAP[1])
        tag = self.model.cached[block].tag  # of several copies, the first gets the children
        below = [self._draw(child, depth + 1) for child in self.children.pop(tag, [])]
        if below:
            middle = (below[0] + below[-1]) / 2
        else:
            middle = MARGIN + self.columns * (BOX[0] + GAP[0]) + BOX[0] / 2
            self.columns += 1
        for child in below:
            self.canvas.line(middle, y + BOX[1], child, y + BOX[1] + GAP[1])
        self._box(block, middle - BOX[0] / 2, y)
        return middle

    def _box(self, block: int, x: float, y: float) -> None:
        users = [name for name, held in self.model.holdings.items() if block in held.table]
        self.canvas.box(x, y, BOX, FILL["used" if users else "cached"])
        word = self.words.get(self.model.cached[block].tag, "?")
        self.canvas.text_at(x + 5, y + 14, _cut(f"{block}: {word}"))
        self.canvas.text_at(x + 5, y + 29, _cut(" ".join(users) or "unused"))


def _cut(text: str) -> str:
    return text if len(text) <= LABEL else f"{text[: LABEL - 1]}…"


def _strip(canvas: _Canvas, model: CacheModel) -> None:
    canvas.skip(6)
    top = canvas.bottom
    for place, (label, kind) in enumerate(_cells(model)):
        x = MARGIN + place * CELL
        canvas.box(x, top, (CELL, CELL), FILL[kind])
        canvas.text_at(x + 4, top + 17, label)
    canvas.skip(CELL + 4)


def _cells(model: CacheModel) -> Iterator[tuple[str, str]]:
    """Yield label and kind of each block; blocks never allocated come last, without label."""
    used = model.in_use()
    kinds = {FREE: "free", EVICTED: "evicted", LEFT: "evicted"}
    for block, owner in sorted(model.owner.items()):
        if owner == CACHED:
            yield str(block), "used" if block in used else "cached"
        else:
            yield str(block), kinds.get(owner, "private")
    for _ in range(model.num_blocks - len(model.owner)):
        yield "", "free"
