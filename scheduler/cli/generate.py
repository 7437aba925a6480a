"""`radixkv generate`: complete prompts with a checkpoint, greedily, all at once."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from ...kvcache.storage.urls import namespace_digits
from ..engine import Engine, make_storage_namespace
from ..models import (
    ModelConfig,
    load_config,
    load_model,
    load_tokenizer,
)
from ..models.weights_digest import weights_digest
from ..request import Request
from .disaggregate_options import Sizes, check_apart
from .errors import BadInputError
from .options import check_sizes, host_tier
from .output import (
    check_destination,
    emit,
    format_table,
)
from .prompts import read_prompts
from .tier_setup import (
    check_server,
    check_tiers,
    describe_storage,
    open_storage,
)

_MAX_RUNNING = 256
_DEFAULT_TOKEN_BUDGET = 512
_DEFAULT_CACHE_BYTES = 4 * 2**30
_BYTES_PER_ELEMENT = 4  # the pools have the model's dtype, float32


def run(arguments: argparse.Namespace) -> int:
    """Generate, and print the new tokens of each prompt in the order of the file."""
    check_destination(arguments.json)
    check_sizes(arguments)
    check_tiers(arguments)
    check_apart(arguments)
    check_server(arguments)
    model_dir = Path(arguments.model_dir)
    config = load_config(model_dir)
    prompts = read_prompts(
        Path(arguments.prompts),
        vocab_size=config.vocab_size,
        encode=_make_encoder(model_dir),
    )
    new_tokens, block_size = arguments.max_new_tokens, arguments.block_size
    _check_positions(prompts, new_tokens, config)
    needed = [-(-(len(prompt) + new_tokens) // block_size) for prompt in prompts]
    num_blocks = arguments.device_blocks or _default_blocks(needed, config, block_size)
    _check_fit(prompts, new_tokens, needed, num_blocks, block_size)
    # Each size up to the budget is a program to compile: none that these prompts cannot fill.
    token_budget = arguments.token_budget or min(_DEFAULT_TOKEN_BUDGET, sum(map(len, prompts)))

    stop_token_ids = () if arguments.ignore_eos else config.eos_token_ids
    requests = [
        Request(str(index), prompt, new_tokens, stop_token_ids=stop_token_ids)
        for index, prompt in enumerate(prompts)
    ]
    sizes = Sizes(
        num_blocks=num_blocks,
        token_budget=token_budget,
        max_running=min(len(prompts), token_budget, _MAX_RUNNING),
        max_model_len=max(map(len, prompts)) + new_tokens,
    )
    if arguments.transport == "inprocess":
        from .generate_in_process import complete_in_process

        stats = complete_in_process(arguments, requests, sizes)
    elif arguments.disaggregate:
        from .generate_on_nodes import complete_apart  # here, because it needs an extra

        stats = complete_apart(arguments, requests, sizes)
    else:
        stats = _complete(arguments, requests, sizes)
    outputs = [[int(token) for token in request.output_tokens] for request in requests]
    results = {"outputs": outputs, "stats": stats}
    emit(arguments.json, results, lambda: _describe(results))
    return 0


def _complete(
    arguments: argparse.Namespace, requests: Sequence[Request], sizes: Sizes
) -> dict[str, Any]:
    """Run all prompts to their ends; what storage is to keep is there when this returns."""
    model_dir = Path(arguments.model_dir)
    model = load_model(model_dir)
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
            reserve_tokens=arguments.reserve_tokens,
            preempt=arguments.preempt,
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


def _make_encoder(model_dir: Path) -> Callable[[str], list[int]]:
    """Return what turns a string into token ids; the tokenizer is loaded at its first call."""
    load = cache(load_tokenizer)

    def encode(text: str) -> list[int]:
        tokenizer = load(model_dir)
        if tokenizer is None:
            raise BadInputError(f"a prompt is a string, but {model_dir} has no tokenizer.json")
        return list(tokenizer.encode(text).ids)

    return encode


def _check_positions(prompts: list[list[int]], new_tokens: int, config: ModelConfig) -> None:
    for index, prompt in enumerate(prompts):
        if len(prompt) + new_tokens > config.max_positions:
            raise BadInputError(
                f"prompt {index}: its {len(prompt)} tokens and {new_tokens} new ones are more "
                f"than the {config.max_positions} positions of the model"
            )


def _default_blocks(needed: list[int], config: ModelConfig, block_size: int) -> int:
    """Blocks for all prompts at once, within the default size; never too few for the longest."""
    elements_per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    bytes_per_block = elements_per_token * block_size * _BYTES_PER_ELEMENT
    return max(min(sum(needed), _DEFAULT_CACHE_BYTES // bytes_per_block), max(needed))


def _check_fit(
    prompts: list[list[int]],
    new_tokens: int,
    needed: list[int],
    num_blocks: int,
    block_size: int,
) -> None:
    for index, (prompt, blocks) in enumerate(zip(prompts, needed, strict=True)):
        if blocks > num_blocks:
            raise BadInputError(
                f"prompt {index}: its {len(prompt)} tokens and {new_tokens} new ones need "
                f"{blocks} blocks of {block_size}, but the cache has {num_blocks}"
            )


def _describe(results: dict[str, Any]) -> str:
    """One line of token ids per prompt, then the statistics."""
    rows = [(name, str(value)) for name, value in _flatten(results["stats"])]
    lines = [json.dumps(tokens) for tokens in results["outputs"]]
    return "\n".join([*lines, "", format_table(rows)] if rows else lines)  # none with --gateway


def _flatten(stats: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each figure with its place, as `cache.free_blocks`; nothing for a tier not there."""
    for name, value in stats.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}", value
