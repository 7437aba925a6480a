"""`radixkv generate`: complete prompts with a checkpoint, as one batch."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

from ...kvcache.storage import Storage
from ...kvcache.storage.urls import namespace_digits
from ..engine import Engine, make_storage_namespace
from ..engine.calls import Group
from ..errors import HandoffFailedError, NodesFailedError
from ..handoff import Timing
from ..models import load_config, model_dtype
from ..models.weights_digest import weights_digest
from ..nodes import DecodeEngine, Disaggregated, PrefillEngine
from ..nodes.transport import InProcessExchange, InProcessTransport
from ..request import SamplingParams, TokenLogprob
from ..serving import GenerationOutput, GenerationParams
from ..terminal.console import table
from ..terminal.interrupts import exit_on_interrupt
from ..text import Guided, TextTokenizer, locate_model
from .errors import BadInputError
from .exit_status import say
from .options.common import check_memory, host_tier, reserve_tokens
from .options.generate import GUIDED, SAMPLING, check, option_of_texts
from .shared.completions import Completions
from .shared.kv_events import publishing
from .shared.model_loading import load_model_of_options
from .shared.output import check_destination, describe_node, describe_storage, emit
from .shared.processes import group_of_options, leave_to_process_0
from .shared.prompts import Sizes, choose_sizes, prompts_failed, read_prompts
from .shared.startup import report_on_stderr
from .shared.tiers import check_server, storage_of_options


def run(arguments: argparse.Namespace) -> int:
    """Generate, and print the new tokens of each prompt in the order of the file."""
    check(arguments)
    leave_to_process_0(arguments)
    check_destination(arguments.json)
    check_memory(arguments)
    with group_of_options(arguments) as group:
        check_server(arguments)
        _complete_prompts(arguments, group)
    return 0


def _complete_prompts(arguments: argparse.Namespace, group: Group | None) -> None:
    arguments.model_dir = model_dir = locate_model(arguments.model, arguments.revision)
    config = load_config(model_dir)
    params = GenerationParams(
        arguments.max_new_tokens,
        _sampling_params(arguments),
        stop=arguments.stop,
        stop_token_ids=arguments.stop_token_ids,
        ignore_eos=arguments.ignore_eos,
        n=arguments.n,
        logprobs=arguments.logprobs,
        prompt_logprobs=arguments.prompt_logprobs,
        guided=_guided(arguments),
    )
    load, tokenizer = cache(_load_tokenizer), None
    option = option_of_texts(arguments)
    if option and (tokenizer := load(model_dir)) is None:
        raise BadInputError(f"{option} needs a tokenizer, but {model_dir} has no tokenizer.json")
    prompts = read_prompts(
        Path(arguments.prompts),
        vocab_size=config.vocab_size,
        encode=partial(_encode, load, model_dir),
    )
    sizes = choose_sizes(arguments, prompts, config, _itemsize(arguments, model_dir))
    requests = [
        request
        for index, prompt in enumerate(prompts)
        for request in params.make_requests(str(index), prompt, tokenizer, config.eos_token_ids)
    ]
    completions = Completions(requests, tokenizer, arguments.stop)
    complete: Callable[[argparse.Namespace, Completions, Sizes], dict[str, Any]]
    if not arguments.disaggregate:
        complete = partial(complete_with_engine, group=group)
    elif arguments.transport == "inprocess":
        complete = complete_in_process
    else:
        from .generate_on_nodes import complete_on_nodes  # here, because it needs an extra

        complete = complete_on_nodes
    try:
        with report_on_stderr():
            stats = complete(arguments, completions, sizes)
    except NodesFailedError as error:
        if any(map(completions.is_complete, requests)):
            _emit_partial(arguments, completions, error)
        raise
    if arguments.process_id:
        return
    outputs = completions.outputs()
    results = _describe(arguments, outputs) | {"stats": stats}
    parts: list[Any] = [_line(arguments, output) for output in outputs]
    if stats:  # nodes of a gateway print their own
        rows = [(name, str(value)) for name, value in _flatten(stats)]
        parts += ["", table((), rows)]
    emit(arguments.json, results, *parts)


def _describe(
    arguments: argparse.Namespace, outputs: Sequence[GenerationOutput | None]
) -> dict[str, Any]:
    """Return what was asked for of all outputs, for JSON; None for those that have failed."""
    tokens = [None if output is None else list(output.token_ids) for output in outputs]
    results = {"outputs": _by_prompt(arguments, tokens)}
    if option_of_texts(arguments):
        texts = [None if output is None else output.text for output in outputs]
        results["texts"] = _by_prompt(arguments, texts)
    if arguments.logprobs is not None:
        records = [None if output is None else _records(output.logprobs) for output in outputs]
        results["logprobs"] = _by_prompt(arguments, records)
    if arguments.prompt_logprobs is not None:
        firsts = outputs[:: arguments.n]
        results["prompt_logprobs"] = [
            None if output is None else _records(output.prompt_logprobs) for output in firsts
        ]
    return results


def _records(records: Sequence[TokenLogprob | None] | None) -> list[dict[str, Any] | None]:
    return [None if each is None else each._asdict() for each in records or ()]


def _line(arguments: argparse.Namespace, output: GenerationOutput | None) -> str:
    """Return an output as a line of JSON: its text if options are about texts, or its tokens."""
    if output is None:
        return json.dumps(None)
    return json.dumps(output.text if option_of_texts(arguments) else output.token_ids)


def _by_prompt(arguments: argparse.Namespace, values: Sequence[Any]) -> list[Any]:
    """Return the values of requests by prompt: with several samples, a list of each prompt's."""
    n: int = arguments.n
    if n == 1:
        return list(values)
    return [list(values[first : first + n]) for first in range(0, len(values), n)]


