"""What an engine with a host tier took, it gives back if it cannot be made."""

from __future__ import annotations

import gc
import threading
import weakref
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from radixkv.kvcache import HostArrays, HostConfig, TierDriver
from radixkv.kvcache.copies import tier_driver
from radixkv.scheduler.decode import DecodeScheduler
from radixkv.scheduler.engine import Engine, model_runner, programs
from radixkv.scheduler.handoff import Timing
from radixkv.scheduler.nodes import DecodeEngine, PrefillEngine, kv_parts
from radixkv.scheduler.nodes.transport import InProcessExchange, InProcessTransport
from radixkv.scheduler.prefill import PrefillScheduler

from .small import NUM_BLOCKS, SIZES

NODES = (PrefillEngine, DecodeEngine)


def host_threads() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name.startswith("radixkv-host-")}


@pytest.fixture
def host_memory(monkeypatch) -> list[weakref.ref[np.ndarray]]:
    """The memory of the host tiers that are made from now on."""
    made: list[weakref.ref[np.ndarray]] = []
    like = HostArrays.like

    def remember(*arguments: Any) -> HostArrays:
        host = like(*arguments)
        made.append(weakref.ref(host.memory))
        return host

    monkeypatch.setattr(HostArrays, "like", remember)
    return made


def no_memory(*arguments: Any, **options: Any) -> Any:
    raise MemoryError("of the test")


@pytest.mark.parametrize(
    ("make", "fails"),
    [
        (Engine, (tier_driver, "BlockCopies")),
        (Engine, (model_runner, "BlockCopies")),
        *[(make, (kv_parts, "BlockCopies")) for make in NODES],
        (PrefillEngine, (PrefillScheduler, "tick")),
        (DecodeEngine, (DecodeScheduler, "tick")),
    ],
)
def test_what_cannot_be_made_leaves_no_thread_and_no_memory(
    model, monkeypatch, host_memory, make, fails
):
    monkeypatch.setattr(programs, "_compile", lambda lowerings: {})
    if fails[0] is not tier_driver:  # nor is this compiled
        monkeypatch.setattr(TierDriver, "warm_up", lambda driver, arrays: arrays)
    monkeypatch.setattr(*fails, no_memory)
    before = host_threads()
    options: dict[str, Any] = {**SIZES, "num_blocks": NUM_BLOCKS, "host": HostConfig(8)}
    with closing(InProcessTransport(InProcessExchange())) as transport:
        arguments = [model("llama")]
        if make in NODES:
            arguments.append(transport)
            options |= {"epoch": 1, "now": 0.0, "timing": Timing()}
        with pytest.raises(MemoryError, match=r"^of the test$"):
            make(*arguments, **options)
    assert host_threads() == before
    gc.collect()
    assert [each() for each in host_memory] == [None] * len(host_memory)
