"""Time launch configurations of the attention kernels, and make a tuning table of the fastest.

A configuration that cannot be compiled, or whose output differs from that of the rule's, is left
out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from radixkv.kernels import tuning
from radixkv.kernels.backends import TargetDevice, target_device
from radixkv.kernels.mosaic_compat import interpret_params
from radixkv.kernels.online_softmax import check_options
from radixkv.kernels.paged_decode import config as decode_rules
from radixkv.kernels.paged_decode import mosaic as decode_mosaic
from radixkv.kernels.paged_decode.config import DecodeConfig
from radixkv.kernels.paged_extend import config as extend_rules
from radixkv.kernels.paged_extend import mosaic as extend_mosaic
from radixkv.kernels.paged_extend.config import ExtendConfig

from .ours import decode_timing, extend_timing
from .problems import HEADLINE, Kind, Record, Sizes, point
from .timing import Timing, measure

MAX_RATIO = 0.98
"""A configuration gets an entry if its time is at most this fraction of the rule's."""
TOLERANCE = 0.02
"""Largest relative difference of its output from that of the rule's."""


def tune(sizes: Sizes, what: str, start_clock: Any, *, quick: bool = False) -> Iterator[Record]:
    """Time the configurations of a kernel.

    Args:
        sizes: the problems.
        what: kernel, and block size or "kinds" for other heads and pools: "decode 64".
        start_clock: called when all programs are compiled.
        quick: whether to time only the rule and one other configuration of each problem.
    """
    operation, which = what.split()
    timings = {"decode": _decode, "extend": _extend}[operation]
    if which == "kinds":
        found = [timing for kind in sizes.kinds for timing in timings(sizes, HEADLINE, kind, quick)]
    else:
        found = list(timings(sizes, int(which), sizes.kind, quick))
    outputs: dict[str, Any] = {}

    def check(record: Record, results: Any) -> None:
        """Compare the output of the first call with that of the rule, which comes first."""
        got = results[0].astype(jnp.float32)
        expected = outputs.setdefault(record["tuned"], got)
        error = float(jnp.linalg.norm(got - expected) / jnp.linalg.norm(expected))
        if not error <= TOLERANCE:
            raise ValueError(f"the output differs from that of the rule by {error:.2g}")

    return measure(found, sizes, start_clock, check)


