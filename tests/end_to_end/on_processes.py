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
from radixkv.scheduler.models import load_model
from radixkv.scheduler.nodes.channel import Secret
from radixkv.scheduler.nodes.process_group import ProcessGroup, init_processes
from radixkv.scheduler.request import GREEDY, Request, SamplingParams

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


def make_engine(directory: Path, group: ProcessGroup | None, **options: Any) -> Engine:
    """Make an engine on all devices of a group, or on one."""
    mesh = None if group is None else Mesh(np.array(jax.devices()), ("tp",))
    model = load_model(directory, mesh=mesh)
    return Engine(model, host=HostConfig(15, "through"), group=group, **{**SIZES, **options})


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
            engine.follow()
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
