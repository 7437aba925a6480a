"""The kernels under `jax.shard_map` over KV heads, as tensor parallelism calls them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType, use_abstract_mesh
from jax.sharding import PartitionSpec as P

from radixkv.kernels import (
    KernelArgumentError,
    copy_blocks,
    kv_write,
    latent_decode,
    latent_extend,
    paged_decode,
    paged_extend,
)

from .lowering import H100, shaped

TWO_H100 = AbstractMesh((2,), ("tp",), (AxisType.Auto,), abstract_device=H100)
HEADS, ALL = P(None, "tp"), P()
Q, POOL = shaped((4, 16, 128), "bfloat16"), shaped((16, 8, 64, 128), "bfloat16")
LATENT_Q, LATENTS = shaped((4, 128, 576), "bfloat16"), shaped((16, 1, 64, 576), "bfloat16")
NEW, ROW, TABLE = (
    shaped((4, 8, 128), "bfloat16"),
    shaped((4,), "int32"),
    shaped((4, 4), "int32"),
)
CALLS: dict[str, tuple[Any, tuple[Any, ...], tuple[P, ...], Any]] = {
    "paged_decode": (
        lambda q, k, v, *rows: paged_decode(q, k, v, *rows, sm_scale=0.1),
        (Q, POOL, POOL, TABLE, ROW),
        (HEADS,) * 3 + (ALL,) * 2,
        HEADS,
    ),
    "paged_extend": (
        lambda q, k, v, *rows: paged_extend(q, k, v, *rows, sm_scale=0.1),
        (Q, POOL, POOL, TABLE, ROW, ROW, ROW),
        (HEADS,) * 3 + (ALL,) * 4,
        HEADS,
    ),
    "latent_decode": (
        lambda *args: latent_decode(*args, sm_scale=0.1, value_dim=512),
        (LATENT_Q, LATENTS, TABLE, ROW),
        (HEADS,) + (ALL,) * 3,
        HEADS,
    ),
    "latent_extend": (
        lambda *args: latent_extend(*args, sm_scale=0.1, value_dim=512),
        (LATENT_Q, LATENTS, TABLE, ROW, ROW, ROW),
        (HEADS,) + (ALL,) * 5,
        HEADS,
    ),
    "kv_write": (
        lambda new, slots, k, v: kv_write(new, new, slots, k, v),
        (NEW, ROW, POOL, POOL),
        (HEADS, ALL, HEADS, HEADS),
        (HEADS, HEADS),
    ),
    "move_blocks": (
        lambda k, v, *ids: copy_blocks((k, v), *ids),
        (POOL, POOL, ROW, ROW, shaped((), "int32")),
        (HEADS,) * 2 + (ALL,) * 3,
        (HEADS, HEADS),
    ),
}


def lowered(name: str, check: bool) -> str:
    function, arguments, specs, results = CALLS[name]
    with use_abstract_mesh(TWO_H100):
        sharded = jax.shard_map(
            function, mesh=TWO_H100, in_specs=specs, out_specs=results, check_vma=check
        )
        return jax.jit(sharded).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.slow
def test_four_devices_compute_what_one_does():
    program = Path(__file__).with_name("on_mesh.py")
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    differences = json.loads(done.stdout)
    assert len(differences) == 14
    assert {name: value for name, value in differences.items() if value > 1e-6} == {}


@pytest.mark.parametrize("name", CALLS)
def test_mosaic_is_lowered_for_several_gpus(name):
    assert "mosaic_gpu_v2" in lowered(name, check=False)


READERS = ("paged_decode", "latent_decode", "latent_extend")


@pytest.mark.parametrize("name", READERS)
def test_mosaic_with_the_check_of_jax(name):
    """A kernel that only reads its arguments needs no option."""
    assert "mosaic_gpu_v2" in lowered(name, check=True)


@pytest.mark.parametrize("name", [name for name in CALLS if name not in READERS])
def test_mosaic_that_updates_arrays_and_the_check_of_jax(name):
    """JAX since 0.11 has no references that vary."""
    if jax.__version_info__ < (0, 11):
        assert "mosaic_gpu_v2" in lowered(name, check=True)
        return
    with pytest.raises(
        KernelArgumentError,
        match=rf"^{name} updates arrays in place: with backend='mosaic', jax.shard_map needs"
        r" check_vma=False(\n|$)",  # JAX may add a note
    ):
        lowered(name, check=True)
