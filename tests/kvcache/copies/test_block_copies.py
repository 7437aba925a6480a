"""Compiled copies: compilation at warm-up, and pinned memory."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from radixkv.kvcache import BlockArrays, HostArrays, Outcome, TierDriver
from radixkv.kvcache.copies import block_copies as pinning
from radixkv.kvcache.copies.block_copies import BlockCopies, exact_pieces
from radixkv.kvcache.tiers.operations import OpKind
from radixkv.scheduler.engine.compilations import compilation_counter

from ..driving import LONG_S, SIZES, Bench

DOWN, UP, ACROSS = OpKind.DEVICE_TO_HOST, OpKind.HOST_TO_DEVICE, OpKind.DEVICE_TO_DEVICE


@pytest.fixture(params=[False, True], ids=["plain", "pinned"])
def is_pinned(request, monkeypatch):
    """Once as on CPU, and once as on a device with separate memory, which CPU can simulate."""
    if request.param:
        monkeypatch.setattr(pinning, "_HOST_PLATFORMS", frozenset())
    return request.param


def test_copies_to_the_host_are_pinned_if_the_device_has_separate_memory(is_pinned):
    bench = Bench()
    copies = BlockCopies(bench.arrays, 4)
    bench.fill()
    staging = copies.gather(bench.arrays, np.array([3, 1], np.int32), 2)
    on_host = copies.to_host(staging)
    kinds = {each.sharding.memory_kind for each in on_host}
    assert kinds == ({"pinned_host"} if is_pinned else {"device"})
    for one, other in zip(staging, on_host, strict=True):
        np.testing.assert_array_equal(one, other)
    assert bench.driver.close(timeout_s=LONG_S)


def test_copies_to_the_host_start_at_once_where_no_memory_is_pinned(monkeypatch):
    with Bench() as bench:
        copies = BlockCopies(bench.arrays, 1, pinning.COPY_KINDS[:1])
        staging = copies.gather(bench.arrays, np.array([1], np.int32), 1)
        started: list[int] = []
        monkeypatch.setattr(
            type(staging[0]), "copy_to_host_async", lambda each: started.append(id(each))
        )
        assert copies.to_host(staging) is staging
        assert started == [id(each) for each in staging]


@pytest.mark.parametrize("fault", ["refused", "other bytes"])
def test_broken_pinned_memory_is_not_used(monkeypatch, fault):
    monkeypatch.setattr(pinning, "_HOST_PLATFORMS", frozenset())
    [device] = jnp.zeros(1).devices()
    pinned = pinning.pinned_host(device)
    assert pinned is not None and pinned.memory_kind == "pinned_host"

    def put(value, where):
        if fault == "refused" and not isinstance(where, jax.Device):
            raise RuntimeError("no such memory")
        return jnp.zeros_like(value)

    monkeypatch.setattr(jax, "device_put", put)
    assert pinning.pinned_host(device) is None


def test_nothing_is_compiled_after_warm_up(is_pinned):
    counter, bench = compilation_counter(), Bench()
    arrays = BlockArrays.zeros(
        **{**SIZES, "block_size": 3 + is_pinned}, dtype=jnp.dtype(jnp.float32)
    )
    driver = TierDriver(HostArrays.like(arrays, 5), max_blocks_per_copy=3)
    before = counter.count
    driver.warm_up(arrays)
    assert counter.count > before
    before = counter.count
    for count in range(1, 6):
        ids = range(1, count + 1)
        down, up = (bench.operation(kind, ids, ids) for kind in (DOWN, UP))
        across = bench.operation(ACROSS, [1], [6])
        driver.dispatch([down, up, across], arrays)
    ended = 0
    while ended < 15:
        driver.wait(LONG_S)
        ended += len(driver.poll())
    assert driver.close(timeout_s=LONG_S)
    assert bench.driver.close(timeout_s=LONG_S)
    assert counter.count == before
    assert driver.stats().operations == {(kind, Outcome.DONE): 5 for kind in (DOWN, UP, ACROSS)}


class Compiled(jax.stages.Compiled):
    """A program that moves nothing."""

    def __init__(self) -> None: ...

    def __call__(self, pools: Any, *given: Any) -> Any:
        return pools


def test_a_program_is_compiled_once_however_many_there_are(monkeypatch):
    """Engines of one process, each with many, do not make each other compile again."""
    num_compiled = 0

    class Jitted:
        def lower(self, *given: Any) -> Any:
            return self

        def compile(self, options: Any) -> Compiled:
            nonlocal num_compiled
            num_compiled += 1
            return Compiled()

    monkeypatch.setattr(jax, "jit", lambda *given, **options: Jitted())
    shape: dict[str, Any] = {"num_layers": 1, "num_blocks": 1, "kv_heads": 1, "head_dim": 1}
    arrays = BlockArrays.zeros(**shape, block_size=1, dtype=jnp.dtype(jnp.float32))
    names = "_gather", "_scatter", "_copy"
    engines = [{name: lambda *given: given for name in names} for _ in range(8)]
    for _ in range(2):
        for functions in engines:  # which are keys of the cache, as other shapes would be
            for name, function in functions.items():
                monkeypatch.setattr(pinning, name, function)
            BlockCopies(arrays, 32)
        assert num_compiled == len(engines) * 6 * 3  # more than caches keep by default: 128


@pytest.mark.parametrize("min_blocks", [1, 2, 3, 8])
def test_a_piece_has_a_size_that_was_compiled(min_blocks):
    """The kinds that are asked for, in each power of two, and no others."""
    bench, compiled = Bench(), []
    with pytest.MonkeyPatch.context() as patch:
        for kind in pinning.COPY_KINDS:
            patch.setattr(BlockCopies, kind, lambda *args, kind=kind: compiled.append(kind))
        sizes: set[int] = set()
        all_kinds = pinning.COPY_KINDS
        for kinds in (all_kinds[:1], all_kinds[1:2], all_kinds[2:], all_kinds[::2], all_kinds):
            compiled.clear()
            copies = BlockCopies(bench.arrays, 8, kinds, min_blocks=min_blocks)
            sizes = {size for count in range(20) for _, size in copies.pieces(count)}
            assert compiled == list(kinds) * len(sizes)
    assert sizes == {size for size in (1, 2, 4, 8) if size >= min_blocks}
    assert bench.driver.close(timeout_s=LONG_S)


def test_pieces_cover_all_blocks_once_and_in_order():
    bench = Bench()
    copies = BlockCopies(bench.arrays, 8)
    for num_blocks in range(40):
        padded, exact = (
            list(copies.pieces(num_blocks)),
            list(exact_pieces(num_blocks, copies.max_blocks)),
        )
        for pieces in ([piece for piece, _ in padded], exact):
            places = [place for piece in pieces for place in range(piece.start, piece.stop)]
            assert places == list(range(num_blocks))
        lengths = [piece.stop - piece.start for piece in exact]
        assert all(length in (1, 2, 4, 8) for length in lengths)
        assert lengths == sorted(lengths, reverse=True)  # as few as possible
        for piece, size in padded:
            length = piece.stop - piece.start
            assert length <= size < 2 * length and size in (1, 2, 4, 8)
    assert bench.driver.close(timeout_s=LONG_S)


def test_a_write_to_pools_of_bfloat16_copies_none_of_them():
    shape: dict[str, Any] = {"num_layers": 1, "kv_heads": 1, "block_size": 16, "head_dim": 16}
    arrays = BlockArrays.zeros(num_blocks=4096, dtype=jnp.dtype("bfloat16"), **shape)
    copies = BlockCopies(arrays, 1, ("scatter", "copy"))
    for kind in (pinning._scatter, pinning._copy):
        memory = copies._program(kind, 1).memory_analysis()
        assert memory is not None
        assert memory.temp_size_in_bytes < arrays.keys[0].nbytes / 16
