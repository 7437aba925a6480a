"""Which rule a call on a model breaks."""

from __future__ import annotations

from collections.abc import Callable

from radixkv.spec.rules.rule import Violation


def code(call: Callable[..., object], *arguments: object) -> str:
    """Return the code of the rule that a call breaks; "" if none."""
    try:
        call(*arguments)
    except Violation as violation:
        return violation.rule.code
    return ""
