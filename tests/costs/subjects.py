"""Subjects whose calls are counted: each has a number of things that no call should look at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from radixkv.kvcache import CacheManager
from radixkv.kvcache.storage import Kind, Status
from radixkv.kvcache.storage.files.lru_index import LruIndex, ScannedValue
from radixkv.kvcache.storage.operation_table import OperationTable
from radixkv.scheduler import MixedScheduler, Request
from radixkv.scheduler.gateway.gateway import Gateway, RunAttempt
from radixkv.scheduler.gateway.router import CacheSize
from radixkv.scheduler.handoff import DecodeSide, Hits, Post, PrefillSide, Timing
from radixkv.scheduler.handoff.messages import AttemptKey
from radixkv.scheduler.nodes.transport.staging import StagingPool

from ..kvcache.tier_memory import TierMemory
from .measure import Operations

BLOCK: Final = 4
KEY: Final = bytes([255]) * 32
RUN: Final = 10
"""Blocks of an idle run: a tree of n blocks has n / RUN nodes."""


@dataclass(frozen=True)
class Subject:
    """Calls of something that holds a number of other things.

    Attributes:
        name: what is called, and what it has many of.
        calls: makes it with so many, and yields the calls.
        few, many: numbers to compare.
        grows: calls that may do more with more: a binary search, a mask of one word per row of the
            table, or the keys of a path, which are reported to storage at intervals.
        has_jax: whether calls run JAX's Python, of which only our part is counted.
        is_thread: whether the calls are those of a thread, which may wait.
    """

    name: str
    calls: Callable[[int], Operations]
    few: int = 500
    many: int = 100_000
    grows: tuple[str, ...] = ()
    has_jax: bool = False
    is_thread: bool = False

    def __str__(self) -> str:
        return self.name


def tokens_of(number: int, num_tokens: int) -> np.ndarray:
    """Return tokens that no other number has."""
    return np.arange(num_tokens, dtype=np.int32) + np.int32(1_000_000 + 1_000 * number)


def fill(manager: CacheManager, num_idle: int) -> None:
    """Give a manager idle blocks, in runs without a common prefix."""
    for number in range(num_idle // RUN):
        tokens = tokens_of(number, RUN * BLOCK)
        lease = manager.admit(manager.match(tokens))
        manager.publish(lease, tokens)
        manager.release(lease)


def cache_calls(manager: CacheManager) -> Operations:
    """Every call of the device tier."""
    tokens = np.arange(18, dtype=np.int32)
    for _ in range(2):  # a miss, and a hit
        match = yield "match", lambda: manager.match(tokens)
        yield "available_after", partial(manager.available_after, match)
        lease = yield "admit", partial(manager.admit, match)
        yield "next_block", partial(manager.next_block, lease, tokens)
        yield "publish", partial(manager.publish, lease, tokens[:17])
        yield "extend", partial(manager.extend, lease, 3)
        yield "extend_batch", partial(manager.extend_batch, [lease.row])
        yield "begin_step", manager.begin_step
        yield "end_step", manager.end_step
        yield "release", partial(manager.release, lease)
    yield "available", lambda: manager.available
    yield "stats", manager.stats
    yield "repr", lambda: repr(manager)
    yield "evict", lambda: manager.evict(3)


def idle_blocks(num_idle: int) -> Operations:
    """A manager with idle blocks."""
    manager = CacheManager(num_idle + 100, BLOCK)
    fill(manager, num_idle)
    yield from cache_calls(manager)


def full_of_idle_blocks(num_idle: int) -> Operations:
    """A manager without a free block: each new one is evicted from elsewhere."""
    manager = CacheManager(num_idle, BLOCK)
    fill(manager, num_idle)
    yield from cache_calls(manager)


def free_blocks(num_free: int) -> Operations:
    """A manager with free blocks."""
    manager = CacheManager(num_free + 100, BLOCK)
    fill(manager, 100)
    yield from cache_calls(manager)


def leases(num_leases: int) -> Operations:
    """A manager with live leases."""
    manager = CacheManager(2 * num_leases + 100, BLOCK)
    for number in range(num_leases):
        tokens = tokens_of(number, 2 * BLOCK)
        lease = manager.admit(manager.match(tokens))
        if number % 2:
            manager.publish(lease, tokens)
    yield from cache_calls(manager)


def tiers(num_idle: int) -> Operations:
    """Tiers with idle blocks on the host and on the device."""
    memory = TierMemory(num_idle + 50, 2 * num_idle + 50, "back", block_size=BLOCK, storage=True)
    manager, tiers = memory.manager, memory.tiers
    fill(manager, num_idle)
    manager.evict(num_idle)
    _complete_all(tiers)
    for number in range(num_idle // RUN):
        tokens = tokens_of(1_000_000 + number, RUN * BLOCK)
        lease = manager.admit(manager.match(tokens))
        manager.publish(lease, tokens)
        manager.release(lease)
    tiers.take_used()
    tokens = np.arange(18, dtype=np.int32)
    prefetch = yield "prefetch", lambda: tiers.prefetch(tokens)
    yield "take_operations", tiers.take_operations
    yield "cancel", lambda: tiers.cancel(prefetch)
    yield "take_cancelled", tiers.take_cancelled
    yield "fence", lambda: tiers.fence(prefetch.op_id)
    lease = manager.admit(manager.match(tokens))
    manager.publish(lease, tokens[:17])
    fork = yield "fork", lambda: tiers.fork(lease, tokens[:17])
    yield from _completed(tiers)
    manager.release(fork)
    parked = yield "park", lambda: tiers.park(lease, tokens[:17])
    yield from _completed(tiers)
    match = yield "match", lambda: manager.match(tokens)
    lease = yield "admit", lambda: manager.admit(match, parked)
    yield from _completed(tiers)
    parked = yield "park", lambda: tiers.park(lease, tokens[:17])
    yield from _completed(tiers)
    yield "unpark", lambda: tiers.unpark(parked)
    yield "evict", lambda: manager.evict(2)
    yield from _completed(tiers)
    yield "take_used", tiers.take_used
    yield "stats", tiers.stats
    host = manager.match(tokens_of(num_idle // RUN - 1, RUN * BLOCK))
    assert host.num_host_blocks == RUN
    lease = yield "admit from the host", lambda: manager.admit(host)
    yield from _completed(tiers)
    yield "release", lambda: manager.release(lease)


def _completed(tiers: Any) -> Operations:
    while taken := (yield "take_operations", tiers.take_operations):
        for each in taken:
            yield (
                f"complete {each.kind.value}",
                partial(tiers.complete, each.id, [True] * each.num_blocks),
            )


def _complete_all(tiers: Any) -> None:
    while taken := tiers.take_operations():
        for each in taken:
            tiers.complete(each.id, [True] * each.num_blocks)


def scheduler_calls(scheduler: MixedScheduler, *, admits: bool = True) -> Operations:
    """A request from its arrival to its end, one that is aborted, and one that is refused."""
    yield "add", lambda: scheduler.add(Request("mine", np.arange(18, dtype=np.int32), 3))
    yield "add", lambda: scheduler.add(Request("gone", np.arange(18, dtype=np.int32), 3))
    yield "abort waiting", lambda: scheduler.abort("gone")
    for step in range(5):
        plan = yield f"schedule {step}", scheduler.schedule
        if not plan.num_chunks:
            break
        tokens = [7] * plan.num_chunks
        yield f"update {step}", partial(scheduler.update, plan, tokens)
    yield "has_work", lambda: scheduler.has_work
    yield "stats", scheduler.stats
    yield "abort", lambda: scheduler.abort("mine")


def scheduler_of(num_blocks: int, max_running: int = 8) -> MixedScheduler:
    """A scheduler whose steps hold 64 tokens."""
    manager = CacheManager(num_blocks, BLOCK)
    budget = max(64, max_running)
    return MixedScheduler(manager, token_budget=budget, max_running=max_running, reserve_tokens=0)


def scheduled_idle_blocks(num_idle: int) -> Operations:
    """A scheduler over idle blocks."""
    scheduler = scheduler_of(num_idle + 100)
    fill(scheduler.manager, num_idle)
    yield from scheduler_calls(scheduler)


def ended_requests(num_ended: int) -> Operations:
    """A scheduler that has served many requests."""
    scheduler = scheduler_of(100)
    for number in range(num_ended):
        scheduler.add(Request(str(number), tokens_of(number, 8), 1))
        plan = scheduler.schedule()
        scheduler.update(plan, [7] * plan.num_chunks)
    yield from scheduler_calls(scheduler)


def waiting_requests(num_waiting: int) -> Operations:
    """A scheduler with room for one request, which runs, and others that wait."""
    scheduler = scheduler_of(num_waiting + 100, max_running=1)
    scheduler.add(Request("first", tokens_of(0, 8), 50))
    scheduler.update(scheduler.schedule(), [7])
    for number in range(num_waiting):
        scheduler.add(Request(str(number), tokens_of(number, 8), 3))
    yield from scheduler_calls(scheduler)


def open_requests(num_open: int) -> Operations:
    """A gateway with requests that nodes work at."""
    gateway = Gateway(backoff_s=1.0, request_s=1e9)
    gateway.add_prefill("p0", CacheSize(1_000, BLOCK))
    gateway.add_decode("d0", CacheSize(1_000, BLOCK))
    gateway.tick(0.0)
    for number in range(num_open):
        gateway.add_request(Request(str(number), [number, 2, 3], 2), 0.0)
        gateway.tick(0.0) if number == num_open - 1 else None
    for action in gateway.take_actions():
        assert isinstance(action, RunAttempt)
        gateway.started(action.key)
    prompt = np.arange(18, dtype=np.int32)
    request = Request("mine", prompt, 2)
    yield "add_request", lambda: gateway.add_request(request, 1.0)
    yield "tick", lambda: gateway.tick(1.0)
    actions = yield "take_actions", gateway.take_actions
    key = actions[0].key
    yield "prefill_failed", lambda: gateway.prefill_failed(key, "no room", is_busy=True)
    yield "tick", lambda: gateway.tick(3.0)
    actions = yield "take_actions", gateway.take_actions
    again = actions[-1].key
    yield "started", lambda: gateway.started(again)
    yield "finished", lambda: gateway.finished(again, (7, 8), Hits(), 0)
    ended = yield "take_ended", gateway.take_ended
    assert ended == [request]
    gone = Request("gone", prompt, 2)
    gateway.add_request(gone, 4.0)
    gateway.tick(4.0)
    gateway.take_actions()
    yield "abort", lambda: gateway.abort("gone")
    yield "num_open", lambda: gateway.num_open
    yield "loads", lambda: gateway.loads


def stored_values(num_values: int) -> Operations:
    """The index of a file backend with values."""
    index = LruIndex(10 * num_values + 100, lambda: 10**18)
    index.fill([ScannedValue(number, number.to_bytes(32), 10) for number in range(num_values)])
    key = KEY
    yield "contains", lambda: index.contains([key, bytes(32)])
    yield "reserve", lambda: index.reserve(110)
    coldest = yield "coldest_over_budget", index.coldest_over_budget
    yield "take", lambda: index.take(coldest)
    yield "removed", lambda: index.removed(coldest)
    yield "fits", index.fits
    yield "commit", lambda: index.commit(key, 110)
    yield "use", lambda: index.use(key)
    yield "next_stamp_ns", index.next_stamp_ns
    yield "forget", lambda: index.forget(key)
    other = (1).to_bytes(32)
    yield "take another", lambda: index.take(other)
    yield "put_back", lambda: index.put_back(other)
    index.reserve(10)
    yield "give_back", lambda: index.give_back(10)


def ended_operations(num_ended: int) -> Operations:
    """The table of storage operations after many have ended."""
    table = OperationTable(1_000, 2)
    blocks = [[memoryview(bytes(10))]]
    for _ in range(num_ended):
        table.submit(Kind.STORE, [bytes(32)], blocks, deadline=1e9)
        _report(table, Status.STORED)
        table.drain()
    operation = yield (
        "submit", lambda: table.submit(Kind.STORE, [bytes(32)], blocks, deadline=1e9)
    )  # fmt: skip
    yield "expire", lambda: table.expire(1.0)
    yield "take and report", lambda: _report(table, Status.STORED)
    yield "ended", lambda: table.ended(operation)
    yield "fenced", lambda: table.fenced(operation)
    yield "drain", table.drain
    operation = table.submit(Kind.LOOKUP, [bytes(32)], (), deadline=1e9, quiet=True)
    yield "take and report", lambda: _report(table, Status.FOUND)
    yield "claim", lambda: table.claim(operation)
    operation = table.submit(Kind.LOAD, [bytes(32)], blocks, deadline=1e9)
    yield "cancel", lambda: table.cancel(operation)
    yield "num_open", lambda: table.num_open


def _report(table: OperationTable, status: Status) -> None:
    task = table.take()
    assert task is not None
    task.results.append(status)
    table.report(task)


def handed_over(num_ended: int) -> Operations:
    """Both sides of the hand-off after many attempts, the last of which they remember."""
    from ..scheduler.handoff.harness import PROMPT

    timing = Timing()
    p_manager, d_manager = CacheManager(100, 2), CacheManager(100, 2)
    p = PrefillSide(p_manager, epoch=1, timing=timing)
    d = DecodeSide(d_manager, epoch=1, timing=timing, vocab_size=50)
    now = 0.0
    for number in range(num_ended):
        key = AttemptKey(f"r{number}", 1)
        p.begin(key, "d0", Request(f"r{number}", PROMPT, 4))
        _pass_on(p, d)
        p.abort(key, "not wanted")
        _pass_on(p, d)
        now += 0.001
        p.tick(now)
        d.tick(now)
        p.take_actions()
        d.take_actions()
    key = AttemptKey("mine", 1)
    yield "begin", lambda: p.begin(key, "d0", Request("mine", PROMPT, 4))
    actions = yield "take_actions", p.take_actions
    ask = actions[-1].message
    yield "receive", lambda: d.receive("p0", ask)
    granted = yield "take_actions", d.take_actions
    yield "receive", lambda: p.receive("d0", granted[-1].message)
    yield "take_actions", p.take_actions
    yield "computed", lambda: p.computed(key, len(PROMPT))
    yield "sampled", lambda: p.sampled(key, 1, Hits())
    for action in (yield "take_actions", p.take_actions):
        if hasattr(action, "message"):
            yield "receive", partial(d.receive, "p0", action.message)
    yield "tick of P", lambda: p.tick(now + 0.01)
    yield "tick of D", lambda: d.tick(now + 0.01)
    yield "abort", lambda: p.abort(key, "not wanted")


def _pass_on(p: PrefillSide, d: DecodeSide) -> None:
    for action in p.take_actions():
        if isinstance(action, Post):
            d.receive("p0", action.message)


def staging_slots(num_slots: int) -> Operations:
    """Staging memory with slots in use."""
    pool = StagingPool(64 * (num_slots + 4))
    for _ in range(num_slots):
        pool.allocate(64)
    slot = yield "allocate", lambda: pool.allocate(64)
    yield "free", lambda: pool.free(slot)


SUBJECTS: Final = (
    Subject("the cache with idle blocks", idle_blocks),
    Subject("the cache full of idle blocks", full_of_idle_blocks, many=20_000),
    Subject("the cache with free blocks", free_blocks),
    Subject("the cache with leases", leases, 100, 3_000, grows=("extend_batch",)),
    Subject("tiers with idle blocks", tiers, 1_000, 20_000, grows=("admit from the host",)),
    Subject("the scheduler with idle blocks", scheduled_idle_blocks, many=20_000),
    Subject("the scheduler after requests", ended_requests, few=100, many=1_000),
    Subject("the scheduler with waiting requests", waiting_requests, 20, 1_000, grows=("add",)),
    Subject("the gateway with open requests", open_requests, 20, 1_000),
    Subject("the index of stored values", stored_values),
    Subject("storage after operations", ended_operations, few=20, many=1_000),
    Subject("the hand-off after attempts", handed_over, few=20, many=500),
    Subject("staging with slots", staging_slots, few=10, many=500),
)
