"""Prompts of `radixkv generate`: reading and checking the file, and sizes that suit the prompts."""

from __future__ import annotations

import argparse
import json
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ...errors import HandoffFailedError
from ..errors import BadInputError

if TYPE_CHECKING:
    from ...models import ModelConfig

_MAX_RUNNING: Final = 256
_DEFAULT_TOKEN_BUDGET: Final = 512
_DEFAULT_CACHE_BYTES: Final = 4 * 2**30


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of an engine, or of each node, that suit the prompts."""

    num_blocks: int
    token_budget: int
    max_running: int
    max_model_len: int


def read_prompts(
    path: Path, *, vocab_size: int, encode: Callable[[str], list[int]]
) -> list[list[int]]:
    """Read and check a prompts file: a JSON list of lists of token ids, or of strings.

    Args:
        path: The file.
        vocab_size: Upper limit of token ids, exclusive.
        encode: Function from a string to token ids, called only for prompts that are strings.

    Raises:
        BadInputError: The file is not a JSON list of prompts, or a prompt is empty, has the wrong
            type, or has an id outside the vocabulary; the message names its index.
    """
    try:
        prompts = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"{path}: is not JSON: {error}") from error
    if not isinstance(prompts, list):
        raise BadInputError(f"{path}: expected a list of prompts, got {reprlib.repr(prompts)}")
    if not prompts:
        raise BadInputError(f"{path}: expected at least one prompt, got an empty list")
    return [
        _check_prompt(f"{path}: prompt {index}", prompt, vocab_size, encode)
        for index, prompt in enumerate(prompts)
    ]


def choose_sizes(
    arguments: argparse.Namespace,
    prompts: Sequence[Sequence[int]],
    config: ModelConfig,
    itemsize: int,
) -> Sizes:
    """Return the sizes that the options give, or that the prompts need.

    Args:
        arguments: The parsed options.
        prompts: The prompts.
        config: The model's configuration.
        itemsize: Bytes per element of the KV.

    Raises:
        BadInputError: A prompt with its new tokens does not fit the model or the cache.
    """
    block_size = arguments.block_size
    num_tokens = [len(prompt) + arguments.max_new_tokens for prompt in prompts]
    n: int = arguments.n
    # The last new token needs no KV.
    needed = [-(-(number - 1) // block_size) for number in num_tokens]
    bytes_per_block = config.kv_elements_per_token * block_size * itemsize
    num_blocks = arguments.device_blocks or _default_blocks(needed * n, bytes_per_block)
    for index, (prompt, blocks) in enumerate(zip(prompts, needed, strict=True)):
        tokens = f"{len(prompt)} prompt tokens and {arguments.max_new_tokens} new tokens"
        if num_tokens[index] > config.max_positions:
            raise BadInputError(
                f"prompt {index}: {tokens} exceed the {config.max_positions} positions of the model"
            )
        if blocks > num_blocks:
            raise BadInputError(
                f"prompt {index}: {tokens} need {blocks} blocks of {block_size} tokens, but the "
                f"cache has {num_blocks}"
            )
    # Each size up to the budget is compiled: no larger one than all prompts together, or one token
    # of all samples, need.
    num_samples = len(prompts) * n
    largest = max(sum(map(len, prompts)), num_samples)
    token_budget = arguments.token_budget or min(_DEFAULT_TOKEN_BUDGET, largest)
    return Sizes(
        num_blocks=num_blocks,
        token_budget=token_budget,
        max_running=min(num_samples, token_budget, _MAX_RUNNING),
        max_model_len=max(num_tokens),
    )


def _default_blocks(needed: list[int], bytes_per_block: int) -> int:
    """Return room for all prompts within the default size, and for the longest in any case."""
    return max(min(sum(needed), _DEFAULT_CACHE_BYTES // bytes_per_block), max(needed))


def _check_prompt(
    place: str, prompt: object, vocab_size: int, encode: Callable[[str], list[int]]
) -> list[int]:
    token_ids = _encode(place, prompt, encode) if isinstance(prompt, str) else prompt
    if not isinstance(token_ids, list):
        raise BadInputError(
            f"{place}: expected a list of token ids or a string, got {reprlib.repr(prompt)}"
        )
    if not token_ids:
        raise BadInputError(f"{place}: expected at least one token, got none")
    for position, token in enumerate(token_ids):
        if isinstance(token, bool) or not isinstance(token, int):
            raise BadInputError(
                f"{place}: token {position} must be an integer, got {reprlib.repr(token)}"
            )
        if not 0 <= token < vocab_size:
            raise BadInputError(
                f"{place}: token {position} must be in the vocabulary, 0 to {vocab_size - 1}, "
                f"got {token}"
            )
    return token_ids


def _encode(place: str, prompt: str, encode: Callable[[str], list[int]]) -> list[int]:
    try:
        prompt.encode()  # JSON can express half of a surrogate pair
    except UnicodeEncodeError as error:
        raise BadInputError(f"{place}: is not text: {error}") from error
    return encode(prompt)


def prompts_failed(failures: Mapping[str, str]) -> HandoffFailedError:
    """Return the error of prompts that failed on all nodes; the reasons are by their numbers."""
    (number, reason), *others = failures.items()
    more = f" (and {len(others)} more)" if others else ""
    return HandoffFailedError(f"prompt {number}: {reason}{more}", failures)
