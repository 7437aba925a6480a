"""Generate the tables of the hand-off protocol from the code that asserts them.

conf.py calls `write_pages`, which writes into ``docs/_generated/``, which is not in git.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Final

from radixkv.scheduler.handoff import DECODE_MOVES, PREFILL_MOVES

OUTPUT: Final = Path(__file__).parents[1] / "_generated"


def write_pages() -> None:
    """Write the tables of states, which protocol.md includes."""
    OUTPUT.mkdir(exist_ok=True)
    _write("prefill_states", ("From", "To", "When"), _rows(PREFILL_MOVES))
    _write("decode_states", ("From", "To", "When"), _rows(DECODE_MOVES))


def _rows(moves: Mapping[tuple[Enum, Enum], str]) -> list[tuple[str, ...]]:
    return [(f"`{old.value}`", f"`{new.value}`", why) for (old, new), why in moves.items()]


def _write(name: str, head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    lines = [f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows)]
    (OUTPUT / f"{name}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
