"""Measure transfers of prompt parts between processes, against the bare engine.

Run:
    python benchmarks/transports.py [--rounds 15] [--transports inprocess jax nixl nixl-tcp]

A part is 32 blocks of 2 MiB. One process offers it, this one pulls it; both are on this machine.
NIXL reads the other's memory there; `nixl-tcp` is what it does where it may use TCP only.
In each round, one after the other:

    bare       the engine alone, as its documentation uses it: a connection or handle, no copy into
               staging memory, no digest, no deadline
    transport  `pull` until `Received`, so with deadline, descriptor and digests. What P does
               before, gather, copy and digest, happens while later chunks are computed
    one block  both for one array of 4 KiB: what a pull costs without its bytes

All figures are medians. `ratio` is that of the rounds' ratios, and in brackets the quartiles;
`cost per pull` that of the rounds' differences for one small array.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from statistics import median, quantiles
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from radixkv.scheduler.handoff import AttemptKey, Header, PartId, Send
from radixkv.scheduler.nodes.channel.codec import Packet, decode, encode
from radixkv.scheduler.nodes.transport import (
    InProcessExchange,
    InProcessTransport,
    Offered,
    PullInfo,
    Received,
    Transport,
    describe,
)
from radixkv.scheduler.nodes.transport.threaded import ThreadedTransport
from radixkv.scheduler.nodes.transport.transfer_engine import TransferEngine

TRANSPORTS = ("inprocess", "jax", "nixl", "nixl-tcp")
MIB = 1 << 20
BLOCKS = (32, 2 * MIB)
SMALL = (1, 4096)
STAGING_BYTES = 256 * MIB
HOUR_S = 3600.0
_WARM_UP_ROUNDS = 3
_POLL_S = 2e-4  # a node's loop looks once a millisecond; much oftener would slow the transport down


def new_engine(name: str) -> TransferEngine:
    """Start an engine by its name."""
    if name == "jax":
        from radixkv.scheduler.nodes.transport.jax_engine import JaxEngine

        return JaxEngine()
    from radixkv.scheduler.nodes.transport.nixl_engine import NixlEngine

    return NixlEngine(STAGING_BYTES)


def offer(transport: Transport, part: int, num_arrays: int, num_bytes: int) -> PullInfo:
    """Offer some arrays and wait until they are served."""
    arrays = [jnp.full(num_bytes, part % 100 + 1, jnp.int8) for _ in range(num_arrays)]
    part_id = PartId(AttemptKey(f"r{part}", 1), 1, 1, 1, part)
    transport.offer(part_id, arrays, describe(arrays, num_blocks=num_arrays), ttl_s=HOUR_S)
    while not (events := transport.poll()):
        time.sleep(1e-3)
    (event,) = events
    assert isinstance(event, Offered), event
    return event.info


def serve(name: str) -> None:
    """Offer the parts that stdin asks for, and withdraw earlier ones; runs in the other process."""
    transport = ThreadedTransport(new_engine(name))
    last = None
    for line in sys.stdin:
        if last is not None:
            transport.withdraw(last, was_read=True)
            while not transport.poll():
                time.sleep(1e-3)
        info = offer(transport, *map(int, line.split()))
        last = info.part_id.key
        send = Send(Header(last, 1), info.part_id.part, 0, 1, 0)
        print(encode(Packet("p", "d", 1, 1, send, info)).hex(), flush=True)
    transport.close()


@contextmanager
def served(name: str) -> Iterator[Callable[[int, int, int], PullInfo]]:
    """Start the other process; yield a function that lets it offer arrays."""
    if name == "inprocess":
        yield lambda *_: None  # type: ignore[arg-type,return-value]  # not used
        return
    command = [sys.executable, __file__, "--serve", name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def ask(part: int, num_arrays: int, num_bytes: int) -> PullInfo:
            stdin.write(b"%d %d %d\n" % (part, num_arrays, num_bytes))
            stdin.flush()
            info = decode(bytes.fromhex(stdout.readline().decode())).pull_info
            assert info is not None
            return info

        yield ask
        stdin.close()


def pull_s(transport: Transport, info: PullInfo) -> float:
    """Seconds from `pull` to `Received`."""
    begun = time.perf_counter()
    transport.pull(info.part_id, info, info.descriptor, timeout_s=60)
    while not (events := transport.poll()):
        time.sleep(_POLL_S)
    seconds = time.perf_counter() - begun
    (event,) = events
    assert isinstance(event, Received), event
    expected = info.part_id.part % 100 + 1
    assert all((np.asarray(array) == expected).all() for array in event.arrays)
    transport.release(info.part_id)
    return seconds


def bare_jax_s(engine: Any, info: PullInfo) -> float:
    """Seconds of a pull over a reused connection, as in JAX's documentation."""
    number, address = int.from_bytes(info.route[:8], "little"), info.route[8:].decode()
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    specs = [
        jax.ShapeDtypeStruct(each.shape, jnp.dtype(each.dtype), sharding=sharding)
        for each in info.descriptor.arrays
    ]
    if not hasattr(engine, "bare"):
        engine.bare = engine._server.connect(address)
    begun = time.perf_counter()
    jax.block_until_ready(engine.bare.pull(number, specs))
    return time.perf_counter() - begun


