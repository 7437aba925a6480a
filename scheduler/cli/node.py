"""`radixkv prefill-node` and `decode-node`: serve one role until told to stop."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from threading import Event
from typing import Any

from ...kvcache.storage import Storage
from ..engine import make_storage_namespace
from ..handoff import Timing
from ..handoff.gateway_messages import GATEWAY
from ..models import load_model
from ..models.weights_digest import weights_digest
from ..nodes import DecodeEngine, PrefillEngine
from ..nodes.channel import (
    ChannelAddressError,
    ZmqChannel,
    load_secret,
)
from ..nodes.channel.address import check_target
from ..nodes.channel.schema import MAX_NAME_CHARS
from ..nodes.event_loop import NodeLoop
from ..nodes.transport import Transport
from ..nodes.transport.registry import open_transport
from .disaggregate_run import describe
from .errors import BadInputError
from .options import check_sizes, host_tier
from .tier_setup import check_tiers, open_storage

_RETRIES_PER_SILENCE = 5
_SILENCES_PER_TRANSFER = 6
_LATE_S = 60.0
"""What was said last before a silence is taken for one may come so much later."""


def run(arguments: argparse.Namespace) -> int:
    """Serve, and print what was done as one JSON object."""
    if arguments.silence_s == 0:
        raise BadInputError("--silence-s must be more than 0")
    check_sizes(arguments)
    check_tiers(arguments)
    if arguments.name == GATEWAY or not 0 < len(arguments.name) <= MAX_NAME_CHARS:
        raise BadInputError(
            f"--name must have 1 to {MAX_NAME_CHARS} characters, and not be {GATEWAY!r}"
        )
    with ExitStack() as stack:
        channel = stack.enter_context(closing(_open_channel(arguments)))
        host = arguments.listen.rpartition(":")[0].strip("[]")
        transport = open_transport(arguments.transport, host=host)
        stack.callback(transport.close)
        timing = make_timing(arguments.silence_s)
        engine, storage = _make_engine(arguments, transport, channel.epoch, timing, stack)
        loop = NodeLoop(
            engine,
            channel,
            gateway=arguments.gateway,
            transport=arguments.transport,
            timing=timing,
        )
        with _until_told_to_stop(arguments.parent_pid) as is_stopped:
            said = f"radixkv: {arguments.name} serves at {channel.address}"
            print(said, file=sys.stderr, flush=True)
            loop.run(is_stopped)
            engine.close()  # what storage is to keep is there then
        print(json.dumps(describe(engine.stats(), storage), allow_nan=False), flush=True)
    return 0


def make_timing(silence_s: float) -> Timing:
    """Return the timing of a node that knows a peer as gone after silence_s."""
    return Timing(
        retry_s=silence_s / _RETRIES_PER_SILENCE,
        silence_s=silence_s,
        transfer_s=silence_s * _SILENCES_PER_TRANSFER,
        remember_s=silence_s + _LATE_S,
    )


def _open_channel(arguments: argparse.Namespace) -> ZmqChannel:
    """Bind it, and refuse wrong addresses before anything is loaded."""
    check_target(arguments.gateway)
    channel = ZmqChannel(
        arguments.name,
        epoch=time.time_ns(),
        bind=arguments.listen,
        secret=load_secret(arguments.secret_file),
    )
    try:
        check_target(channel.address)  # others are told it
    except ChannelAddressError:
        channel.close()
        raise
    return channel


def _make_engine(
    arguments: argparse.Namespace,
    transport: Transport,
    epoch: int,
    timing: Timing,
    stack: ExitStack,
) -> tuple[PrefillEngine | DecodeEngine, Storage | None]:
    """Make it over its storage; the stack closes both."""
    model_dir = Path(arguments.model_dir)
    model = load_model(model_dir)
    revision = weights_digest(model_dir)
    namespace = make_storage_namespace(model, revision, arguments.block_size)
    storage = stack.enter_context(open_storage(arguments, namespace))
    room = arguments.block_size * arguments.device_blocks
    options: dict[str, Any] = {
        "epoch": epoch,
        "now": time.monotonic(),
        "timing": timing,
        "block_size": arguments.block_size,
        "num_blocks": arguments.device_blocks,
        "token_budget": arguments.token_budget,
        "max_running": min(arguments.max_running, arguments.token_budget),
        "max_model_len": arguments.max_model_len or min(model.config.max_positions, room),
        "weights_revision": revision,
        "host": host_tier(arguments),
        "storage": storage,
        "storage_namespace": None if storage is None else namespace,
    }
    engine: PrefillEngine | DecodeEngine
    if arguments.role == "prefill":
        engine = PrefillEngine(model, transport, order=arguments.allocate, **options)
    else:
        engine = DecodeEngine(
            model,
            transport,
            preempt=arguments.preempt,
            reserve_tokens=arguments.reserve_tokens,
            **options,
        )
    stack.callback(engine.close)
    return engine, storage


@contextmanager
def _until_told_to_stop(parent_pid: int | None) -> Iterator[Callable[[], bool]]:
    """Take SIGTERM and SIGINT as the wish to end, and the end of the parent if there is one."""
    stopped = Event()
    signals = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(each, lambda *_: stopped.set()) for each in signals]
    try:
        yield lambda: stopped.is_set() or parent_pid not in (None, os.getppid())
    finally:
        for each, handler in zip(signals, before, strict=True):
            signal.signal(each, handler)
