"""`checked`: the messages of rejected values; valid values pass."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from radixkv.kernels import (
    KernelArgumentError,
    checked,
    copy_blocks,
    gather_blocks,
    kv_write,
    latent_decode,
    latent_extend,
    paged_decode,
    paged_extend,
    scatter_blocks,
)

from .problems import int32

POOL = jnp.ones((9, 2, 4, 8))  # 36 slots
SCALES = jnp.ones((9, 2)).at[2, 1].set(0)
STAGING = jnp.ones((3, 2, 4, 8))


def decode(tables, lengths, **options):
    """Two rows, of tables of two blocks."""
    arguments = jnp.ones((2, 2, 8)), POOL, POOL, int32(tables), int32(lengths)
    return run(paged_decode, *arguments, sm_scale=1.0, **options)


def extend(tables, kv, q_lengths, starts, **options):
    """Three rows in eight tokens, of tables of two blocks; those not given are inactive."""
    missing = 3 - len(kv)
    rows = [int32([*each, *[0] * missing]) for each in (kv, q_lengths, starts)]
    tables = int32([*tables, *[[99, 99]] * missing])
    return run(
        paged_extend, jnp.ones((8, 2, 8)), POOL, POOL, tables, *rows, sm_scale=1.0, **options
    )


def latent(tables, lengths):
    """Two rows of one query, of tables of two blocks of latents."""
    arguments = jnp.ones((2, 2, 8)), POOL[:, :1], int32(tables), int32(lengths)
    return run(latent_decode, *arguments, sm_scale=1.0, value_dim=6)


def latent_rows(tables, kv, q_lengths, starts):
    """Two rows in eight tokens, of tables of two blocks of latents."""
    rows = map(int32, (tables, kv, q_lengths, starts))
    return run(latent_extend, jnp.ones((8, 2, 8)), POOL[:, :1], *rows, sm_scale=1.0, value_dim=6)


def write(slots, **scales):
    """Four tokens; those not given are skipped."""
    new = jnp.ones((4, 2, 8))
    pool = POOL.astype(jnp.int8) if scales else POOL
    slots = int32([*slots, *[-1] * (4 - len(slots))])
    return run(kv_write, new, new, slots, pool, pool, **scales)


def copy(sources, destinations, count):
    return run(copy_blocks, POOL, int32(sources), int32(destinations), int32(count))


def gather(ids, count):
    return run(gather_blocks, (POOL, POOL), int32(ids), int32(count))


def scatter(ids, count):
    return run(scatter_blocks, POOL, STAGING, int32(ids), int32(count))


@cache
def program(kernel, static):
    """One function for each kernel and its static arguments: it is compiled once for a shape."""
    step = partial(checked(kernel), **dict(static))
    return jax.jit(checkify.checkify(step))


def run(kernel, *arguments, k_scales=None, v_scales=None, **static):
    scales = {} if k_scales is None else {"k_scales": k_scales, "v_scales": v_scales}
    error, result = program(kernel, tuple(static.items()))(*arguments, **scales)
    error.throw()
    return result


FINE = {
    "lengths within the table": lambda: decode([[1, 2], [8, 0]], [8, 0]),
    "anything in entries that are not used": lambda: decode([[1, -7], [99, 99]], [4, 0]),
    "anything before the window": lambda: decode([[99, 2]] * 2, [8, 0], window=4),
    "latents of lengths within the table": lambda: latent([[1, -7], [8, 0]], [4, 8]),
    "rows of latents": lambda: latent_rows([[1, 2], [8, 9]], [8, 1], [2, 1], [1, 0]),
    "rows in any order": lambda: extend([[1, 2]] * 3, [5, 8, 1], [3, 4, 1], [5, 0, 4]),
    "inactive rows anywhere": lambda: extend([[1, 2], [99, 99]], [5, 7], [3, 0], [0, -9]),
    "anything before the windows": lambda: extend([[99, 2]], [8], [2], [0], window=3),
    "slots that skip": lambda: write([0, -1, -1, 35]),
    "scales of blocks that are written": lambda: write([0, -1], k_scales=SCALES, v_scales=SCALES),
    "ids that skip": lambda: copy([1, -1, 1], [2, 2, 3], 3),
    "anything past count": lambda: copy([1, 99, 1], [2, 2, 2], 1),
    "a source past count that is a destination": lambda: copy([1, 2, 99], [2, 3, 99], 1),
    "a source that skips and is a destination": lambda: copy([1, 5, 1], [5, -1, 3], 3),
    "one source read often": lambda: gather([1, 1, -1], 3),
    "anything past the count of a gather": lambda: gather([1, 99, -7], 1),
    "anything past the count of a scatter": lambda: scatter([1, 1, 99], 1),
    "all entries": lambda: scatter([1, 2, 0], 3),
    "no entries": lambda: copy([99, 1, 1], [-7, 2, 2], 0),
}


@pytest.mark.parametrize("case", FINE)
def test_lets_through(case):
    for array in jax.tree.leaves(FINE[case]()):
        assert not np.isnan(np.asarray(array)).any()


REFUSED = (
    (lambda: decode([[1, 2]] * 2, [-3, 0]), "lengths[0] must be >= 0, got -3"),
    (lambda: decode([[1, 2]] * 2, [8, 9]), "lengths[1] must be at most 8, the capacity of its block table, got 9"),  # noqa: E501
    (lambda: decode([[1, 2], [3, 9]], [8, 5]), "block_tables[1, 1] must be in 0 .. 8, got 9"),
    (lambda: decode([[1, 1], [1, -1]], [5, 5], window=4), "block_tables[1, 1] must be in 0 .. 8, got -1"),  # noqa: E501
    (lambda: decode([[99, 2]] * 2, [7, 0], window=4), "block_tables[0, 0] must be in 0 .. 8, got 99"),  # noqa: E501
    (lambda: extend([[99, 2]], [8], [2], [0], window=4), "block_tables[0, 0] must be in 0 .. 8, got 99"),  # noqa: E501
    (lambda: extend([[1, 2]], [-1], [0], [0]), "kv_lengths[0] must be >= 0, got -1"),
    (lambda: extend([[1, 2]], [9], [1], [0]), "kv_lengths[0] must be at most 8, the capacity of its block table, got 9"),  # noqa: E501
    (lambda: extend([[1, 2]], [2], [3], [0]), "q_lengths[0] must be in 0 .. 2 (its kv_lengths), got 3"),  # noqa: E501
    (lambda: extend([[1, 2]], [4], [-1], [0]), "q_lengths[0] must be in 0 .. 4 (its kv_lengths), got -1"),  # noqa: E501
    (lambda: extend([[1, 2]], [4], [2], [-1]), "row 0 must lie within the 8 tokens of q, got -1 .. 1"),  # noqa: E501
    (lambda: extend([[1, 2]], [4], [4], [5]), "row 0 must lie within the 8 tokens of q, got 5 .. 9"),  # noqa: E501
    (lambda: extend([[1, 2]] * 2, [4, 4], [2, 3], [4, 2]), "rows must be disjoint in q, but row 1 ends after row 0 starts"),  # noqa: E501
    (lambda: extend([[1, 99]], [5], [1], [0]), "block_tables[0, 1] must be in 0 .. 8, got 99"),
    (lambda: latent([[1, 2]] * 2, [8, 9]), "lengths[1] must be at most 8, the capacity of its block table, got 9"),  # noqa: E501
    (lambda: latent([[1, 2], [3, 9]], [8, 5]), "block_tables[1, 1] must be in 0 .. 8, got 9"),
    (lambda: latent_rows([[1, 2]] * 2, [8, 2], [1, 3], [1, 2]), "q_lengths[1] must be in 0 .. 2 (its kv_lengths), got 3"),  # noqa: E501
    (lambda: write([3, 36]), "slots[1] must be -1 or in 0 .. 35, got 36"),
    (lambda: write([3, -2]), "slots[1] must be -1 or in 0 .. 35, got -2"),
    (lambda: write([7, 3, 7]), "slots must be distinct, but 7 occurs twice"),
    (lambda: write([0, 8], k_scales=SCALES, v_scales=SCALES), "k_scales[2, 1] must be > 0, got 0.0"),  # noqa: E501
    (lambda: write([0, 8], k_scales=abs(SCALES) + 1, v_scales=-SCALES), "v_scales[0, 0] must be > 0, got -1.0"),  # noqa: E501
    (lambda: write([0, 8], k_scales=SCALES * jnp.nan, v_scales=SCALES), "k_scales[0, 0] must be > 0, got nan"),  # noqa: E501
    (lambda: copy([1, 9, 1], [2, 3, 4], 3), "sources[1] must be -1 or in 0 .. 8, got 9"),
    (lambda: copy([1, 1, 1], [2, 3, -5], 3), "destinations[2] must be -1 or in 0 .. 8, got -5"),
    (lambda: copy([1, 1, 1], [2, 3, 2], 3), "destinations must be distinct, but 2 occurs twice"),
    (lambda: copy([1, 2, 1], [2, 3, 4], 3), "destinations[0] must not be a source, got 2"),
    (lambda: copy([1, 2, 1], [3, 4, 5], 4), "count must be in 0 .. 3, got 4"),
    (lambda: gather([1, 2, 9], 3), "ids[2] must be -1 or in 0 .. 8, got 9"),
    (lambda: gather([1, 2, 9], -1), "count must be in 0 .. 3, got -1"),
    (lambda: scatter([1, 2, 1], 3), "ids must be distinct, but 1 occurs twice"),
    (lambda: scatter([1, 2, 9], 3), "ids[2] must be -1 or in 0 .. 8, got 9"),
)  # fmt: skip


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_message(call, message):
    with pytest.raises(checkify.JaxRuntimeError) as refusal:
        call()
    assert message in str(refusal.value)


# How many ids there are, and a call that takes one of them twice.
IDS = {
    "slots": (36, lambda one, other: write([one, other, one])),
    "destinations": (9, lambda one, other: copy([(one + 2) % 9] * 3, [one, other, one], 3)),
    "ids": (9, lambda one, other: scatter([one, other, one], 3)),
}


@pytest.mark.parametrize("name", IDS)
def test_each_id_must_be_distinct(name):
    """Above all the lowest and the highest, also where an entry that is skipped sorts first."""
    size, call = IDS[name]
    for twice in range(size):
        for other in (-1, (twice + 1) % size):
            with pytest.raises(checkify.JaxRuntimeError) as refusal:
                call(twice, other)
            assert f"{name} must be distinct, but {twice} occurs twice" in str(refusal.value)


@pytest.mark.usefixtures("no_shape_hook")
def test_wrong_shapes_are_refused_first():
    with pytest.raises(KernelArgumentError) as refusal:
        run(gather_blocks, POOL, int32([[1]]), int32(1))
    assert "ids must be [n] = [any], got [1, 1]" in str(refusal.value)


def test_only_kernels_can_be_checked():
    with pytest.raises(KeyError):
        checked(len)