def decode_configs(rule: DecodeConfig, head_dim: int) -> list[DecodeConfig]:
    """Configurations to time: other tilings, and half as many thread blocks."""
    tilings = {
        64: ((64, 6), (128, 4)),
        128: ((64, 4), (64, 5), (64, 6), (128, 3)),
        256: ((64, 4),),
    }.get(head_dim, ())
    pairs = ((rule.tile_tokens, rule.stages), *tilings)
    programs = {rule.programs, max(1, rule.programs // 2)}
    return [DecodeConfig(*pair, each) for pair in pairs for each in sorted(programs)]


def extend_configs(rule: ExtendConfig, head_dim: int) -> list[ExtendConfig]:
    """Configurations to time: other stages, with ping-pong and with overlap."""
    tilings = {
        64: ((64, 4), (64, 6), (128, 3), (128, 4), (128, 5)),
        128: ((64, 3), (64, 4), (128, 2)),
        256: ((64, 2),),
    }.get(head_dim, ())
    return [
        replace(rule, block_kv=block_kv, stages=stages, overlap=overlap)
        for block_kv, stages in tilings
        for overlap in (False, True)
    ]


def _others(rule: Any, configs: list[Any], quick: bool) -> list[Any]:
    """The rule first, then the others."""
    others = [config for config in configs if config != rule]
    return [rule, *(others[:1] if quick else others)]


def _interpret(device: TargetDevice) -> Any:
    """Simulate the kernels on a machine without a GPU."""
    return None if device.platform == "gpu" else interpret_params()


def _decode(sizes: Sizes, block_size: int, kind: Kind, quick: bool) -> Iterator[Timing]:
    device = target_device()
    itemsize = jnp.dtype(kind.dtype).itemsize
    options = check_options(kind.head_dim**-0.5, None, None, None, sizes.kv_heads * kind.group)
    for batch, length in sizes.decode if kind == sizes.kind else sizes.decode[:1]:
        shape = batch, sizes.kv_heads, kind.head_dim, itemsize, device.num_cores
        rule = decode_rules.choose_config(*shape)
        key = {
            "rows": tuning.bucket(batch * sizes.kv_heads),
            "tokens": tuning.bucket(length),
        }
        for config in _others(rule, decode_configs(rule, kind.head_dim), quick):

            def attend(
                q: Any, k: Any, v: Any, tables: Any, lengths: Any, scales: Any, config: Any = config
            ) -> jax.Array:
                return decode_mosaic.decode(
                    q,
                    k,
                    v,
                    tables,
                    lengths,
                    None,
                    scales,
                    options=options,
                    config=config,
                    return_lse=False,
                    interpret=_interpret(device),
                )[0]

            rows = [length] * batch
            name = point(batch, length)
            timing = decode_timing(sizes, None, block_size, name, rows, kind, attend)
            yield _tuned(timing, sizes, kind, device, key, config, vars(config), rule)


def _extend(sizes: Sizes, block_size: int, kind: Kind, quick: bool) -> Iterator[Timing]:
    device = target_device()
    names = sizes.tuned_extend if kind == sizes.kind else sizes.tuned_extend[:1]
    options = check_options(kind.head_dim**-0.5, None, None, None, sizes.kv_heads * kind.group)
    rule = extend_rules.choose_config(kind.head_dim, device.num_cores)
    for name in names:
        rows = sizes.extend[name]
        tokens = sum(-(-row.new // 8) * 8 for row in rows)
        for config in _others(rule, extend_configs(rule, kind.head_dim), quick):

            def attend(*arrays: Any, config: Any = config) -> jax.Array:
                *given, scales = arrays
                return extend_mosaic.extend(
                    *given,
                    None,
                    scales,
                    options=options,
                    return_lse=False,
                    config=config,
                    interpret=_interpret(device),
                )[0]

            timing = extend_timing(sizes, None, block_size, name, rows, kind, attend)
            key = {"tokens": tuning.bucket(tokens)}
            fields = {field: value for field, value in vars(config).items() if field != "programs"}
            yield _tuned(timing, sizes, kind, device, key, config, fields, rule)


def _tuned(
    timing: Timing,
    sizes: Sizes,
    kind: Kind,
    device: TargetDevice,
    key: Record,
    config: Any,
    fields: Record,
    rule: Any,
) -> Timing:
    """The timing, with the entry that a table would get."""
    about = timing.record
    kernel = f"paged_{about['operation']}"
    heads = {
        "dtype": kind.dtype,
        "head_dim": kind.head_dim,
        "group": kind.group,
        "block_size": about["block_size"],
    }
    record = {
        "tuned": f"{kernel}: {about['point']}, {tuple(heads.values())}",
        "kernel": kernel,
        "device_kind": device.name,
        "rule": config == rule,
        "entry": heads | key | {"config": fields},
    }
    return replace(timing, record=record, may_fail=config != rule)


def tables_of(records: list[Record], measured: Record) -> dict[str, str]:
    """File name and text of each device's table of configurations faster than the rule."""
    by_problem: dict[tuple[str, str], list[Record]] = {}
    tables: dict[str, dict[str, list[Record]]] = {}
    for record in records:
        if "tuned" in record:
            by_problem.setdefault((record["device_kind"], record["tuned"]), []).append(record)
            table = tables.setdefault(record["device_kind"], {})
            table.setdefault(record["kernel"], [])
    for (device, _), timed in by_problem.items():
        best = min(timed, key=lambda record: record["seconds"])
        rules = [record["seconds"] for record in timed if record["rule"]]
        if rules and best["seconds"] <= MAX_RATIO * rules[0]:
            tables[device][best["kernel"]].append(best["entry"])
    return {
        tuning.file_name(device): json.dumps(
            {"device_kind": device, "measured": measured, **kernels}, indent=1
        )
        + "\n"
        for device, kernels in tables.items()
    }
