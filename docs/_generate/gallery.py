"""The order of the worked examples: as a reader learns, not by size."""

from __future__ import annotations

from pathlib import Path
from typing import Final

ORDER: Final = (
    "manager",
    "own_loop",
    "engine",
    "llm",
    "rl_rollouts",
    "conversation",
    "disaggregated",
)


def by_lesson(file_name: str) -> tuple[int, str]:
    """Return the sort key of an example; examples that are not in `ORDER` come last."""
    lesson = Path(file_name).stem.removeprefix("plot_")
    return (ORDER.index(lesson) if lesson in ORDER else len(ORDER), lesson)
