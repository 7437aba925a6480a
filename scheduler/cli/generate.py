"""`radixkv generate`: complete prompts with a checkpoint, as one batch."""

from __future__ import annotations

import argparse
import json
import sys
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
from ..errors import HandoffFailedError, NodesFailedError
from ..handoff import Timing
from ..models import load_config, load_model, load_tokenizer, model_dtype
from ..models.weights_digest import weights_digest
from ..nodes import DecodeEngine, Disaggregated, PrefillEngine
from ..nodes.transport import InProcessExchange, InProcessTransport
from ..request import Request, RequestStatus, SamplingParams
from ..serving import GenerationParams
from ..terminal.console import table
from .errors import BadInputError
from .kv_events import publishing
from .options.common import check_memory, host_tier, reserve_tokens
from .options.generate import SAMPLING, check
from .output import check_destination, describe_node, describe_storage, emit
from .prompts import Sizes, choose_sizes, prompts_failed, read_prompts
from .startup import report_on_stderr
from .tiers import check_server, storage_of_options


def run(arguments: argparse.Namespace) -> int:
    """Generate, and print the new tokens of each prompt in the order of the file."""
    check_destination(arguments.json)
    check_memory(arguments)
    check(arguments)
    check_server(arguments)
    model_dir = Path(arguments.model_dir)
    config = load_config(model_dir)
    params = GenerationParams(
        arguments.max_new_tokens,
        _sampling_params(arguments),
        stop_token_ids=arguments.stop_token_ids,
        ignore_eos=arguments.ignore_eos,
        n=arguments.n,
        logprobs=arguments.logprobs,
        prompt_logprobs=arguments.prompt_logprobs,
    )
    prompts = read_prompts(
        Path(arguments.prompts), vocab_size=config.vocab_size, encode=_make_encoder(model_dir)
    )
    sizes = choose_sizes(arguments, prompts, config, _itemsize(arguments, model_dir))
    requests = [
        request
        for index, prompt in enumerate(prompts)
        for request in params.make_requests(str(index), prompt, None, config.eos_token_ids)
    ]
    if not arguments.disaggregate:
        complete = complete_with_engine
    elif arguments.transport == "inprocess":
        complete = complete_in_process
    else:
        from .generate_on_nodes import complete_on_nodes  # here, because it needs an extra

        complete = complete_on_nodes
    try:
        with report_on_stderr():
            stats = complete(arguments, requests, sizes)
    except NodesFailedError as error:
        if any(request.status is RequestStatus.FINISHED for request in requests):
            _emit_partial(arguments, requests, error)
        raise
    outputs = [[int(token) for token in request.output_tokens] for request in requests]
    parts: list[Any] = [json.dumps(tokens) for tokens in outputs]
    if stats:  # nodes of a gateway print their own
        rows = [(name, str(value)) for name, value in _flatten(stats)]
        parts += ["", table((), rows)]
    results = {"outputs": _by_prompt(arguments, outputs), "stats": stats}
    emit(arguments.json, results | _logprobs(arguments, requests), *parts)
    return 0


def _by_prompt(arguments: argparse.Namespace, values: Sequence[Any]) -> list[Any]:
    """Return the values of requests by prompt: with several samples, a list of each prompt's."""
    n: int = arguments.n
    if n == 1:
        return list(values)
    return [list(values[first : first + n]) for first in range(0, len(values), n)]


def _logprobs(arguments: argparse.Namespace, requests: Sequence[Request]) -> dict[str, Any]:
    """Return the log probabilities that were asked for, of the first samples for prompts."""
    results: dict[str, Any] = {}
    if arguments.logprobs is not None:
        found = [[each._asdict() for each in request.output_logprobs] for request in requests]
        results["logprobs"] = _by_prompt(arguments, found)
    if arguments.prompt_logprobs is not None:
        results["prompt_logprobs"] = [
            [None if each is None else each._asdict() for each in request.prompt_records]
            for request in requests[:: arguments.n]
        ]
    return results


def _emit_partial(
    arguments: argparse.Namespace, requests: Sequence[Request], error: NodesFailedError
) -> None:
    """Print what is complete, with null for the other prompts, and a reason for each of them."""
    reasons = error.failures if isinstance(error, HandoffFailedError) else {}
    outputs: list[list[int] | None] = []
    failures = {}
    for request in requests:
        if request.status is RequestStatus.FINISHED:
            outputs.append([int(token) for token in request.output_tokens])
        else:
            outputs.append(None)
            failures[request.request_id] = reasons.get(request.request_id, str(error))
    by_prompt = _by_prompt(arguments, outputs)
    results = {"outputs": by_prompt, "failures": failures, "stats": {}}
    emit(arguments.json, results, *map(json.dumps, outputs))
    for request_id, reason in failures.items():
        print(f"radixkv: prompt {request_id}: {reason}", file=sys.stderr)


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
    with publishing(arguments) as on_events, storage_of_options(arguments, namespace) as storage:
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
            on_events=on_events,
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
        HandoffFailedError: Requests failed, and the others are complete.
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
            storage = stack.enter_context(storage_of_options(arguments, namespace, node=name))
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
            if nodes.failures:
                raise prompts_failed(nodes.failures)
        finally:
            nodes.close()  # stores what is still on its way to storage
        return {name: describe_node(stats, storages[name]) for name, stats in nodes.stats().items()}


def _sampling_params(arguments: argparse.Namespace) -> SamplingParams:
    names = [name.replace("-", "_") for name, _, _ in SAMPLING]
    given = {name: getattr(arguments, name) for name in names}
    return SamplingParams(**{name: value for name, value in given.items() if value is not None})


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
