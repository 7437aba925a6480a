"""What the tests of `radixkv generate` over nodes and tiers complete."""

from __future__ import annotations

import json
import re
from typing import Any

_PREFIX = list(range(1, 13))

PROMPTS = [[*_PREFIX, 20], [*_PREFIX, 21], [30, 31, 32, 33, 34], [*_PREFIX, 22, 23]]


def run(radixkv: Any, *arguments: object) -> dict[str, Any]:
    """Run a command that says nothing but what it compiles and its results; return those."""
    outcome = radixkv(*arguments, "--json", "-")
    assert (outcome.status, without_compiling(outcome.stderr)) == (0, ""), outcome
    return json.loads(outcome.stdout)


def without_compiling(stderr: str) -> str:
    """Check what engines said of their programs, each in order; return the rest."""
    rest, place, total = [], 0, 0
    for line in stderr.splitlines(keepends=True):
        if (found := re.fullmatch(r"radixkv: compiling (\d+) of (\d+) programs\n", line)) is None:
            rest.append(line)
            continue
        if place == total:  # the next engine
            place, total = 0, int(found[2])
        place += 1
        assert (int(found[1]), int(found[2])) == (place, total), stderr
    assert place == total > 0, stderr
    return "".join(rest)
