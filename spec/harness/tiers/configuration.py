"""The configuration of a world with tiers: its focus, its sizes and its policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ..engine import Below

FEATURES: Final = {
    "park": ("park", "unpark"),
    "fork": ("fork",),
    "prefetch": ("prefetch", "cancel", "elsewhere"),
    "launch": ("launch", "done", "fail", "again"),
    "append": ("append", "append_batch"),
    "match": ("match",),
    "preempt": ("preempt",),
    "evict": ("evict",),
    "reset": ("reset",),
    "misuse": ("misuse", "late", "second", "early", "wrong_result"),
}
"""Groups of operations that a world can make rare, so that the others meet more often."""

WRITES: Final = ("exclusive", "back", "through")


def window_of(config: Mapping[str, Any]) -> int:
    """Number of admissions and stored blocks for which a reported use covers later ones."""
    return 0 if config["at_once"] or config["law"] else config["num_blocks"] % 2 * 4


@dataclass(frozen=True)
class About:
    """The focus of a world.

    Attributes:
        features: features that are never rare.
        words: operations that are more frequent.
        sizes: fixed parts of the configuration.
        most_blocks, most_host_blocks: maximum blocks of the device and of the host.
    """

    features: tuple[str, ...]
    words: tuple[str, ...] = ()
    sizes: Mapping[str, Any] = field(default_factory=dict)
    most_blocks: int = 9
    most_host_blocks: int = 9


ABOUT: Final = (
    About(tuple(FEATURES)),
    About(("evict", "preempt"), ("evict", "finish"), {"write": "through", "storage": 0}, 4, 5),
    About(("evict", "preempt"), ("finish",), {"write": "exclusive", "storage": 0}, 6, 6),
    About(("park", "evict"), ("admit",), most_host_blocks=4),
    About(("park", "evict"), ("park",), {"storage": 1, "faults": 2}),
    About(("park", "append"), ("evict",), {"write": "through", "hits": 2, "at_once": 1}, 9, 4),
    About(
        ("park", "evict"), ("park", "evict", "take", "result"), {"block_size": 2, "faults": 7}, 6, 9
    ),
    About(("prefetch", "evict"), ("elsewhere", "prefetch"), {"storage": 1}, 6),
    About(("prefetch", "park", "reset"), ("elsewhere", "reset"), {"storage": 1}, 6),
)


def draw_tiers(below: Below, words: Sequence[str]) -> dict[str, Any]:
    """Draw the focus of a world, and the sizes and policies below the device.

    Args:
        words: the operations of which a world can have more, in the order of the bits of ``often``.
    """
    write = WRITES[below(3)]
    law = write == "exclusive" and below(4) == 0
    about = ABOUT[0 if law else below(len(ABOUT))]
    rare = below(1 << len(FEATURES)) | below(1 << len(FEATURES))
    for bit, feature in enumerate(FEATURES):
        if feature in about.features:
            rare &= ~(1 << bit)
    often = below(1 << len(words)) & below(1 << len(words)) if below(3) else 0
    for bit, word in enumerate(words):
        if word in about.words:
            often |= 1 << bit
    write = about.sizes.get("write", write)
    return {
        "num_blocks": 2 + below(about.most_blocks - 1),
        "block_size": 1 + below(3),
        "alphabet": 1 + below(3),
        "rare": rare,
        "often": often,
        "host_blocks": 1 + below(about.most_host_blocks),
        "write": write,
        "hits": max(below(4) - 1, 0) if write == "through" else 0,
        "storage": int(below(4) > 0),
        "law": int(law),
        "at_once": int(below(5) == 0 and not law),
        "faults": below(8),
        "fences": below(3),
        **about.sizes,
    }
