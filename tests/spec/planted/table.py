"""Tables of planted bugs as JSON Lines: a summary, then one line per bug and one per proof."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_table(path: Path, document: dict[str, Any]) -> None:
    """Write a table: ``summary``, the rows of ``bugs``, and ``proofs`` by the name of the rule."""
    lines = [document["summary"], *document["bugs"], *document["proofs"].values()]
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    path.write_text(text, encoding="utf-8")


def read_table(path: Path) -> dict[str, Any]:
    """Read a table that `write_table` wrote."""
    summary, *rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {
        "summary": summary,
        "bugs": [row for row in rows if "finding" not in row],
        "proofs": {row["finding"]["rule"]: row for row in rows if "finding" in row},
    }
