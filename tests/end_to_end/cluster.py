"""Prefill and decode nodes in one process, with the compiled programs of an engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any
from unittest.mock import patch

from radixkv.scheduler.engine import Engine
from radixkv.scheduler.handoff import Timing
from radixkv.scheduler.nodes import DecodeEngine, Disaggregated, PrefillEngine, kv_parts
from radixkv.scheduler.nodes import decode_node as decode_engine
from radixkv.scheduler.nodes import prefill_node as prefill_engine
from radixkv.scheduler.nodes.transport import InProcessExchange, InProcessTransport, Transport
from radixkv.scheduler.nodes.transport.jax_engine import JaxEngine
from radixkv.scheduler.nodes.transport.nixl_engine import NixlEngine
from radixkv.scheduler.nodes.transport.threaded import ThreadedTransport
from radixkv.scheduler.request import GREEDY, Request, RequestStatus, SamplingParams

from .conftest import MAX_MODEL_LEN, MAX_RUNNING, TOKEN_BUDGET, fresh_runner

STEP_S = 0.05
SETTLE_S = 20.0
TIMING = Timing(retry_s=1.0, silence_s=5.0, transfer_s=30.0, remember_s=60.0)


@contextmanager
def programs_of(engine: Engine) -> Iterator[None]:
    """Give nodes compiled programs, pools full of NaN, and small copies."""

    def runner(model: Any, manager: Any, *, storage: Any = None, **_: Any) -> Any:
        return fresh_runner(engine._runner, manager, storage)

    with (
        patch.object(prefill_engine, "ModelRunner", runner),
        patch.object(decode_engine, "ModelRunner", runner),
        patch.object(kv_parts, "MAX_PART_BLOCKS", 4),
    ):
        yield


class Cluster:
    """A `Disaggregated` whose clock counts its steps, with nodes to replace."""

    def __init__(
        self,
        engine: Engine,
        *,
        num_prefill: int = 1,
        num_decode: int = 1,
        prefill: dict[str, Any] | None = None,
        decode: dict[str, Any] | None = None,
        transport: Callable[[], Transport] | None = None,
        front: dict[str, Any] | None = None,
    ) -> None:
        """Make it.

        Args:
            engine: whose programs to use.
            num_prefill, num_decode: how many nodes.
            prefill, decode: options of the nodes of each role.
            transport: makes that of a node, which has threads: the clock is a real one.
            front: options of the gateway.
        """
        self.engine = engine
        self.exchange = InProcessExchange()
        self._new_transport = transport or (lambda: InProcessTransport(self.exchange))
        self._is_real_time = transport is not None
        self.prefill_options, self.decode_options = prefill or {}, decode or {}
        self._ticks = count()
        self.requests: list[Request] = []  # the last that were completed
        self._epochs = count(1)
        self.now = self._clock()
        self.front = Disaggregated(
            [self.new_prefill() for _ in range(num_prefill)],
            [self.new_decode() for _ in range(num_decode)],
            clock=self._clock,
            **(front or {}),
        )

    def _clock(self) -> float:
        self.now = time.monotonic() if self._is_real_time else next(self._ticks) * STEP_S
        return self.now

    def _sizes(self) -> dict[str, Any]:
        manager = self.engine.manager
        return {
            "epoch": next(self._epochs),
            "now": self.now,
            "block_size": manager.block_size,
            "num_blocks": manager.num_blocks,
            "token_budget": TOKEN_BUDGET,
            "max_running": MAX_RUNNING,
            "max_model_len": MAX_MODEL_LEN,
            "timing": TIMING,
        }

    def new_prefill(self) -> PrefillEngine:
        """Make a node of a new epoch."""
        options = self._sizes() | self.prefill_options
        with programs_of(self.engine):
            model = self.engine._runner.model
            return PrefillEngine(model, self._new_transport(), **options)

    def new_decode(self) -> DecodeEngine:
        """Make a node of a new epoch."""
        options = self._sizes() | self.decode_options
        with programs_of(self.engine):
            model = self.engine._runner.model
            return DecodeEngine(model, self._new_transport(), **options)

    @property
    def p(self) -> PrefillEngine:
        """The first prefill node."""
        return self.front.prefill["prefill-0"]

    @property
    def d(self) -> DecodeEngine:
        """The first decode node."""
        return self.front.decode["decode-0"]

    def restart_prefill(self) -> None:
        """End the first prefill node, and start it again, empty."""
        self.p._transport.close()
        self.front.replace("prefill-0", self.new_prefill())

    def restart_decode(self) -> None:
        """End the first decode node, and start it again, empty."""
        self.d._transport.close()
        self.front.replace("decode-0", self.new_decode())

    def add(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        samplings: Sequence[SamplingParams] = (GREEDY,),
    ) -> list[Request]:
        """Add requests with the ids 0, 1, ..."""
        requests = [
            Request(str(i), prompt, max_new_tokens, sampling=samplings[i % len(samplings)])
            for i, prompt in enumerate(prompts)
        ]
        for request in requests:
            self.front.add_request(request)
        return requests

    def complete(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        samplings: Sequence[SamplingParams] = (GREEDY,),
    ) -> list[list[int]]:
        """Complete all prompts at once; nothing may fail or leak."""
        requests = self.add(prompts, max_new_tokens, samplings)
        ended = self.front.run()
        assert self.front.failures == {}
        assert sorted(map(id, ended)) == sorted(map(id, requests))
        assert all(request.status is RequestStatus.FINISHED for request in requests)
        self.assert_nothing_leaked()
        self.requests = requests
        return [request.output_tokens for request in requests]

    def step(self, num_steps: int) -> None:
        """Run some steps."""
        for _ in range(num_steps):
            self.front.step()

    def finish(self) -> list[Request]:
        """Run to the end, and return what ended; nothing may leak."""
        ended = self.front.run()
        self.assert_nothing_leaked()
        return ended

    def assert_nothing_leaked(self) -> None:
        """Assert that nothing is open or was compiled, and all blocks are free or evictable."""
        assert not self.front.has_work
        for node in self.front._nodes():
            self._settle(node)
            node.manager.check()
            stats = node.stats()
            cache, transport = stats.engine.cache, stats.transport
            assert cache.live_leases == cache.private_blocks == 0
            assert cache.free_blocks + cache.idle_blocks == cache.num_blocks
            assert transport.offers == transport.pulls == transport.received == 0
            assert stats.engine.compilations_after_warm_up == 0
        assert self.exchange.offers == {}

    def _settle(self, node: PrefillEngine | DecodeEngine) -> None:
        """Let a transport free what it no longer serves."""
        end = time.monotonic() + SETTLE_S
        while True:
            node.poll(self.now)
            node.step()
            stats = node.stats().transport
            if stats.offers == stats.pulls == stats.received == 0 or time.monotonic() > end:
                return

    def bytes_on_the_wire(self) -> int:
        """Number of bytes that decode nodes have pulled."""
        nodes = self.front.decode.values()
        return sum(node.stats().transport.bytes_received for node in nodes)


def over_jax() -> Transport:
    return ThreadedTransport(JaxEngine())


def over_nixl() -> Transport:
    return ThreadedTransport(NixlEngine(1 << 22))
