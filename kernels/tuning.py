"""Lookup of measured launch configurations: tuning tables, one JSON file per kind of device.

::

    kernels/tuning_tables/nvidia_h100_80gb_hbm3.json
    {
      "device_kind": "NVIDIA H100 80GB HBM3",
      "measured": {"time": ..., "versions": {...}},
      "paged_decode": [
        {"dtype": "bfloat16", "head_dim": 128, "group": 4, "block_size": 16,
         "rows": 512, "tokens": 4096, "config": {"tile_tokens": 64, "stages": 3, "programs": 264}}
      ],
      "paged_extend": [
        {"dtype": "bfloat16", "head_dim": 128, "group": 4, "block_size": 64,
         "tokens": 8192, "config": {"block_kv": 64, "stages": 4, "overlap": false}}
      ]
    }

`benchmarks/gpu.py --tune` writes a table, with an entry for each shape where a measured
configuration is faster than the rule. Other shapes, and devices without a table, use the rule.
"""

import json
import re
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

Key = tuple[tuple[str, Any], ...]


def file_name(device_kind: str) -> str:
    """Name of a device's tuning table."""
    return re.sub(r"[^a-z0-9]+", "_", device_kind.lower()).strip("_") + ".json"


def bucket(number: int) -> int:
    """Round up to a power of two."""
    return 1 << max(0, number - 1).bit_length()


def tuned(kernel: str, device_kind: str, **shape: Any) -> dict[str, Any] | None:
    """Return the fields of the measured configuration for a shape, or None."""
    return _table(kernel, device_kind).get(_key(shape))


def _key(shape: dict[str, Any]) -> Key:
    return tuple(sorted(shape.items()))


def _folder() -> Traversable:
    return files(__package__) / "tuning_tables"


@cache
def _table(kernel: str, device_kind: str) -> dict[Key, dict[str, Any]]:
    path = _folder() / file_name(device_kind)
    if not path.is_file():
        return {}
    entries = json.loads(path.read_text()).get(kernel, [])
    return {
        _key({name: value for name, value in entry.items() if name != "config"}): entry["config"]
        for entry in entries
    }
