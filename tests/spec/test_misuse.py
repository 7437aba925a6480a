"""Wrong calls of the fuzzer: a refusal must have the whole text that is wanted."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from radixkv import kvcache
from radixkv.kvcache import CountError
from radixkv.scheduler.fuzz.misuse import make
from radixkv.spec.rules import cache as rules
from radixkv.spec.rules.rule import Violation

ADAPTER: Any = SimpleNamespace(kvcache=kvcache)


def refuse(text: str) -> Callable[[], Any]:
    def call() -> None:
        raise CountError(text)

    return call


@pytest.mark.parametrize(
    ("wanted", "call", "found"),
    [
        ("CountError: no", refuse("no"), None),
        ("CountError: no", refuse("no, never"), "CountError: no, never"),
        ("CountError: no", refuse("n"), "CountError: n"),
        ("CountError: no", lambda: None, ""),
        ("", lambda: None, None),
        ("", refuse("no"), "CountError: no"),
    ],
)
def test_a_wrong_call_has_the_wanted_end_and_no_other(
    wanted: str, call: Callable[[], Any], found: str | None
) -> None:
    if found is None:
        make(ADAPTER, (rules.R3, wanted, call))
        return
    with pytest.raises(Violation) as caught:
        make(ADAPTER, (rules.R3, wanted, call))
    assert caught.value.rule is rules.R3
    assert caught.value.why == f"refused with {found!r}, should be {wanted!r}"
