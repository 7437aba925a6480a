"""Compiled copies: all of them at warm-up."""

import jax.numpy as jnp

from radixkv.kvcache import BlockArrays, HostArrays, Outcome, TierDriver
from radixkv.kvcache.operations import OpKind
from radixkv.scheduler.compilations import compilation_counter

from .driving import LONG_S, SIZES, Bench

DOWN, UP, ACROSS = OpKind.DEVICE_TO_HOST, OpKind.HOST_TO_DEVICE, OpKind.DEVICE_TO_DEVICE


def test_nothing_is_compiled_after_warm_up():
    counter, bench = compilation_counter(), Bench()
    arrays = BlockArrays.zeros(**{**SIZES, "block_size": 3}, dtype=jnp.dtype(jnp.float32))
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
