"""One of several processes that share a model; a program of `test_processes.py`.

It needs `JAX_PLATFORMS=cpu`, and `XLA_FLAGS` for its number of devices, which JAX reads early. Its
arguments are its id, the number of processes, the port of the coordinator, a directory with a
model, and what to do. Process 0 prints what it has served, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import Mesh

from radixkv.kvcache import HostConfig
from radixkv.scheduler.engine import Engine
from radixkv.scheduler.engine.calls import Call
from radixkv.scheduler.errors import GroupError
from radixkv.scheduler.models import Params, load_model
from radixkv.scheduler.nodes.channel import Secret
from radixkv.scheduler.nodes.process_group import ProcessGroup, init_processes
from radixkv.scheduler.request import GREEDY, Request, SamplingParams
from radixkv.scheduler.serving import GenerationParams

SIZES: Final[dict[str, Any]] = {
    "block_size": 4,
    "num_blocks": 14,
    "token_budget": 8,
    "max_running": 4,
    "max_model_len": 40,
    "reserve_tokens": 0,
}
"""So few blocks that requests are preempted."""
PREFIX: Final = [(11 * i) % 250 + 2 for i in range(14)]
PROMPTS: Final = [[*PREFIX, 3], [*PREFIX, 4, 5], PREFIX, [7], [9, *PREFIX]]
SAMPLED: Final = (
    GREEDY,
    SamplingParams(temperature=0.9, seed=1),
    SamplingParams(temperature=0.8, seed=3, min_p=0.01, repetition_penalty=1.2),
)
KILLED: Final = 9
LOST: Final = 77
"""Exit status of a process that a `GroupError` has ended."""


def make_requests() -> list[Request]:
    """Requests of every kind of sampling; the last one also wants log probabilities."""
    requests = [
        Request(str(place), prompt, 12, sampling=SAMPLED[place % len(SAMPLED)])
        for place, prompt in enumerate(PROMPTS)
    ]
    return [*requests, Request("p", PROMPTS[0], 4, logprobs=2, prompt_logprobs=1)]


def serve(engine: Engine) -> dict[str, Any]:
    """Serve twice, the second time with what the host tier has kept."""
    outputs = []
    for _ in range(2):
        requests = make_requests()
        for request in requests:
            engine.add_request(request)
        engine.run()
        engine.manager.check()
        outputs.append([list(request.output_tokens) for request in requests])
    stats = engine.stats()
    return {
        "outputs": outputs,
        "logprobs": [each.logprob for each in requests[-1].output_logprobs],
        "prompt": [each and each.logprob for each in requests[-1].prompt_records],
        "devices": stats.num_devices,
        "preemptions": stats.scheduler.preemptions,
        "host_hits": stats.scheduler.host_hit_tokens,
    }


def train(params: Params) -> Params:
    """Run a program on the devices of all processes, which wait for each other."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, params)

    def step(params: Params) -> Params:
        trained: Params = jax.tree.map(lambda leaf: 1.25 * leaf + 0 * leaf.sum(), params)
        return trained

    return jax.jit(step, out_shardings=shardings)(params)


def serve_new_weights(engine: Engine, directory: Path, revision: str, what: str) -> dict[str, Any]:
    """Get other weights amid some requests, and serve samples with them."""
    requests = make_requests()
    for request in requests:
        engine.add_request(request)
    for _ in range(6):
        engine.step()
    # After the steps, because all processes run all programs in the same order.
    params = new_params(directory, revision, what)
    engine.reset_cache(params=params, weights_revision=revision)
    samples = GenerationParams(6, SAMPLED[1], n=3).make_requests("n", [8, *PREFIX], None, ())
    for request in samples:
        engine.add_request(request)
    engine.run()
    engine.manager.check()
    return {"outputs": [list(each.output_tokens) for each in (*requests, *samples)]}


def make_engine(directory: Path, group: ProcessGroup | None, **options: Any) -> Engine:
    """Make an engine on all devices of a group, or on one."""
    mesh = None if group is None else mesh_of_all()
    model = load_model(directory, mesh=mesh)
    return Engine(model, host=HostConfig(15, "through"), group=group, **{**SIZES, **options})


def new_params(directory: Path, revision: str, what: str) -> Params:
    """Weights of a name, of the host or trained by all processes; or, by mistake, the old ones."""
    if what == "stale weights":
        return load_model(directory).params
    if what == "trained weights":
        mesh = mesh_of_all() if jax.process_count() > 1 else None
        return train(load_model(directory.with_name(revision), mesh=mesh).params)
    return load_model(directory.with_name(revision)).params


def mesh_of_all() -> Mesh:
    """The devices of all processes."""
    return Mesh(np.array(jax.devices()), ("tp",))


def kill_at(group: ProcessGroup, number: int) -> None:
    """End this process, as a kill does, before it executes a call."""
    calls = group.calls

    def some() -> Iterator[Call]:
        for place, call in enumerate(calls(), start=1):
            if place == number:
                os._exit(KILLED)
            yield call

    group.calls = some  # type: ignore[method-assign]


def forge_at(group: ProcessGroup, number: int) -> None:
    """Execute another call than process 0 has sent, and report what was executed."""
    calls = group.calls

    def some() -> Iterator[Call]:
        for place, call in enumerate(calls(), start=1):
            receiver: Any = group._receiver
            if place == number:
                receiver._digest = bytes(16)
            yield call

    group.calls = some  # type: ignore[method-assign]


def main() -> None:
    """Lead or follow."""
    process, num_processes = int(sys.argv[1]), int(sys.argv[2])
    directory, what = Path(sys.argv[4]), sys.argv[5]
    init_processes(f"127.0.0.1:{sys.argv[3]}", num_processes, process)
    options = {"block_size": 8} if process and what == "other options" else {}
    if process and what == "other model":
        directory = directory.with_name("other")
    try:
        group = ProcessGroup(timeout_s=100, secret=Secret(b"of all these processes"))
        engine = make_engine(directory, group, **options)
        if process:
            if what == "killed":
                kill_at(group, 30)
            elif what == "forged":
                forge_at(group, 30)
            engine.follow(lambda revision: new_params(directory, revision, what))
        elif what.endswith("weights"):
            given = directory, "other", what.replace("stale", "other")
            print(json.dumps(serve_new_weights(engine, *given)), flush=True)
        elif what == "leader killed":
            engine.add_request(Request("a", PROMPTS[0], 12))
            engine.step()
            os._exit(KILLED)
        else:
            print(json.dumps(serve(engine)), flush=True)
        assert engine.close(timeout_s=60)
        group.close()
    except GroupError as error:
        print(f"GroupError: {error}", file=sys.stderr, flush=True)
        os._exit(LOST)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
