"""The Mosaic `kv_write`: simulated on a CPU, searched for races, and compiled for an H100."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from radixkv.kernels import KernelArgumentError, kv_write
from radixkv.kernels.kv_write import mosaic as kv_write_mosaic

from .interpret import PARAMS, SEES_ASYNC_RACES, assert_caught, races_detected
from .lowering import SHARED_MEMORY_BYTES, compile_for_h100, lowered_for_h100, on_h100, shaped
from .planted import planted
from .problems import int32

SHAPE = (5, 2, 16, 64)  # 80 slots
DTYPES = ["float32", "bfloat16", "float8_e4m3fn"]  # of each size


def run_write(module, interpret, slots=None, dtype="bfloat16", num_tokens=16):
    rng = np.random.default_rng(0)
    if slots is None:
        slots = rng.permutation(80)[:num_tokens]
        slots[1:num_tokens:5] = -1
    pools = [jnp.asarray(rng.integers(-9, 9, SHAPE), dtype) for _ in "kv"]
    new = [jnp.asarray(rng.integers(-9, 9, (len(slots), 2, 64)), dtype) for _ in "kv"]
    expected = [np.array(pool) for pool in pools]
    for pool, tokens in zip(expected, new, strict=True):
        for token, slot in enumerate(slots):
            if 0 <= slot < 80:
                pool[slot // 16, :, slot % 16] = tokens[token]
    got = module.write(*new, int32(slots), *pools, num_cores=1, interpret=interpret)
    for written, pool in zip(got, expected, strict=True):
        assert np.array_equal(np.asarray(written), pool)


class TestInterpreted:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_tokens_land_in_their_slots_and_nothing_else_changes(self, dtype):
        run_write(kv_write_mosaic, PARAMS, dtype=dtype)

    @pytest.mark.parametrize(
        "slots",
        [[79], [-1], [80, -(2**31), 2**31 - 1], [0, -1, 16, 31, 32]],
        ids=["one", "skipped", "outside", "some"],
    )
    def test_slots(self, slots):
        run_write(kv_write_mosaic, PARAMS, slots)

    def test_no_race(self):
        with races_detected() as params:
            run_write(kv_write_mosaic, params, range(80))


@pytest.mark.parametrize(
    ("tokens", "token_bytes", "expected"),
    [
        (64, 4096, 1),
        (8192, 4096, 4),
        (8192, 1024, 8),
        (8190, 4096, 2),
        (8191, 4096, 1),
        (8192, 2**15, 1),
    ],
)
def test_tokens_of_a_group(tokens, token_bytes, expected):
    assert kv_write_mosaic.group_tokens(tokens, token_bytes, 264) == expected


BUGS = {
    "a load is not waited for": "plgpu.barrier_wait(full.at[stage])",
    "a slot is loaded before it is stored": "plgpu.wait_smem_to_gmem(0, wait_read_only=True)",
    "the last store is not waited for": "plgpu.wait_smem_to_gmem(0)\n",
}
SEEN = BUGS if SEES_ASYNC_RACES else ["a load is not waited for"]


@pytest.mark.parametrize("bug", SEEN)
def test_planted_bug_is_caught(bug):
    line = BUGS[bug]
    module = planted(kv_write_mosaic, {line: "pass" + "\n" * line.count("\n")})
    assert_caught(lambda params: run_write(module, params, range(11)))  # of one token a group


def arguments(num_tokens, dtype, pool):
    new = shaped((num_tokens, pool[1], pool[3]), "bfloat16")
    return new, new, shaped((num_tokens,), "int32"), shaped(pool, dtype), shaped(pool, dtype)


CONFIGURATIONS = [
    (64, "bfloat16", (513, 8, 16, 128)),
    (7, "bfloat16", (513, 8, 32, 128)),
    (2048, "bfloat16", (513, 4, 64, 64)),
    (8192, "bfloat16", (513, 2, 128, 256)),
    (256, "float16", (513, 8, 16, 128)),
    (256, "float32", (513, 1, 16, 64)),
]


@pytest.mark.parametrize(("num_tokens", "dtype", "pool"), CONFIGURATIONS, ids=str)
def test_lowers_for_an_h100(num_tokens, dtype, pool):
    text = lowered_for_h100(kv_write, *arguments(num_tokens, dtype, pool))
    assert text.count("mosaic_gpu_v2") == 1


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_quantised_pools_lower_for_an_h100(dtype):
    scales = shaped((513, 8), "float32")

    def write(*args):
        return kv_write(*args[:-1], k_scales=args[-1], v_scales=args[-1])

    text = lowered_for_h100(write, *arguments(64, dtype, (513, 8, 16, 128)), scales)
    assert text.count("mosaic_gpu_v2") == 1


@pytest.mark.sm_90a
@pytest.mark.parametrize(
    ("num_tokens", "dtype", "pool"), [each for each in CONFIGURATIONS if each[1] == "bfloat16"],
    ids=str,
)  # fmt: skip
def test_compiles_for_an_h100(num_tokens, dtype, pool):
    args = arguments(num_tokens, dtype, pool)
    report = compile_for_h100(kv_write, *args, donate_argnums=(3, 4))
    assert report.spill_bytes == 0
    assert report.shared_bytes <= SHARED_MEMORY_BYTES / kv_write_mosaic.PROGRAMS_PER_CORE
    assert report.count("cp.async.bulk.tensor.3d.shared") > 0  # loads
    assert report.count("cp.async.bulk.tensor.4d.global.shared::cta") > 0  # over the heads
    assert report.count("ld.shared") == 0  # no byte passes through a register
    assert report.alias_bytes == 2 * np.prod(pool) * 2
    assert report.temp_bytes == 0


@pytest.mark.usefixtures("no_shape_hook")
@pytest.mark.parametrize(
    ("num_tokens", "pool", "message"),
    [
        (0, (9, 2, 16, 64), "mosaic needs at least one token, got 0"),
        (1, (9, 2, 16, 512), "mosaic needs kv_heads and head_dim of at most 256, got 2 and 512"),
        (1, (9, 1, 16, 32), "mosaic needs a multiple of 16 bytes per head and of 128 bytes per token, got 64 and 64"),  # noqa: E501
    ],
)  # fmt: skip
def test_what_the_kernel_cannot_write_is_written_by_xla(num_tokens, pool, message):
    args = arguments(num_tokens, "bfloat16", pool)
    assert "mosaic_gpu_v2" not in lowered_for_h100(kv_write, *args)
    with on_h100(), pytest.raises(KernelArgumentError) as refusal:
        jax.eval_shape(partial(kv_write, backend="mosaic"), *args)
    assert str(refusal.value) == f"backend must be 'xla' or None here: {message}"
