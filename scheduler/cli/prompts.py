"""Reading a prompts file: a JSON list of prompts, each a list of token ids or a string."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from .errors import BadInputError


def read_prompts(
    path: Path, *, vocab_size: int, encode: Callable[[str], list[int]]
) -> list[list[int]]:
    """Read a prompts file and check all of it.

    Args:
        path: The file.
        vocab_size: Token ids must be below it.
        encode: Turns a string into token ids; called for prompts that are strings only.

    Raises:
        BadInputError: The file is not a JSON list of prompts, or one of them is empty, of another
            type, or has an id outside the vocabulary; the message names its index.
    """
    try:
        prompts = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"{path}: is not JSON: {error}") from error
    if not isinstance(prompts, list):
        raise BadInputError(f"{path}: expected a list of prompts, got {_kind(prompts)}")
    if not prompts:
        raise BadInputError(f"{path}: has no prompts")
    return [
        _check_prompt(f"{path}: prompt {index}", prompt, vocab_size, encode)
        for index, prompt in enumerate(prompts)
    ]


def _check_prompt(
    place: str, prompt: object, vocab_size: int, encode: Callable[[str], list[int]]
) -> list[int]:
    token_ids = _encode(place, prompt, encode) if isinstance(prompt, str) else prompt
    if not isinstance(token_ids, list):
        raise BadInputError(
            f"{place}: expected a list of token ids or a string, got {_kind(prompt)}"
        )
    if not token_ids:
        raise BadInputError(f"{place}: is empty")
    for position, token in enumerate(token_ids):
        if isinstance(token, bool) or not isinstance(token, int):
            raise BadInputError(f"{place}: token {position} must be an integer, got {_kind(token)}")
        if not 0 <= token < vocab_size:
            raise BadInputError(
                f"{place}: token {position} is {token}, outside the vocabulary of {vocab_size}"
            )
    return token_ids


def _encode(place: str, prompt: str, encode: Callable[[str], list[int]]) -> list[int]:
    try:
        prompt.encode()  # JSON can spell half a surrogate pair, which is no character
    except UnicodeEncodeError as error:
        raise BadInputError(f"{place}: is not text: {error}") from error
    return encode(prompt)


_KINDS: dict[type, str] = {
    bool: "a boolean",
    int: "an integer",
    float: "a fraction",
    str: "a string",
    list: "a list",
    dict: "an object",
    type(None): "null",
}


def _kind(value: object) -> str:
    """Name the JSON type of a parsed value."""
    return _KINDS[type(value)]
