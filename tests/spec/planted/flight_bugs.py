"""Bugs to plant into the manager: duplicates that steps in flight may read."""

from __future__ import annotations

from .plant import bug

MANAGER = "manager.py"

FLIGHT_BUGS = (
    bug(
        "a duplicate is recycled at once, beside steps in flight",
        MANAGER,
        (
            "if self._steps_ended == self._steps_begun:\n            self._pool.recycle(blocks)",
            "if True:\n            self._pool.recycle(blocks)",
        ),
        seen_in="vLLM PR 45357",
    ),
    bug(
        "a duplicate is recycled one step too early",
        MANAGER,
        ("[0][0] <= self._steps_ended", "[0][0] <= self._steps_ended + 1"),
    ),
    bug(
        "a duplicate is recycled one step too late",
        MANAGER,
        ("[0][0] <= self._steps_ended", "[0][0] < self._steps_ended"),
    ),
    bug(
        "a duplicate waits for the first step in flight only",
        MANAGER,
        ("((self._steps_begun, blocks.copy()))", "((self._steps_ended + 1, blocks.copy()))"),
        seen_in="vllm-ascend #14055",
    ),
    bug(
        "duplicates beside steps in flight are never recycled",
        MANAGER,
        ("self._replaced.append((self._steps_begun, blocks.copy()))", "pass"),
    ),
    bug(
        "the end of a step recycles the duplicates of one publication",
        MANAGER,
        ("        while self._replaced and self", "        if self._replaced and self"),
    ),
    bug(
        "the last duplicates are recycled first",
        MANAGER,
        (
            "recycle(self._replaced.popleft()[1])\n\n    def _recycle",
            "recycle(self._replaced.pop()[1])\n\n    def _recycle",
        ),
        seen_in="vLLM #48489",
    ),
    bug(
        "a duplicate is kept as a view of the table",
        MANAGER,
        ("blocks.copy()))", "blocks))"),
    ),
    bug(
        "a reset leaves steps in flight",
        MANAGER,
        ("        self._steps_ended = self._steps_begun\n        while", "        while"),
    ),
    bug(
        "a reset keeps the duplicates of steps in flight",
        MANAGER,
        (
            "        while self._replaced:\n"
            "            self._pool.recycle(self._replaced.popleft()[1])\n",
            "",
        ),
    ),
    bug(
        "the end of a step that never began is accepted",
        MANAGER,
        (
            "        if self._steps_ended == self._steps_begun:\n            raise StepError",
            "        if False:\n            raise StepError",
        ),
    ),
)