def bare_nixl_s(engine: Any, info: PullInfo) -> float:
    """Seconds of a read with one request per array."""
    agent, specs = engine._agent.nixl, info.descriptor.arrays
    remote = int.from_bytes(info.route[:8], "little")
    peer = engine._agent.add_peer(info.route[16:])
    size = specs[0].num_bytes
    local = engine._agent.address + STAGING_BYTES // 2
    begun = time.perf_counter()
    here = [(local + number * size, size, 0) for number in range(len(specs))]
    there = [(remote + number * size, size, 0) for number in range(len(specs))]
    handle = agent.initialize_xfer(
        "READ", agent.get_xfer_descs(here, "DRAM"), agent.get_xfer_descs(there, "DRAM"), peer
    )
    state = agent.transfer(handle)
    while state == "PROC":
        state = agent.check_xfer_state(handle)
    seconds = time.perf_counter() - begun
    assert state == "DONE", state
    agent.release_xfer_handle(handle)
    return seconds


def measure(name: str, rounds: int) -> list[str]:
    """Measure one transport."""
    if name == "inprocess":
        return measure_in_process(rounds)
    if name == "nixl-tcp":
        return measure_over_tcp(rounds)
    times: dict[tuple[str, tuple[int, int]], list[float]] = defaultdict(list)
    guarded = ThreadedTransport(new_engine(name))
    engine = new_engine(name)
    bare = bare_jax_s if name == "jax" else bare_nixl_s
    with served(name) as ask:
        for number in range(4 * (rounds + _WARM_UP_ROUNDS)):
            size = (BLOCKS, SMALL)[number // 2 % 2]
            which = ("bare", "transport")[(number + number // 4) % 2]  # who is first alternates
            info = ask(number, *size)
            seconds = bare(engine, info) if which == "bare" else pull_s(guarded, info)
            if number >= 4 * _WARM_UP_ROUNDS:
                times[which, size].append(seconds)
    guarded.close()
    speeds = [f"{64 / median(times[which, BLOCKS]):,.0f} MiB/s" for which in ("bare", "transport")]
    ratios = [
        bare_s / ours_s
        for bare_s, ours_s in zip(times["bare", BLOCKS], times["transport", BLOCKS], strict=True)
    ]
    first, middle, third = quantiles(ratios, n=4)
    costs = [
        ours_s - bare_s
        for bare_s, ours_s in zip(times["bare", SMALL], times["transport", SMALL], strict=True)
    ]
    spread = f"{middle:.2f} ({first:.2f} to {third:.2f})"
    return [name, *speeds, spread, f"{median(costs) * 1e3:.2f} ms"]


def measure_in_process(rounds: int) -> list[str]:
    """Measure the transport inside a process."""
    exchange = InProcessExchange()
    p, d = InProcessTransport(exchange), InProcessTransport(exchange)
    big, small = [], []
    for number in range(rounds):
        big.append(pull_s(d, offer(p, 2 * number, *BLOCKS)))
        small.append(pull_s(d, offer(p, 2 * number + 1, *SMALL)))
    whole = f"{median(big) * 1e6:,.0f} µs in all"
    return ["inprocess", "no copy", whole, "", f"{median(small) * 1e3:.2f} ms"]


def measure_over_tcp(rounds: int) -> list[str]:
    """Measure NIXL over TCP in a new process, which has not loaded it yet."""
    command = [sys.executable, __file__, "--transports", "nixl", "--rounds", str(rounds)]
    environment = os.environ | {"UCX_TLS": "tcp"}
    ran = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    row = ran.stdout.splitlines()[-1]
    return ["nixl-tcp", *row.strip("| ").split(" | ")[1:]]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--transports", nargs="+", default=TRANSPORTS)
    parser.add_argument("--serve", metavar="TRANSPORT", help="be the other process")
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    rows = [measure(name, options.rounds) for name in options.transports]
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    print(
        f"{datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} CPUs ({platform.machine()}), "
        f"load {load}, Python {platform.python_version()}, jax {jax.__version__}, "
        f"median of {options.rounds}\n"
    )
    header = ["transport", "bare engine", "transport's pull", "ratio (quartiles)", "cost per pull"]
    for row in [header, ["---"] * len(header), *rows]:
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
