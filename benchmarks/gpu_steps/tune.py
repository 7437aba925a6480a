"""Time launch configurations of `paged_decode` and write the fastest as a tuning table.

Only configurations that `compile_report.py` reports without spills are timed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from radixkv.kernels import tuning
from radixkv.kernels.backends import target_device
from radixkv.kernels.online_softmax import check_options
from radixkv.kernels.paged_decode.config import DecodeConfig, choose_config

from .problems import Record, Sizes, point
from .timing import Timing

COMPILED = Path(__file__).with_name("compiled.json")
MAX_RATIO = 0.98
"""A configuration gets an entry if its time is at most this fraction of the rule's."""


def candidates() -> list[DecodeConfig]:
    """Configurations for a head_dim of 128 besides the rule's; `splits` depends on the batch."""
    tilings = ((64, 4), (64, 5), (64, 6), (128, 3))
    return [DecodeConfig(tile, stages, 1) for tile, stages in tilings]


def without_spills(block_size: int) -> list[tuple[int, int]]:
    """(tile_tokens, stages) of the configurations without spills."""
    rows = json.loads(COMPILED.read_text())["kernels"]
    return [
        (row["tile_tokens"], row["stages"])
        for row in rows
        if row["kernel"] == "tiling" and row["block_size"] == block_size and not row["spill_bytes"]
    ]


def tune(sizes: Sizes, block_size: int) -> Iterator[Timing]:
    """Every configuration without spills, with the rule's splits, half and twice as many."""
    device = target_device()
    for batch, length in sizes.decode:
        rule = choose_config(batch, sizes.kv_heads, sizes.head_dim, length, 2, device.num_cores)
        splits = {rule.splits}
        if rule.splits > 1:
            splits |= {max(1, rule.splits // 2), 2 * rule.splits}
        configs = {rule} | {
            DecodeConfig(*tiling, split)
            for tiling in without_spills(block_size)
            for split in splits
        }
        for config in sorted(configs, key=lambda each: (each != rule, str(each))):
            record = {
                "tuned": point(batch, length),
                "device_kind": device.name,
                "rule": config == rule,
                "entry": {
                    "dtype": "bfloat16",
                    "head_dim": sizes.head_dim,
                    "group": sizes.q_heads // sizes.kv_heads,
                    "block_size": block_size,
                    "rows": tuning.bucket(batch * sizes.kv_heads),
                    "tokens": tuning.bucket(length),
                    "config": vars(config),
                },
            }
            yield _timing(sizes, block_size, batch, length, config, record)


def _timing(
    sizes: Sizes, block_size: int, batch: int, length: int, config: DecodeConfig, record: Record
) -> Timing:
    from radixkv.kernels.paged_decode import mosaic as paged_decode_mosaic

    from .ours import make_pools, make_tables, normal

    options = check_options(sizes.head_dim**-0.5, None, None, None, sizes.q_heads)

    def make() -> Any:
        q = normal(3, (batch, sizes.q_heads, sizes.head_dim))
        tables = make_tables(sizes, block_size, [length] * batch, sizes.calls)
        shared = (q, *make_pools(sizes, block_size), jnp.full(batch, length, jnp.int32))
        return shared, [(table,) for table in tables]

    def attend(q: Any, k: Any, v: Any, lengths: Any, table: Any) -> jax.Array:
        out, _ = paged_decode_mosaic.decode(
            q,
            k,
            v,
            table,
            lengths,
            None,
            None,
            options=options,
            config=config,
            return_lse=False,
        )
        return out

    return Timing(record, attend, make)


def tables_of(records: list[Record], measured: Record) -> dict[str, str]:
    """File name and text of each device's table of configurations faster than the rule."""
    by_shape: dict[tuple[Any, ...], list[Record]] = {}
    kinds: dict[str, list[Record]] = {}
    for record in records:
        if "tuned" in record:
            entry = record["entry"]
            key = (record["device_kind"], entry["block_size"], entry["rows"], entry["tokens"])
            by_shape.setdefault(key, []).append(record)
            kinds.setdefault(record["device_kind"], [])
    for (kind, *_), timed in by_shape.items():
        best = min(timed, key=lambda record: record["seconds"])
        rules = [record["seconds"] for record in timed if record["rule"]]
        if rules and best["seconds"] <= MAX_RATIO * rules[0]:
            kinds[kind].append(best["entry"])
    return {
        tuning.file_name(kind): json.dumps(
            {"device_kind": kind, "measured": measured, "paged_decode": entries}, indent=1
        )
        + "\n"
        for kind, entries in kinds.items()
    }
