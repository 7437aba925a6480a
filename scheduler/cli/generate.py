"""`radixkv generate`: complete prompts with a checkpoint, greedily, as one batch."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from ...kvcache.storage import Storage
from ...kvcache.storage.urls import namespace_digits
from ..engine import Engine, make_storage_namespace
from ..errors import HandoffFailedError
from ..handoff import Timing
from ..models import load_config, load_model, load_tokenizer, model_dtype
from ..models.weights_digest import weights_digest
from ..nodes import DecodeEngine, Disaggregated, PrefillEngine
from ..nodes.transport import InProcessExchange, InProcessTransport
from ..request import Request
from ..terminal.console import table
from .errors import BadInputError
from .options.common import check_memory, host_tier, reserve_tokens
from .options.generate import check
from .output import check_destination, describe_node, describe_storage, emit
from .prompts import Sizes, choose_sizes, read_prompts
from .startup import report_on_stderr
from .tiers import check_server, open_storage


def run(arguments: argparse.Namespace) -> int:
    """Generate, and print the new tokens of each prompt in the order of the file."""
    check_destination(arguments.json)
    check_memory(arguments)
    check(arguments)
    check_server(arguments)
    model_dir = Path(arguments.model_dir)
    config = load_config(model_dir)
    prompts = read_prompts(
        Path(arguments.prompts), vocab_size=config.vocab_size, encode=_make_encoder(model_dir)
    )
    sizes = choose_sizes(arguments, prompts, config, _itemsize(arguments, model_dir))
    requests = [
        Request(
            str(index),
            prompt,
            arguments.max_new_tokens,
            stop_token_ids=() if arguments.ignore_eos else config.eos_token_ids,
        )
        for index, prompt in enumerate(prompts)
    ]
    if not arguments.disaggregate:
        complete = complete_with_engine
    elif arguments.transport == "inprocess":
        complete = complete_in_process
    else:
        from .generate_on_nodes import complete_on_nodes  # here, because it needs an extra

        complete = complete_on_nodes
    with report_on_stderr():
        stats = complete(arguments, requests, sizes)
    outputs = [[int(token) for token in request.output_tokens] for request in requests]
    parts: list[Any] = [json.dumps(tokens) for tokens in outputs]
    if stats:  # nodes of a gateway print their own
        rows = [(name, str(value)) for name, value in _flatten(stats)]
        parts += ["", table((), rows)]
    emit(arguments.json, {"outputs": outputs, "stats": stats}, *parts)
    return 0


def complete_with_engine(
    arguments: argparse.Namespace, requests: Sequence[Request], sizes: Sizes
) -> dict[str, Any]:
    """Complete all requests with one engine, and return its statistics.

    Blocks for storage are stored when this returns.
    """
    model_dir = Path(arguments.model_dir)
    model = load_model(model_dir, arguments.dtype or "auto")
    namespace = None
    if arguments.storage is not None:
        digest = weights_digest(model_dir)
        namespace = make_storage_namespace(model, digest, arguments.block_size)
    with open_storage(arguments, namespace) as storage:
        engine = Engine(
            model,
            block_size=arguments.block_size,
            **asdict(sizes),
            prefix_cache=not arguments.no_prefix_cache,
            reserve_tokens=reserve_tokens(arguments),
            preempt=arguments.preempt,
            depth=arguments.depth or 2,
            host=host_tier(arguments),
            storage=storage,
            storage_namespace=namespace,
        )
        try:
            for request in requests:
                engine.add_request(request)
            engine.run()
        finally:
            engine.close()
        stats = asdict(engine.stats())
        if storage is not None and namespace is not None:
            digits = namespace_digits(namespace)  # for `radixkv storage --namespace`
            stats["storage"] = {"namespace": digits, **describe_storage(storage.stats())}
    return stats


def complete_in_process(
    arguments: argparse.Namespace, requests: Sequence[Request], sizes: Sizes
) -> dict[str, Any]:
    """Complete all requests with nodes in this process, and return the statistics of each.

    Raises:
        HandoffFailedError: A request failed.
    """
    model_dir = Path(arguments.model_dir)
    model, exchange = load_model(model_dir, arguments.dtype or "auto"), InProcessExchange()
    revision = weights_digest(model_dir)
    namespace = make_storage_namespace(model, revision, arguments.block_size)
    options: dict[str, Any] = {
        "epoch": 1,
        "now": time.monotonic(),
        "timing": Timing(),
        "block_size": arguments.block_size,
        **asdict(sizes),
        "weights_revision": revision,
        "host": host_tier(arguments),
    }
    generation = {
        "preempt": arguments.preempt,
        "reserve_tokens": reserve_tokens(arguments),
        "depth": arguments.depth or 2,
    }
    storages: dict[str, Storage | None] = {}
    with ExitStack() as stack:

        def make(kind: Callable[..., Any], name: str, **more: Any) -> Any:
            """Make a node with a storage of its own, which only that node polls."""
            storage = stack.enter_context(open_storage(arguments, namespace, node=name))
            storages[name] = storage
            more |= {"storage": storage, "storage_namespace": namespace if storage else None}
            return kind(model, InProcessTransport(exchange), **options, **more)

        nodes = Disaggregated(
            [make(PrefillEngine, f"prefill-{i}") for i in range(arguments.prefill or 1)],
            [make(DecodeEngine, f"decode-{i}", **generation) for i in range(arguments.decode or 1)],
        )
        try:
            for request in requests:
                nodes.add_request(request)
            nodes.run()
            for request_id, reason in nodes.failures.items():
                raise HandoffFailedError(f"prompt {request_id}: {reason}")
        finally:
            nodes.close()  # stores what is still on its way to storage
        return {name: describe_node(stats, storages[name]) for name, stats in nodes.stats().items()}


def _itemsize(arguments: argparse.Namespace, model_dir: Path) -> int:
    """Return the bytes per element of the KV, or a bound of it.

    Nodes in other processes choose their dtype themselves, and this process must not ask JAX for
    their device, because it would take memory from them.
    """
    dtype = arguments.dtype or "auto"
    if dtype == "auto" and arguments.disaggregate and arguments.transport != "inprocess":
        dtype = "float32"
    return model_dtype(model_dir, dtype).itemsize


def _make_encoder(model_dir: Path) -> Callable[[str], list[int]]:
    """Return a function from a string to token ids, which loads the tokenizer at its first call."""
    load = cache(load_tokenizer)

    def encode(text: str) -> list[int]:
        tokenizer = load(model_dir)
        if tokenizer is None:
            raise BadInputError(
                f"expected prompts as lists of token ids, got a string, but {model_dir} has no "
                "tokenizer.json"
            )
        return list(tokenizer.encode(text).ids)

    return encode


def _flatten(stats: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each figure with its path, as `cache.free_blocks`; skip tiers that are not there."""
    for name, value in stats.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}", value
