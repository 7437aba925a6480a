"""`radixkv prefill-node` and `decode-node`: serve one role until stopped."""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from threading import Event
from typing import Any, Final

from ...kvcache import EventBatch
from ...kvcache.storage import Storage
from ..engine import make_storage_namespace
from ..gateway.cache_index import CacheReporter
from ..handoff import MAX_PART_BLOCKS, Timing
from ..handoff.gateway_messages import GATEWAY
from ..models import load_config, model_dtype
from ..models.weights_digest import weights_digest
from ..nodes import DecodeEngine, PrefillEngine
from ..nodes.channel import ChannelAddressError, Secret, ZmqChannel, load_secret
from ..nodes.channel.address import check_target
from ..nodes.channel.schema import MAX_NAME_CHARS
from ..nodes.event_loop import NodeEventLoop
from ..nodes.open_files import reserve_files
from ..nodes.transport import Transport
from ..nodes.transport.registry import STAGING_BYTES, open_transport
from ..terminal.interrupts import exit_on_interrupt
from ..text import locate_model
from .errors import BadInputError
from .exit_status import say
from .options.common import check_memory, check_tiers, host_tier, reserve_tokens
from .shared.kv_events import publishing
from .shared.model_loading import load_model_of_options
from .shared.output import describe_node
from .shared.startup import report_on_stderr
from .shared.tiers import storage_of_options

_RETRIES_PER_SILENCE: Final = 5
_SILENCES_PER_TRANSFER: Final = 6
_LATE_S: Final = 60.0
"""How long after a silence a message from before it may still arrive."""


def run(arguments: argparse.Namespace) -> int:
    """Serve until stopped, and print the statistics as one JSON object."""
    check(arguments)
    with _stop_signals(arguments.parent_pid) as serve_until_stopped:
        stats = serve_node(arguments, load_secret(arguments.secret_file), serve_until_stopped)
        print(json.dumps(stats, allow_nan=False), flush=True)
    return 0


def check(arguments: argparse.Namespace) -> None:
    """Reject options that no node can serve with.

    Raises:
        BadInputError: With the option and its value.
    """
    if arguments.silence_s == 0:
        raise BadInputError("--silence-s must be more than 0, got 0")
    check_memory(arguments)
    check_tiers(arguments)
    if arguments.name == GATEWAY or not 0 < len(arguments.name) <= MAX_NAME_CHARS:
        raise BadInputError(
            f"--name must have 1 to {MAX_NAME_CHARS} characters and not be {GATEWAY!r}, "
            f"got {arguments.name!r}"
        )


def serve_node(
    arguments: argparse.Namespace,
    secret: Secret | None,
    serve_until_stopped: Callable[[], Callable[[], bool]],
) -> dict[str, Any]:
    """Load the model, serve as a node until it is stopped, and return the statistics.

    Args:
        arguments: The options of a node's command, checked.
        secret: What the node shares with the others; `--secret-file` is not read.
        serve_until_stopped: Called when the node can serve; returns what tells whether to stop.
    """
    with ExitStack() as stack:
        channel = stack.enter_context(closing(_open_channel(arguments, secret)))
        host = arguments.listen.rpartition(":")[0].strip("[]")
        with report_on_stderr():
            arguments.model_dir = locate_model(arguments.model, arguments.revision)
        transport = open_transport(
            arguments.transport,
            host=host,
            staging_bytes=staging_bytes(arguments),
            storage=arguments.storage,
        )
        stack.callback(transport.close)
        timing = make_timing(arguments.silence_s)
        cache = CacheReporter()
        with report_on_stderr():
            engine, storage = _make_engine(
                arguments, transport, channel.epoch, timing, cache, stack
            )
        loop = NodeEventLoop(
            engine,
            channel,
            gateway=arguments.gateway,
            transport=arguments.transport,
            timing=timing,
            cache=cache,
        )
        stats = engine.stats().engine
        attention = f"{stats.attention_backend} ({stats.attention_reason})"
        gc.collect()
        gc.freeze()  # a collection during a step need not visit the model and the programs
        is_stopped = serve_until_stopped()
        for line in (
            f"{arguments.name} has dtype {stats.dtype} and attention backend {attention}",
            f"{arguments.name} serves at {channel.address}",
        ):
            say(line)
        loop.run(is_stopped)
        engine.close()  # stores what is still on its way to storage
        return describe_node(engine.stats(), storage)