def _emit_partial(
    arguments: argparse.Namespace, completions: Completions, error: NodesFailedError
) -> None:
    """Print what is complete, with null for the other prompts, and a reason for each of them."""
    reasons = error.failures if isinstance(error, HandoffFailedError) else {}
    failures = {
        request.request_id: reasons.get(request.request_id, str(error))
        for request in completions
        if not completions.is_complete(request)
    }
    outputs = [
        output if completions.is_complete(request) else None
        for request, output in zip(completions, completions.outputs(), strict=True)
    ]
    results = _describe(arguments, outputs) | {"failures": failures, "stats": {}}
    emit(arguments.json, results, *(_line(arguments, output) for output in outputs))
    for request_id, reason in failures.items():
        say(f"prompt {request_id}: {reason}")


def complete_with_engine(
    arguments: argparse.Namespace,
    requests: Completions,
    sizes: Sizes,
    *,
    group: Group | None = None,
) -> dict[str, Any]:
    """Complete all requests with one engine, and return its statistics.

    Blocks for storage are stored when this returns. Processes of a group other than 0 follow it.
    """
    model = load_model_of_options(arguments, group)
    namespace = None
    if arguments.storage is not None:
        digest = weights_digest(arguments.model_dir)
        namespace = make_storage_namespace(model, digest, arguments.block_size)
    with publishing(arguments) as on_events, storage_of_options(arguments, namespace) as storage:
        with exit_on_interrupt():
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
                group=group,
            )
        try:
            if arguments.process_id:
                engine.follow()
                return {}
            for request in requests:
                engine.add_request(request)
            while engine.has_work:
                requests.step(engine)
        finally:
            engine.close()
        stats = asdict(engine.stats())
        if storage is not None and namespace is not None:
            digits = namespace_digits(namespace)  # for `radixkv storage --namespace`
            stats["storage"] = {"namespace": digits, **describe_storage(storage.stats())}
    return stats


def complete_in_process(
    arguments: argparse.Namespace, requests: Completions, sizes: Sizes
) -> dict[str, Any]:
    """Complete all requests with nodes in this process, and return the statistics of each.

    Raises:
        HandoffFailedError: Requests failed, and the others are complete.
    """
    model, exchange = load_model_of_options(arguments), InProcessExchange()
    revision = weights_digest(arguments.model_dir)
    namespace = make_storage_namespace(model, revision, arguments.block_size)
    options: dict[str, Any] = {
        "epoch": 1,
        "now": time.monotonic(),
        "timing": Timing(),
        "block_size": arguments.block_size,
        **asdict(sizes),
        "weights_revision": revision,
        "num_groups": arguments.layer_groups or 1,
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

        with exit_on_interrupt():
            nodes = Disaggregated(
                [make(PrefillEngine, f"prefill-{i}") for i in range(arguments.prefill or 1)],
                [
                    make(DecodeEngine, f"decode-{i}", **generation)
                    for i in range(arguments.decode or 1)
                ],
                stream=requests.has_stop,
            )
        try:
            for request in requests:
                nodes.add_request(request)
            while nodes.has_work:
                requests.step(nodes)
            if failures := requests.failures(nodes.failures):
                raise prompts_failed(failures)
        finally:
            nodes.close()  # stores what is still on its way to storage
        return {name: describe_node(stats, storages[name]) for name, stats in nodes.stats().items()}


def _sampling_params(arguments: argparse.Namespace) -> SamplingParams:
    names = [name.replace("-", "_") for name, _, _ in SAMPLING]
    given = {name: getattr(arguments, name) for name in names}
    return SamplingParams(**{name: value for name, value in given.items() if value is not None})


def _guided(arguments: argparse.Namespace) -> Guided | None:
    """Return what the texts must be; `check` has refused more than one option."""
    given = {field: getattr(arguments, option) for option, field in GUIDED.items()}
    given = {field: value for field, value in given.items() if value is not None}
    return Guided(**given) if given else None


def _itemsize(arguments: argparse.Namespace, model_dir: Path) -> int:
    """Return the bytes per element of the KV, or a bound of it.

    Nodes in other processes choose their dtype themselves, and this process must not ask JAX for
    their device, because it would take memory from them.
    """
    dtype = arguments.dtype or "auto"
    if dtype == "auto" and arguments.disaggregate and arguments.transport != "inprocess":
        dtype = "float32"
    return model_dtype(model_dir, dtype).itemsize


def _load_tokenizer(model_dir: Path) -> TextTokenizer | None:
    return TextTokenizer(model_dir) if (model_dir / "tokenizer.json").exists() else None


def _encode(load: Callable[[Path], TextTokenizer | None], model_dir: Path, text: str) -> list[int]:
    """Return the token ids of a text; the tokenizer is loaded for the first one."""
    if (tokenizer := load(model_dir)) is None:
        raise BadInputError(
            f"expected prompts as lists of token ids, got a string, but {model_dir} has no "
            "tokenizer.json"
        )
    return tokenizer.encode(text)


def _flatten(stats: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each figure with its path, as `cache.free_blocks`; skip tiers that are not there."""
    for name, value in stats.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}", value
