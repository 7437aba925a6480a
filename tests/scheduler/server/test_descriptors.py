"""File descriptors for connections, with limits of its own."""

from __future__ import annotations

import os
import resource

import pytest

from radixkv.scheduler.errors import ConfigError
from radixkv.scheduler.server.descriptors import reserve_descriptors

OPEN = 10
OTHERS = OPEN + 4 * 64 + 128
UNLIMITED = resource.RLIM_INFINITY


@pytest.fixture
def set_to(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What the limits are set to; ten descriptors are open."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "listdir", lambda _: [str(number) for number in range(OPEN)])
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: found.append(limits))
    return found


@pytest.mark.parametrize("wanted", [None, 1, 1024, 5000])
@pytest.mark.parametrize("more", [-5000, -1024, -1023, -1, 0, 1, None])
@pytest.mark.parametrize("soft", [64, UNLIMITED])
def test_the_soft_limit_is_raised_as_far_as_connections_need_it(
    wanted: int | None,
    more: int | None,
    soft: int,
    set_to: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    number = 1024 if wanted is None else wanted
    hard = UNLIMITED if more is None else OTHERS + number + more
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    room = number if more is None else number + more
    if room < 1 or (wanted is not None and room < wanted):
        with pytest.raises(ConfigError) as refused:
            reserve_descriptors(wanted)
        assert not set_to
        assert str(refused.value) == (
            f"{number} connections need {number + OTHERS} file descriptors, and the limit is "
            f"{hard} (`ulimit -Hn`)"
        )
        return
    taken = min(room, number)
    assert reserve_descriptors(wanted) == taken
    assert set_to == ([] if soft == UNLIMITED else [(taken + OTHERS, hard)])


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_a_soft_limit_that_is_enough_is_left(
    more: int, set_to: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (OTHERS + 7 + more, 9000))
    assert reserve_descriptors(7) == 7
    assert set_to == ([(OTHERS + 7, 9000)] if more < 0 else [])
