"""An option that an object and one of its parts both take reaches that part.

The options come from the signatures, so a new one is either passed on or listed here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from types import ModuleType
from typing import Any, Final
from unittest.mock import MagicMock

import pytest

from radixkv.scheduler import decode, mixed, prefill
from radixkv.scheduler.engine import engine
from radixkv.scheduler.gateway import gateway, network_gateway
from radixkv.scheduler.handoff import Timing
from radixkv.scheduler.nodes import decode_node, in_process, prefill_node, remote_nodes
from radixkv.scheduler.nodes.node import NodeEngine
from radixkv.scheduler.serving import async_engine, nodes_front

TIMING: Final = Timing(0.5, silence_s=1.0, transfer_s=2.0, remember_s=3.0)
ELSEWHERE: Final = {
    ("Engine", "CacheManager", "storage"): "storage_namespace",
    ("PrefillEngine", "CacheManager", "storage"): "storage_namespace",
    ("DecodeEngine", "CacheManager", "storage"): "storage_namespace",
    ("Engine", "open_storage", "namespace"): "storage_namespace",
    ("Engine", "open_storage", "max_bytes"): "storage_max_bytes",
    ("Engine", "ModelRunner", "samples"): "prefix_cache",
}
"""Options that have another name in the object than in its part."""
OTHERWISE: Final = {
    ("Engine", "ModelRunner", "model"),  # as it is cut for the mesh
    ("Engine", "ModelRunner", "storage"),  # as it was opened
    ("DecodeEngine", "ModelRunner", "num_groups"),  # of layers in which others send
}
"""Options that are not passed on as they are."""

PARTS: Final[list[tuple[Callable[..., Any], ModuleType, Sequence[str]]]] = [
    (gateway.Gateway, gateway, ["RequestRetrier"]),
    (network_gateway.NetworkGateway, network_gateway, ["Gateway"]),
    (remote_nodes.RemoteNodes, remote_nodes, ["NetworkGateway"]),
    (in_process.Disaggregated, in_process, ["Gateway"]),
    (mixed.MixedScheduler, mixed, ["BatchScheduler"]),
    (prefill.PrefillScheduler, prefill, ["BatchScheduler", "PrefillSide"]),
    (
        decode.DecodeScheduler,
        decode,
        ["BatchScheduler", "DecodeSide", "AdmissionFairness"],
    ),
    (engine.Engine, engine, ["CacheManager", "MixedScheduler", "ModelRunner", "open_storage"]),
    (
        prefill_node.PrefillEngine,
        prefill_node,
        ["CacheManager", "PrefillScheduler", "ModelRunner", "KVSender"],
    ),
    (decode_node.DecodeEngine, decode_node, ["CacheManager", "DecodeScheduler", "ModelRunner"]),
    (async_engine.AsyncEngine, async_engine, ["EngineThread"]),
    (nodes_front.serve_nodes, nodes_front, ["AsyncEngine"]),
]
GIVEN: Final[dict[str, Any]] = {
    "timing": TIMING,
    "prefill": [],
    "decode": [],
    "clock": float,
    "storage": "file:///nowhere",
    "group": None,
    "mesh": None,
    "eos_token_ids": (),
    "num_groups": 7,
}
"""Values of those that need a certain one; each other has a number of its own."""


@pytest.mark.parametrize(
    ("make", "module", "parts"), PARTS, ids=[make.__name__ for make, *_ in PARTS]
)
def test_an_option_of_an_object_reaches_its_part(
    make: Any, module: ModuleType, parts: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    values: dict[str, Any] = {}
    for number, name in enumerate(signature(make).parameters):
        values[name] = GIVEN.get(name, 1000 + number)
    for name in ("model", "channel", "nodes", "manager"):
        if name in values:
            values[name] = MagicMock(**{"config.num_layers": 9})
    if "storage_namespace" in values:
        values["storage_namespace"] = MagicMock(weights_revision=values.get("weights_revision"))
    taken = {part: list(signature(getattr(module, part)).parameters) for part in parts}
    made = {part: MagicMock() for part in parts}
    for part, mock in made.items():
        monkeypatch.setattr(module, part, mock)
    monkeypatch.setattr(NodeEngine, "__init__", lambda self, *_, **__: setattr(self, "_kv", None))
    make(**values)
    for part, names in taken.items():
        [got] = made[part].mock_calls[:1]
        arguments = {**dict(zip(names, got.args, strict=False)), **got.kwargs}
        for name in names:
            place = make.__name__, part, name
            own = ELSEWHERE.get(place, name)
            if own in values and place not in OTHERWISE:
                assert name in arguments, f"{part} does not get {name}"
                assert arguments[name] is values[own], f"{part} has another {name}"
