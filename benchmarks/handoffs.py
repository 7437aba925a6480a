"""Time hand-offs between nodes over jax and NIXL: by groups of layers, and by devices.

Run:
    python benchmarks/handoffs.py [--rounds N] [--transports jax nixl] [--cases groups devices]

P and D are real nodes with a random model on CPU devices, in one process, over a transport between
processes. A hand-off takes from the end of the step that computes the last token of the prompt, on
P, until D may decode (starts), and until D has computed a token (token)::

    groups     P computes the prompt in one step, and sends 1, 4 or as many groups of layers as
               there are
    devices    P and D have 2 or 4 devices; P asks when it has computed all, so that all of the
               prompt is sent after that

Those that are compared take turns in each round, each time with another prompt, of which D has
nothing. Times are medians of wall clock; ratios are medians of the rounds' ratios, and in brackets
their quartiles. An unequal pair is compared with the mean of the two equal ones. Exits with 1 if an
unequal pair takes more than 1.3 times as long.

XLA computes on one thread, so that another core is free for the transfer.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any, NamedTuple
from unittest.mock import patch

import jax
import numpy as np
from machine import describe_machine, installed

from radixkv.scheduler import Request
from radixkv.scheduler.handoff import DecodeFailed, Finished, Started, Timing
from radixkv.scheduler.models import (
    Model,
    load_model,
    make_tiny_checkpoint,
    tensor_parallel_mesh,
)
from radixkv.scheduler.nodes import DecodeEngine, PrefillEngine
from radixkv.scheduler.nodes.transport.registry import open_transport

TRANSPORTS = ("jax", "nixl")
CASES = ("groups", "devices")
NUM_LAYERS, BLOCK_SIZE, NUM_DEVICES = 8, 16, 4
MODEL: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
TIMING = Timing(retry_s=60.0, silence_s=600.0, transfer_s=600.0, remember_s=1.0)
TARGET = 1.3
_PAUSE_S = 1e-4
_WARM_UP_ROUNDS = 2


class Times(NamedTuple):
    """Seconds of a hand-off.

    Attributes:
        computed: until P has computed the prompt.
        starts, token: from then on until D may decode, and until it has computed a token.
    """

    computed: float
    starts: float
    token: float


class Pair(NamedTuple):
    """A prefill and a decode node that hand over to each other."""

    p: PrefillEngine
    d: DecodeEngine

    def hand_over(self, name: str, prompt: Sequence[int]) -> Times:
        """Compute a prompt, hand it over, and compute a token on D."""
        p, d = self
        computed_s = started_s = ended_s = 0.0
        update: Callable[..., object] = p.scheduler.update

        def note_and_update(*results: Any) -> None:
            nonlocal computed_s
            computed_s = time.perf_counter()  # the last time is that of the last chunk
            update(*results)

        with patch.object(p.scheduler, "update", note_and_update):
            begun_s = time.perf_counter()
            p.begin(Request(name, prompt, 2), "d")
            while not ended_s or p.num_open_handoffs:
                if not (self._turn(p, d, "p") | self._turn(d, p, "d")):
                    time.sleep(_PAUSE_S)
                assert not p.take_reports(), "P has failed"
                for report in d.take_reports():
                    assert not isinstance(report, DecodeFailed), report
                    if isinstance(report, Started):
                        started_s = time.perf_counter()
                    elif isinstance(report, Finished):
                        ended_s = time.perf_counter()
        return Times(computed_s - begun_s, started_s - computed_s, ended_s - computed_s)

    @staticmethod
    def _turn(node: Any, other: Any, name: str) -> bool:
        was_busy = False
        for call in (lambda: node.poll(time.monotonic()), node.step):
            was_busy |= call()
            for message in node.take_messages():
                other.receive(message._replace(peer=name))
        return was_busy


@contextmanager
def node(kind: Any, model: Model, transport: str, num_tokens: int, **options: Any) -> Iterator[Any]:
    """Start a node for one prompt at a time."""
    with closing(open_transport(transport)) as opened:
        made = kind(
            model,
            opened,
            epoch=1,
            now=time.monotonic(),
            timing=TIMING,
            block_size=BLOCK_SIZE,
            num_blocks=num_tokens // BLOCK_SIZE + 2,
            max_running=1,
            max_model_len=num_tokens + 2,
            **options,
        )
        yield made
        made.close()


def alternate(
    pairs: dict[Any, Pair], num_tokens: int, rounds: int, random: np.random.Generator
) -> dict[Any, list[Times]]:
    """Let pairs take turns; another one begins in each round."""
    times: dict[Any, list[Times]] = {key: [] for key in pairs}
    for number in range(rounds + _WARM_UP_ROUNDS):
        keys = list(pairs)
        for key in keys[number % len(keys) :] + keys[: number % len(keys)]:
            prompt = random.integers(2, MODEL["vocab_size"], num_tokens).tolist()
            taken = pairs[key].hand_over(f"{key}-{number}", prompt)
            if number >= _WARM_UP_ROUNDS:
                times[key].append(taken)
    for pair in pairs.values():
        for each in pair:
            assert each.stats().engine.compilations_after_warm_up == 0
    return times


def ms(times: Sequence[Times]) -> str:
    """Return the medians as cells."""
    return " | ".join(f"{median(each) * 1e3:.1f}" for each in zip(*times, strict=True))


def ratio(name: str, ones: Sequence[Times], others: Sequence[Sequence[Times]]) -> tuple[float, str]:
    """Compare a time of each round with its mean over others in that round.

    Returns:
        The median of the ratios, and a cell that has their quartiles, too.
    """
    times = [getattr(each, name) for each in ones]
    means = [mean([getattr(each, name) for each in round_]) for round_ in zip(*others, strict=True)]
    ratios = [one / other for one, other in zip(times, means, strict=True)]
    first, middle, third = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return middle, f"{middle:.2f} ({first:.2f} to {third:.2f})"


def measure_groups(transport: str, directory: Path, num_tokens: int, rounds: int) -> Iterator[str]:
    """Yield a row for each number of groups."""
    model, random = load_model(directory), np.random.default_rng(0)
    pairs, numbers = {}, (1, 4, NUM_LAYERS)
    with ExitStack() as stack:
        for num_groups in numbers:
            given = {"num_groups": num_groups, "token_budget": num_tokens}
            p = node(PrefillEngine, model, transport, num_tokens, **given)
            d = node(DecodeEngine, model, transport, num_tokens, **given)
            pairs[num_groups] = Pair(stack.enter_context(p), stack.enter_context(d))
        times = alternate(pairs, num_tokens, rounds, random)
    for num_groups in numbers:
        taken = times[num_groups]
        cells = [ratio(name, taken, [times[1]])[1] for name in ("starts", "token")]
        name = f"{num_groups} (all)" if num_groups == NUM_LAYERS else str(num_groups)
        yield f"| {transport} | {name} | {ms(taken)} | {' | '.join(cells)} |"


def measure_devices(
    transport: str, directory: Path, num_tokens: int, rounds: int, worst: list[float]
) -> Iterator[str]:
    """Yield a row for each pair of numbers of devices, and add the ratios of unequal ones."""
    sizes, random = (2, 4), np.random.default_rng(0)
    models = {size: load_model(directory, mesh=tensor_parallel_mesh(size)) for size in sizes}
    pairs = {}
    with ExitStack() as stack:
        for one in sizes:
            for other in sizes:
                budget: dict[str, Any] = {"token_budget": 256}
                late = budget | {"order": "prefill_complete"}
                p = node(PrefillEngine, models[one], transport, num_tokens, **late)
                d = node(DecodeEngine, models[other], transport, num_tokens, **budget)
                pairs[one, other] = Pair(stack.enter_context(p), stack.enter_context(d))
        times = alternate(pairs, num_tokens, rounds, random)
    for (one, other), taken in times.items():
        equal = times[one, one], times[other, other]
        found = [ratio(name, taken, equal) for name in ("starts", "token")]
        if one != other:
            worst += [value for value, _ in found]
        cells = [cell if one != other else "" for _, cell in found]
        yield f"| {transport} | {one} | {other} | {ms(taken)} | {' | '.join(cells)} |"


def main() -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="default: %(default)s")
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=TRANSPORTS)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--tokens", type=int, default=2048, help="default: %(default)s")
    given = parser.parse_args()
    flags = "--xla_cpu_multi_thread_eigen=false"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    settings: Any = jax.config  # its method has no types
    settings.update("jax_platforms", "cpu")
    settings.update("jax_num_cpu_devices", NUM_DEVICES)
    print(describe_machine(f"JAX {jax.__version__}", f"NIXL {installed('nixl-cu12')}"))
    head = "Computed, ms | Starts, ms | Token, ms | Ratio, starts | Ratio, token |"
    worst: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        settings.update("jax_compilation_cache_dir", f"{name}/programs")
        settings.update("jax_persistent_cache_min_compile_time_secs", 0)
        make_tiny_checkpoint(f"{name}/model", overrides=MODEL)
        directory = Path(name, "model")
        if "groups" in given.cases:
            print(f"\n| Transport | Groups | {head}\n| --- | ---: |{' ---: |' * 5}")
            for transport in given.transports:
                for row in measure_groups(transport, directory, given.tokens, given.rounds):
                    print(row, flush=True)
        if "devices" in given.cases:
            print(f"\n| Transport | On P | On D | {head}\n| --- | ---: | ---: |{' ---: |' * 5}")
            for transport in given.transports:
                rows = measure_devices(transport, directory, given.tokens, given.rounds, worst)
                for row in rows:
                    print(row, flush=True)
    return int(any(value > TARGET for value in worst))


if __name__ == "__main__":
    sys.exit(main())
