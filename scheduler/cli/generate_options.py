"""The options of `radixkv generate`, apart from its work: `--help` loads none of it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from .disaggregate_options import add_apart
from .options import (
    add_host_tier,
    add_json,
    add_size,
    add_storage,
    tokens_to_reserve,
)


def add_parser(commands: Any, run: Callable[[argparse.Namespace], int]) -> None:
    """Add the command to those that there are."""
    parser = commands.add_parser(
        "generate",
        help="complete prompts with a Hugging Face checkpoint",
        description="Complete every prompt greedily, all submitted at once. A completion ends "
        "after N tokens, or with the checkpoint's eos_token_id (kept in the output, as vLLM does) "
        "unless --ignore-eos is given.",
    )
    parser.add_argument("model_dir", metavar="MODEL_DIR", help="a checkpoint's directory")
    parser.add_argument(
        "--prompts",
        required=True,
        metavar="FILE.json",
        help="a list of prompts: lists of token ids, or strings if the checkpoint has a tokenizer",
    )
    add_size(parser, "--max-new-tokens", "tokens to generate for each prompt, at most")
    add_size(parser, "--block-size", "tokens per block (default: %(default)s)", default=16)
    add_size(
        parser,
        "--device-blocks",
        "blocks of KV cache (default: room for all prompts at once, within 4 GiB)",
        required=False,
    )
    add_size(
        parser,
        "--token-budget",
        "tokens per step (default: 512, or all of the prompts' if fewer)",
        required=False,
    )
    parser.add_argument(
        "--no-prefix-cache", action="store_true", help="compute every prompt from its first token"
    )
    parser.add_argument(
        "--ignore-eos", action="store_true", help="do not stop at the checkpoint's eos_token_id"
    )
    _add_tiers(parser)
    add_apart(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def _add_tiers(parser: argparse.ArgumentParser) -> None:
    add_host_tier(parser, "blocks of --block-size tokens")
    add_storage(parser)
    parser.add_argument(
        "--preempt",
        choices=("recompute", "host", "storage"),
        default="recompute",
        help="what becomes of the KV of a request that has to give up its blocks: it is computed "
        "again, or parked on the host, or in storage (default: %(default)s)",
    )
    parser.add_argument(
        "--reserve-tokens",
        type=tokens_to_reserve,
        metavar="N",
        default=512,
        help="keep blocks for so many more tokens of every request that runs, before another is "
        "started; the fewer, the more are preempted, and with no_evict none is (default: "
        "%(default)s)",
    )