def staging_bytes(arguments: argparse.Namespace) -> int:
    """Return the default, or more if a part of large blocks would not fit into half of it."""
    config = load_config(arguments.model_dir)
    itemsize = model_dtype(arguments.model_dir, arguments.dtype or "auto").itemsize
    bytes_per_block: int = config.kv_elements_per_token * arguments.block_size * itemsize
    return max(STAGING_BYTES, 2 * MAX_PART_BLOCKS * bytes_per_block)


def make_timing(silence_s: float) -> Timing:
    """Return the timing of a node that considers a peer lost after `silence_s`."""
    return Timing(
        retry_s=silence_s / _RETRIES_PER_SILENCE,
        silence_s=silence_s,
        transfer_s=silence_s * _SILENCES_PER_TRANSFER,
        remember_s=silence_s + _LATE_S,
    )


def _open_channel(arguments: argparse.Namespace, secret: Secret | None) -> ZmqChannel:
    """Bind the channel; wrong addresses are rejected before anything is loaded."""
    check_target(arguments.gateway)
    channel = ZmqChannel(
        arguments.name,
        epoch=time.time_ns(),
        bind=arguments.listen,
        secret=secret,
        max_peers=reserve_files(transport=True),
    )
    try:
        check_target(channel.address)  # peers connect to it
    except ChannelAddressError:
        channel.close()
        raise
    return channel


def _make_engine(
    arguments: argparse.Namespace,
    transport: Transport,
    epoch: int,
    timing: Timing,
    cache: CacheReporter,
    stack: ExitStack,
) -> tuple[PrefillEngine | DecodeEngine, Storage | None]:
    """Make the engine over its storage; the stack closes both."""
    model = load_model_of_options(arguments)
    revision = weights_digest(arguments.model_dir)
    namespace = make_storage_namespace(model, revision, arguments.block_size)
    storage = stack.enter_context(storage_of_options(arguments, namespace))
    capacity = arguments.block_size * arguments.device_blocks
    publish = stack.enter_context(publishing(arguments))

    def on_events(batch: EventBatch) -> None:
        cache.take_in(batch)
        if publish is not None:
            publish(batch)

    options: dict[str, Any] = {
        "epoch": epoch,
        "now": time.monotonic(),
        "timing": timing,
        "block_size": arguments.block_size,
        "num_blocks": arguments.device_blocks,
        "token_budget": arguments.token_budget,
        "max_running": min(arguments.max_running, arguments.token_budget),
        "max_model_len": arguments.max_model_len or min(model.config.max_positions, capacity),
        "weights_revision": revision,
        "num_groups": arguments.layer_groups,
        "host": host_tier(arguments),
        "storage": storage,
        "storage_namespace": None if storage is None else namespace,
        "on_events": on_events,
    }
    engine: PrefillEngine | DecodeEngine
    if arguments.role == "prefill":
        engine = PrefillEngine(model, transport, order=arguments.allocate, **options)
    else:
        engine = DecodeEngine(
            model,
            transport,
            preempt=arguments.preempt,
            reserve_tokens=reserve_tokens(arguments),
            depth=arguments.depth,
            **options,
        )
    stack.callback(engine.close)
    return engine, storage


@contextmanager
def _stop_signals(parent_pid: int | None) -> Iterator[Callable[[], Callable[[], bool]]]:
    """Let signals end a node that starts at once; yield what changes that when it serves.

    It returns whether to stop: after SIGTERM or SIGINT, or when the parent has ended. Later signals
    change nothing, so that a node closes in order.
    """
    stopped = Event()
    with exit_on_interrupt(), ExitStack() as stack:

        def serve() -> Callable[[], bool]:
            for each in (signal.SIGTERM, signal.SIGINT):
                before = signal.signal(each, lambda *_: stopped.set())
                stack.callback(signal.signal, each, before)
            return lambda: stopped.is_set() or parent_pid not in (None, os.getppid())

        yield serve
