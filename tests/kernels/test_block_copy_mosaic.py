"""The Mosaic block copies: simulated on a CPU, searched for races, and compiled for an H100."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from radixkv.kernels import copy_blocks, gather_blocks, scatter_blocks
from radixkv.kernels.block_copy import mosaic as block_copy_mosaic

from .interpret import PARAMS, SEES_ASYNC_RACES, assert_caught, races_detected
from .lowering import SHARED_MEMORY_BYTES, compile_for_h100, lowered_for_h100, on_h100, shaped
from .planted import planted
from .problems import int32

DTYPES = ["float32", "bfloat16", "float16", "int8", "float8_e4m3fn"]
N = 6
# -1 and ids from the size of the pool, 11, on are outside it.
SOURCES = [1, -1, 10, 3, 3, 2**31 - 1]
DESTINATIONS = [2, 4, 5, 11, 6, 0]


def make_pools(dtype, num_blocks=11, shape=(2, 16, 64), number=2):
    """Pools that hold every bit pattern of their dtype, NaN among them."""
    rng = np.random.default_rng(num_blocks)
    width = np.dtype(f"uint{8 * jnp.dtype(dtype).itemsize}")
    bits = [
        rng.integers(0, 2 ** (8 * width.itemsize), (num_blocks, *shape), width)
        for _ in range(number)
    ]
    return tuple(jax.lax.bitcast_convert_type(jnp.asarray(each), dtype) for each in bits)


def as_bits(array):
    array = np.asarray(array)
    return array.view(f"uint{8 * array.dtype.itemsize}")


def assert_same_bits(got, expected):
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert np.array_equal(as_bits(a), b)


def run_copy(module, interpret, count=N, dtype="bfloat16", cores=1):
    pools = make_pools(dtype)
    expected = [as_bits(pool).copy() for pool in pools]
    for source, destination in list(zip(SOURCES, DESTINATIONS, strict=True))[: max(count, 0)]:
        if 0 <= source < 11 and 0 <= destination < 11:
            for pool in expected:
                pool[destination] = pool[source]
    ids = int32(SOURCES), int32(DESTINATIONS)
    got = module.copy(pools, *ids, int32(count), num_cores=cores, interpret=interpret)
    assert_same_bits(got, expected)


def run_gather(module, interpret, count=N, dtype="bfloat16", cores=1):
    pools = make_pools(dtype)
    expected = [np.zeros((N, *pool.shape[1:]), as_bits(pool).dtype) for pool in pools]
    for entry, source in enumerate(SOURCES[: max(count, 0)]):
        if 0 <= source < 11:
            for staging, pool in zip(expected, pools, strict=True):
                staging[entry] = as_bits(pool)[source]
    got = module.gather(pools, int32(SOURCES), int32(count), num_cores=cores, interpret=interpret)
    assert_same_bits(got, expected)


def run_scatter(module, interpret, count=N, dtype="bfloat16", cores=1):
    pools, staging = make_pools(dtype), make_pools(dtype, N)
    expected = [as_bits(pool).copy() for pool in pools]
    for entry, destination in enumerate(DESTINATIONS[: max(count, 0)]):
        if 0 <= destination < 11:
            for pool, new in zip(expected, staging, strict=True):
                pool[destination] = as_bits(new)[entry]
    arguments = pools, staging, int32(DESTINATIONS), int32(count)
    got = module.scatter(*arguments, num_cores=cores, interpret=interpret)
    assert_same_bits(got, expected)


RUNS = {"copy": run_copy, "gather": run_gather, "scatter": run_scatter}


# Many chunks for each program: the ring goes round.
SMALL_CHUNKS = {"CHUNK_BYTES": 512}


@pytest.mark.parametrize("name", RUNS)
class TestInterpreted:
    # Of each size; and more programs than work.
    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("dtype", "cores"), [("float32", 7), ("bfloat16", 1), ("float8_e4m3fn", 1)]
    )
    def test_every_bit_arrives(self, name, dtype, cores):
        RUNS[name](block_copy_mosaic, PARAMS, dtype=dtype, cores=cores)

    @pytest.mark.parametrize("count", [-1, 0, N + 1])  # others in `test_sizes`
    def test_first_count_entries_are_active(self, name, count):
        RUNS[name](block_copy_mosaic, PARAMS, count)

    def test_no_race(self, name):
        with races_detected() as params:
            RUNS[name](planted(block_copy_mosaic, {}, **SMALL_CHUNKS), params)


BUGS = {
    "a load is not waited for": (
        "copy",
        "plgpu.barrier_wait(full.at[stage])",
    ),
    "a slot is loaded before it is stored": (
        "scatter",
        "plgpu.wait_smem_to_gmem(0, wait_read_only=True)",
    ),
    "the last store is not waited for": ("scatter", "plgpu.wait_smem_to_gmem(0)\n"),
    "the zeros are not fenced": ("gather", "plgpu.commit_smem()"),
}
SEEN = BUGS if SEES_ASYNC_RACES else ["a load is not waited for"]


@pytest.mark.parametrize("bug", SEEN)
def test_planted_bug_is_caught(bug):
    name, line = BUGS[bug]
    module = planted(block_copy_mosaic, {line: "pass" + "\n" * line.count("\n")}, **SMALL_CHUNKS)
    assert_caught(lambda params: RUNS[name](module, params))


SHAPES = [(8, 16, 128), (8, 32, 128), (4, 64, 64), (2, 128, 256), (1, 16, 8), (5, 16, 80)]


def arguments(name, dtype, shape, num_pools, n=64):
    pools, staging = (
        tuple(shaped((size, *shape), dtype) for _ in range(num_pools)) for size in (513, n)
    )
    ids, count = shaped((n,), "int32"), shaped((), "int32")
    return {
        "copy": (copy_blocks, (pools, ids, ids, count)),
        "gather": (gather_blocks, (pools, ids, count)),
        "scatter": (scatter_blocks, (pools, staging, ids, count)),
    }[name]


CONFIGURATIONS = [("bfloat16", shape) for shape in SHAPES] + [
    (dtype, SHAPES[0]) for dtype in DTYPES if dtype != "bfloat16"
]


@pytest.mark.parametrize(("dtype", "shape"), CONFIGURATIONS, ids=str)
@pytest.mark.parametrize("name", RUNS)
def test_lowers_for_an_h100(name, dtype, shape):
    function, args = arguments(name, dtype, shape, 2)
    assert lowered_for_h100(function, *args).count("mosaic_gpu_v2") == 1


def test_pools_beyond_a_launch_are_moved_by_further_ones():
    module = planted(block_copy_mosaic, {}, POOLS_PER_LAUNCH=2)
    groups = module.in_launches(lambda *groups: [groups], tuple(range(5)), tuple("abcde"))
    assert groups == (((0, 1), ("a", "b")), ((2, 3), ("c", "d")), ((4,), ("e",)))


def test_all_layers_are_moved_by_few_launches():
    function, args = arguments("copy", "bfloat16", (8, 16, 128), 32)
    text = lowered_for_h100(function, *args)
    assert text.count("mosaic_gpu_v2") == 1  # one kernel, lowered once
    assert text.count("call @copy") == 2


@pytest.mark.sm_90a
@pytest.mark.parametrize(
    ("dtype", "shape", "num_pools"),
    [
        ("bfloat16", (8, 16, 128), 2),
        ("float32", (8, 16, 128), 1),
        ("float8_e4m3fn", (5, 16, 80), 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", RUNS)
def test_compiles_for_an_h100(name, dtype, shape, num_pools):
    function, args = arguments(name, dtype, shape, num_pools)
    donated = () if name == "gather" else (0,)
    report = compile_for_h100(function, *args, donate_argnums=donated)
    assert report.spill_bytes == 0
    assert report.shared_bytes <= SHARED_MEMORY_BYTES / block_copy_mosaic.PROGRAMS_PER_CORE
    assert report.count("cp.async.bulk.tensor") > 0  # loads
    assert report.count("cp.async.bulk.global.shared::cta") > 0  # stores
    assert report.count("ld.shared") == 0  # no byte passes through a register
    pool_bytes = 513 * np.prod(shape) * jnp.dtype(dtype).itemsize
    assert report.alias_bytes == (0 if name == "gather" else num_pools * pool_bytes)
    # Of several results XLA keeps a table of pointers.
    assert report.temp_bytes <= (0 if num_pools == 1 else 8 * num_pools)


class TestChoice:
    def test_blocks_that_no_row_of_lanes_fits_are_moved_by_xla(self):
        function, args = arguments("copy", "bfloat16", (1, 4, 8), 1)
        assert "mosaic_gpu_v2" not in lowered_for_h100(function, *args)

    @pytest.mark.usefixtures("no_shape_hook")
    def test_message(self):
        function, args = arguments("copy", "bfloat16", (1, 4, 8), 1)
        with on_h100(), pytest.raises(ValueError) as refusal:
            jax.eval_shape(partial(function, backend="mosaic"), *args)
        assert str(refusal.value) == (
            "backend must be 'xla' or None here: mosaic needs kv_heads * block_size * head_dim to "
            "be a multiple of 128, got 32"
        )
