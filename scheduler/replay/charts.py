"""Bar and line charts as SVG, without a library: the page that has them gives the colours.

Colours are the classes a, b, c and d of the style sheet; lines of an axis have the class axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

WIDTH: Final = 480
"""Width of a chart; two are side by side on a wide screen, and one fits a phone."""

_LABELS: Final = 125
_BARS: Final = 255
_ROW: Final = 24
_LEFT, _RIGHT, _TOP, _HEIGHT = 45, 15, 10, 190


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar: its label, its parts from left to right as (colour, value), and the text after it."""

    label: str
    parts: Sequence[tuple[str, float]]
    text: str


@dataclass(frozen=True, slots=True)
class Line:
    """A line: its name, its colour, and a value for each x."""

    name: str
    colour: str
    values: Sequence[float]


def bar_chart(title: str, bars: Sequence[Bar], legend: Iterable[tuple[str, str]] = ()) -> str:
    """Draw horizontal bars from zero, all on one scale.

    Args:
        title: Heading, with the unit.
        bars: The bars, from top to bottom; values are finite and at least 0.
        legend: Names and colours of the parts, if the bars have several.
    """
    most = max((sum(value for _, value in bar.parts) for bar in bars), default=0.0)
    lines = []
    for i, bar in enumerate(bars):
        x, y = float(_LABELS), i * _ROW
        lines.append(_text(x - 8, y + _ROW / 2, bar.label, "end"))
        for colour, value in bar.parts:
            width = value / most * _BARS if most else 0.0
            lines.append(
                f'<rect class="{colour}" x="{x:.1f}" y="{y + 4}" width="{width:.1f}" '
                f'height="{_ROW - 8}"/>'
            )
            x += width
        lines.append(_text(x + 6, y + _ROW / 2, bar.text))
    return _figure(title, legend, len(bars) * _ROW, lines)


def line_chart(title: str, xs: Sequence[int], lines: Sequence[Line]) -> str:
    """Draw lines of fractions over a logarithmic x axis that begins and ends with `xs`.

    Args:
        title: Heading.
        xs: Positive, ascending, at least two.
        lines: Values between 0 and 1. The y axis ends at the next tenth above them.
    """
    top = max(0.1, math.ceil(10 * max(max(line.values) for line in lines)) / 10)
    span = math.log(xs[-1] / xs[0])
    right, bottom = WIDTH - _LEFT - _RIGHT, _TOP + _HEIGHT

    def x_of(x: int) -> float:
        return _LEFT + math.log(x / xs[0]) / span * right

    def y_of(value: float) -> float:
        return bottom - value / top * _HEIGHT

    parts = []
    for i in range(3):
        y = y_of(top * i / 2)
        parts.append(f'<path class="axis" d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}"/>')
        parts.append(_text(_LEFT - 6, y, f"{top * i / 2:.0%}", "end", "soft"))
    for x in xs:
        parts.append(_text(x_of(x), bottom + 16, _thousands(x), "middle", "soft"))
    for line in lines:
        points = [(x_of(x), y_of(value)) for x, value in zip(xs, line.values, strict=True)]
        path = " L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        parts.append(f'<path class="line {line.colour}" d="M{path}"/>')
        parts += [
            f'<circle class="{line.colour}" cx="{x:.1f}" cy="{y:.1f}" r="3.5">'
            f"<title>{escape(line.name)}: {value:.1%} at {size:,}</title></circle>"
            for (x, y), value, size in zip(points, line.values, xs, strict=True)
        ]
    return _figure(title, [(line.name, line.colour) for line in lines], bottom + 30, parts)


def _figure(
    title: str, legend: Iterable[tuple[str, str]], height: int, lines: Iterable[str]
) -> str:
    keys = "".join(
        f'<span><i class="key {colour}"></i>{escape(name)}</span>' for name, colour in legend
    )
    return "\n".join(
        [
            f"<figure><figcaption>{escape(title)}<small>{keys}</small></figcaption>",
            f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">',
            *lines,
            "</svg></figure>",
        ]
    )


def _text(x: float, y: float, text: str, anchor: str = "start", colour: str = "") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" dy="0.35em" text-anchor="{anchor}"'
        f"{f' class={colour!r}' if colour else ''}>{escape(text)}</text>"
    )


def _thousands(number: int) -> str:
    return f"{number // 1000}k" if number % 1000 == 0 else f"{number:,}"
