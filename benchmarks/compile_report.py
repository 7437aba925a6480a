"""Compile every Hopper kernel without a GPU; report registers, shared memory and spills.

    python benchmarks/compile_report.py --json benchmarks/gpu_steps/compiled.json

Needs the wheels that `.ci/run` installs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax

from radixkv.kernels import (
    copy_blocks,
    gather_blocks,
    kv_write,
    paged_decode,
    paged_extend,
    scatter_blocks,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.kernels import lowering
from tests.kernels.lowering import compile_for_h100, shaped

sys.path.pop(0)

KV_HEADS, GROUP = 8, 4
HEAD = ("kernel", "shape", "registers", "shared KiB", "spills", "WGMMA", "bulk copies")
Report = dict[str, Any]


def report(kernel: str, shape: str, function: Any, *args: Any, donate: tuple[int, ...] = ()) -> Any:
    """Compile one function and return its row of the table."""
    compiled = compile_for_h100(function, *args, donate_argnums=donate)
    return {
        "kernel": kernel,
        "shape": shape,
        "registers": compiled.registers,
        "shared_bytes": compiled.shared_bytes,
        "spill_bytes": compiled.spill_bytes,
        "wgmma": compiled.count("wgmma.mma_async"),
        "bulk_copies": compiled.count("cp.async.bulk")
        - compiled.count("cp.async.bulk.commit")
        - compiled.count("cp.async.bulk.wait"),
    }


def decode_arguments(head_dim: int, block_size: int, dtype: str = "bfloat16") -> dict[str, Any]:
    """Arguments of `paged_decode` for a batch that fills the GPU."""
    pool = shaped((1025, KV_HEADS, block_size, head_dim), dtype)
    arguments: dict[str, Any] = {
        "q": shaped((64, KV_HEADS * GROUP, head_dim), "bfloat16"),
        "k_blocks": pool,
        "v_blocks": pool,
        "block_tables": shaped((64, 4096 // block_size), "int32"),
        "lengths": shaped((64,), "int32"),
    }
    if dtype != "bfloat16":
        scales = shaped((1025, KV_HEADS), "float32")
        arguments |= {"k_scales": scales, "v_scales": scales}
    return arguments


def public_kernels() -> Iterator[Report]:
    """Report every kernel with the configuration that its rule chooses."""
    decode = partial(paged_decode, sm_scale=0.1, backend="mosaic")
    shapes = [(d, b, "bfloat16") for d in (64, 128) for b in (16, 64, 128)]
    shapes += [(256, 64, "bfloat16"), (128, 64, "int8"), (128, 64, "float8_e4m3fn")]
    for head_dim, block_size, dtype in shapes:
        name = f"head_dim {head_dim}, blocks of {block_size}, {dtype}"
        arguments = decode_arguments(head_dim, block_size, dtype)
        yield report("paged_decode", name, lambda x: decode(**x), arguments)
    extend = partial(paged_extend, sm_scale=0.1, backend="mosaic")
    row = shaped((8,), "int32")
    for head_dim in (64, 128, 256):
        pool = shaped((1025, KV_HEADS, 64, head_dim), "bfloat16")
        q = shaped((2048, KV_HEADS * GROUP, head_dim), "bfloat16")
        tables = shaped((8, 128), "int32")
        name = f"head_dim {head_dim}, blocks of 64, bfloat16"
        yield report("paged_extend", name, extend, q, pool, pool, tables, row, row, row)
    pool = shaped((1025, KV_HEADS, 64, 128), "bfloat16")
    ids, count = shaped((64,), "int32"), shaped((), "int32")
    staging = shaped((64, *pool.shape[1:]), "bfloat16")
    name = "2 pools, blocks of 64, head_dim 128"
    two = pool, pool
    yield report("copy_blocks", name, copy_blocks, two, ids, ids, count, donate=(0,))
    yield report("gather_blocks", name, gather_blocks, two, ids, count)
    moved = two, (staging, staging), ids, count
    yield report("scatter_blocks", name, scatter_blocks, *moved, donate=(0,))
    new = shaped((256, KV_HEADS, 128), "bfloat16")
    slots = shaped((256,), "int32")
    written = new, new, slots, pool, pool
    yield report("kv_write", "blocks of 64, head_dim 128", kv_write, *written, donate=(3, 4))


def main() -> None:
    """Print the table and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    target = parser.parse_args().json
    lowering.marked = True
    rows = []
    print(f"jax {jax.__version__}, {date.today()}\n")
    print(f"| {' | '.join(HEAD)} |\n| --- | --- {'| ---: ' * (len(HEAD) - 2)}|")
    for row in public_kernels():
        rows.append(row)
        numbers = row["registers"], f"{row['shared_bytes'] / 1024:.0f}", row["spill_bytes"]
        cells = row["kernel"], row["shape"], *numbers, row["wgmma"], row["bulk_copies"]
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
    about = {"jax": jax.__version__, "date": str(date.today()), "target": "sm_90a"}
    target.write_text(json.dumps(about | {"kernels": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
