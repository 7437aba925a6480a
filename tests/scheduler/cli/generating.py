"""What the tests of `radixkv generate` over nodes and tiers complete."""

from __future__ import annotations

import json
from typing import Any

_PREFIX = list(range(1, 13))

PROMPTS = [[*_PREFIX, 20], [*_PREFIX, 21], [30, 31, 32, 33, 34], [*_PREFIX, 22, 23]]


def run(radixkv: Any, *arguments: object) -> dict[str, Any]:
    """Run a command that says nothing but its results; return those."""
    outcome = radixkv(*arguments, "--json", "-")
    assert (outcome.status, outcome.stderr) == (0, ""), outcome
    return json.loads(outcome.stdout)
