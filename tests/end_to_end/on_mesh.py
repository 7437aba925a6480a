"""Serve the same requests on 1, 2, 4 and 8 CPU devices; a program of `test_tensor_parallel.py`.

It needs `JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=8`, which JAX reads
early. Its arguments are a family of models, and optionally "copies first": a bug to plant. It
prints what each number of devices gave, as JSON.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from math import prod
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import jax
import numpy as np
from jax.sharding import PartitionSpec

from radixkv.kvcache import HostConfig
from radixkv.kvcache.storage import BackendOptions, StorageWorkers, open_backend
from radixkv.scheduler.engine import Engine, make_storage_namespace
from radixkv.scheduler.handoff import Timing
from radixkv.scheduler.models import (
    Model,
    load_model,
    make_tiny_checkpoint,
    tensor_parallel_mesh,
    transformer,
)
from radixkv.scheduler.nodes import DecodeEngine, Disaggregated, PrefillEngine, kv_parts
from radixkv.scheduler.nodes.transport import InProcessExchange, InProcessTransport
from radixkv.scheduler.request import GREEDY, Request, SamplingParams

from ..costs.measure import work_of
from .conftest import assert_nothing_leaked, complete, fresh, let_copies_end

FAMILY: Final[Any] = sys.argv[1] if __name__ == "__main__" else None
MODEL: Final = {"num_key_value_heads": 4, "num_hidden_layers": 1, "vocab_size": 256}
"""With 8 query heads: on 2 and 4 devices KV heads are cut, on 8 each is on two devices."""
SIZES: Final[dict[str, Any]] = {"token_budget": 8, "max_running": 4}
FEW: Final[dict[str, Any]] = {**SIZES, "num_blocks": 14, "reserve_tokens": 0}
"""So few blocks that requests are preempted."""
PREFIX: Final = [(11 * i) % 250 + 2 for i in range(14)]
PROMPTS: Final = [[*PREFIX, 3], [*PREFIX, 4, 5], PREFIX, [7], [9, *PREFIX]]
SAMPLED: Final = (
    GREEDY,
    SamplingParams(temperature=0.9, seed=1),
    SamplingParams(temperature=1.4, top_k=40, top_p=0.95, seed=2),
)
ADJUSTED: Final = SamplingParams(
    temperature=0.8, seed=3, min_p=0.01, repetition_penalty=1.2, presence_penalty=0.3
)


@contextmanager
def files(directory: Path) -> Iterator[StorageWorkers]:
    """Open a directory as storage, and close it at the end."""
    backend = open_backend(f"file://{directory}", BackendOptions(max_bytes=2**30))
    storage = StorageWorkers(backend, max_bytes_in_flight=2**28)
    yield storage
    assert storage.close(timeout_s=1000)


def serve(engine: Engine, directory: Path) -> dict[str, Any]:
    """Serve with caches, preemption and tiers; return tokens, and what shows that these worked."""
    cached = fresh(engine, **SIZES)
    outputs = [complete(cached, PROMPTS, 12, SAMPLED) for _ in range(2)]
    few = fresh(engine, **FEW)
    outputs.append(complete(few, PROMPTS, 12, SAMPLED))
    with files(directory) as storage:
        tiers: dict[str, Any] = {
            "host": HostConfig(15, "through"),
            "storage": storage,
            "storage_namespace": make_storage_namespace(engine._runner.model, "tiny", 4),
        }
        stored = fresh(engine, **FEW, **tiers, preempt="storage")
        outputs.append(complete(stored, PROMPTS, 12, SAMPLED))
        let_copies_end(stored._runner)
        assert stored.close(timeout_s=1000)
    runs = (cached, few, stored)
    return {
        "outputs": outputs,
        "devices": cached.stats().num_devices,
        "hits": cached.stats().scheduler.hit_tokens,
        "preemptions": few.stats().scheduler.preemptions,
        "parked": stored.stats().scheduler.parked,
        "compilations": [run.stats().compilations_after_warm_up for run in runs],
    }


def load_stored(engine: Engine, directory: Path) -> dict[str, Any]:
    """Serve what another engine has stored; return tokens, and how many were loaded."""
    with files(directory) as storage:
        namespace = make_storage_namespace(engine._runner.model, "tiny", 4)
        loading = fresh(
            engine,
            **SIZES,
            host=HostConfig(15, "through"),
            storage=storage,
            storage_namespace=namespace,
        )
        outputs = complete(loading, PROMPTS, 12, SAMPLED)
        assert loading.close(timeout_s=1000)
    return {"outputs": outputs, "loaded": loading.stats().scheduler.storage_hit_tokens}


def adjusted(engine: Engine) -> list[Any]:
    """Serve requests with penalties and log probabilities."""
    serving = fresh(engine, **SIZES)
    request = Request("a", PROMPTS[0], 6, sampling=ADJUSTED, logprobs=3, prompt_logprobs=2)
    serving.add_request(request)
    serving.run()
    assert_nothing_leaked(serving)
    records = [*request.output_logprobs, *request.prompt_records]
    return [each and [each[0], each.rank, each.logprob] for each in records]


def steps(engine: Engine) -> dict[str, Any]:
    """Count instructions of decode steps, what devices send, and see whether pools stay in place.

    The instructions are those of radixkv, and of JAX's Python code, by number of requests. To send
    arrays to several devices, JAX executes some more in each step, whatever the number of requests.
    """
    found: dict[str, Any] = {"in place": True}
    for number in (1, SIZES["max_running"]):
        serving = fresh(engine, **SIZES)
        for name in range(number):
            serving.add_request(Request(str(name), PROMPTS[0], 20))
        for _ in range(8):
            serving.step()
        before = addresses(serving)
        work = [work_of(serving.step)[1] for _ in range(4)]  # in a block, and at the start of one
        found[f"{number} rows"] = {
            "ours": min(each.ours for each in work),
            "JAX": min(each.total - each.ours for each in work),
        }
        found["in place"] &= addresses(serving) == before
    programs = engine._runner._programs._programs
    [decode] = {key for key in programs if getattr(key, "num_rows", 0) == 1 and key.is_decode}
    return found | {"collectives": collectives(programs[decode].as_text() or "")}


def collectives(program: str) -> list[tuple[str, int]]:
    """Return what the devices of a compiled program send: the kind, and how many numbers."""
    kinds = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"
    found = re.findall(rf" = \w+\[([\d,]*)\]\S* ({kinds})(?:-start)?\(", program)
    return [(kind, prod(map(int, shape.split(",")))) for shape, kind in found]


def on_nodes(prefill: Model, decode: Model) -> dict[str, Any]:
    """Serve with two nodes, whose blocks differ in size, too."""
    exchange, ticks = InProcessExchange(), count()
    sizes = {"num_blocks": 64, "max_model_len": 40, "timing": Timing(), **SIZES}
    options: dict[str, Any] = {**sizes, "epoch": 1, "now": 0.0}
    nodes = (
        PrefillEngine(prefill, InProcessTransport(exchange), block_size=4, **options),
        DecodeEngine(decode, InProcessTransport(exchange), block_size=6, **options),
    )
    front = Disaggregated([nodes[0]], [nodes[1]], clock=lambda: next(ticks) * 0.001)
    requests = [
        Request(str(place), prompt, 12, sampling=SAMPLED[place % len(SAMPLED)])
        for place, prompt in enumerate(PROMPTS)
    ]
    for request in requests:
        front.add_request(request)
    front.run()
    assert front.failures == {}
    stats = [node.stats() for node in nodes]
    assert front.close()
    return {
        "outputs": [list(request.output_tokens) for request in requests],
        "compilations": [each.engine.compilations_after_warm_up for each in stats],
    }


def parts(engine: Engine) -> dict[str, Any]:
    """Write a part that lies on a device of another node, and read it into one that is whole."""
    with patch.object(kv_parts, "MAX_PART_BLOCKS", 2):
        reader, writer = (
            kv_parts.KVParts(engine._runner, kind, "weights") for kind in ("gather", "scatter")
        )
    blocks, random = [3, 1, 2], np.random.default_rng(0)
    shapes = [spec.shape for spec in reader.describe(len(blocks)).arrays]
    given = [random.normal(size=shape).astype(np.float32) for shape in shapes]
    writer.write(blocks, jax.device_put(given, jax.devices()[5]))
    # A transfer between sets of devices waits for the step that writes the blocks.
    with patch.object(jax, "device_put", side_effect=AssertionError("joined by a transfer")):
        read = reader.read(blocks)
    return {
        "equal": all(np.array_equal(*pair) for pair in zip(read, given, strict=True)),
        "devices": [sorted(device.id for device in array.devices()) for array in read],
        "compilations": engine.stats().compilations_after_warm_up,
    }


def addresses(engine: Engine) -> list[int]:
    """Return where the parts of the pools are."""
    arrays = engine._runner.arrays
    pools = (*arrays.keys, *arrays.values)
    return [part.data.unsafe_buffer_pointer() for pool in pools for part in pool.addressable_shards]


def main() -> None:
    """Serve on each number of devices, then load what each has stored on each."""
    numbers = [1, 2, 4, 8]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        make_tiny_checkpoint(directory / "model", FAMILY, overrides=MODEL)
        engines = {}
        for number in numbers:
            mesh = None if number == 1 else tensor_parallel_mesh(number)
            model = load_model(directory / "model", mesh=mesh)
            engine = Engine(model, block_size=4, num_blocks=64, max_model_len=40, **SIZES)
            engines[number] = engine
            found[str(number)] = serve(engine, directory / str(number)) | {
                "adjusted": adjusted(engine) if number in (1, 8) else None,
                "parts": parts(engine),
                "steps": steps(engine),
            }
        for writer in numbers:
            for reader in numbers:
                loaded = load_stored(engines[reader], directory / str(writer))
                found[f"{writer} to {reader}"] = loaded
        found["nodes"] = on_nodes(*(engines[number]._runner.model for number in (2, 4)))
    print(json.dumps(found))


def plant() -> None:
    """Serve on each number of devices with the bug."""
    found = {}
    axes = PartitionSpec(None, ("copies", "heads"))
    with tempfile.TemporaryDirectory() as name, patch.object(transformer, "SECOND_AXIS", axes):
        make_tiny_checkpoint(name, FAMILY, overrides=MODEL)
        for number in (1, 4, 8):
            mesh = None if number == 1 else tensor_parallel_mesh(number)
            model = load_model(name, mesh=mesh)
            engine = Engine(model, block_size=4, num_blocks=64, max_model_len=40, **SIZES)
            found[str(number)] = complete(engine, PROMPTS, 12, SAMPLED)
    print(json.dumps(found))


if __name__ == "__main__":
    main() if len(sys.argv) == 2 else plant()
