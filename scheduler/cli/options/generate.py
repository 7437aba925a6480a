"""Options of `radixkv generate`."""

from __future__ import annotations

import argparse
from typing import Final

from ..errors import BadInputError
from .common import (
    BLOCK_SIZE,
    PREEMPT,
    RESERVE_TOKENS,
    Commands,
    Options,
    add_compilation_cache,
    add_count,
    add_depth,
    add_dtype,
    add_host_tier,
    add_json,
    add_kv_events,
    add_layer_groups,
    add_model,
    add_preempt,
    add_processes,
    add_reserve_tokens,
    add_storage,
    add_tp,
    check_excludes,
    check_needs,
    check_processes,
    check_tiers,
    integer,
    seconds,
)

MAX_LOGPROBS: Final = 20
"""That of `request`, which is not imported for its size."""

GUIDED: Final = {"json_schema": "json", "regex": "regex", "choice": "choice", "grammar": "grammar"}
"""Options of guided outputs, each with its field of `Guided`."""

_DEFAULTS: Final = {
    "block_size": BLOCK_SIZE,
    "preempt": PREEMPT,
    "reserve_tokens": RESERVE_TOKENS,
}
"""Set late, because with --gateway nobody may give these options."""

SAMPLING: Final[tuple[tuple[str, type, str], ...]] = (
    ("temperature", float, "divisor of the logits (default: 0, the most likely token)"),
    ("top-k", int, "draw from the N most likely tokens (default: 0, all)"),
    ("top-p", float, "draw from the most likely tokens that together have probability X"),
    ("min-p", float, "drop tokens less likely than X times the most likely one"),
    ("seed", int, "seed of the draws, the same for all prompts (default: 0)"),
    ("repetition-penalty", float, "make tokens of prompt and output less likely (default: 1)"),
    ("presence-penalty", float, "make tokens of the output less likely (default: 0)"),
    ("frequency-penalty", float, "the same, for each time that a token occurs (default: 0)"),
    ("min-tokens", int, "do not stop before N tokens (default: 0)"),
)


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "generate",
        help="complete prompts with a Hugging Face checkpoint",
        description="Complete all prompts of a file; all are submitted at once. A completion ends "
        "after N tokens, or with the checkpoint's eos_token_id, which stays in the output, as in "
        "vLLM. Without --temperature, each token is the most likely one.",
    )
    add_model(parser)
    parser.add_argument(
        "--prompts",
        required=True,
        metavar="FILE.json",
        help="JSON list of prompts: each a list of token ids, or a string if the checkpoint has a "
        "tokenizer",
    )
    add_count(parser, "--max-new-tokens", "maximum number of new tokens per prompt")
    add_dtype(parser)
    add_tp(parser)
    add_compilation_cache(parser)
    add_count(parser, "--block-size", f"tokens per block (default: {BLOCK_SIZE})", required=False)
    add_count(
        parser,
        "--device-blocks",
        "size of the KV cache in blocks (default: enough for all prompts, at most 4 GiB)",
        required=False,
    )
    add_count(
        parser,
        "--token-budget",
        "maximum number of tokens per step (default: 512, or fewer for few prompts)",
        required=False,
    )
    add_depth(parser, None, "default: 2; prefill nodes have 1")
    parser.add_argument(
        "--no-prefix-cache", action="store_true", help="compute every token of every prompt"
    )
    parser.add_argument(
        "--ignore-eos", action="store_true", help="do not stop at the checkpoint's eos_token_id"
    )
    add_json(parser)
    sampling = parser.add_argument_group("sampling")
    add_sampling(sampling)
    add_count(
        sampling,
        "--n",
        "samples of each prompt, sample I with seed SEED + I (default: %(default)s)",
        default=1,
    )
    sampling.add_argument(
        "--stop-token-ids",
        type=integer(0),
        nargs="+",
        default=(),
        metavar="N",
        help="tokens that end a completion, which stay in it",
    )
    sampling.add_argument(
        "--stop",
        nargs="+",
        default=(),
        metavar="TEXT",
        help="texts that end a completion, which is cut before the first of them; then the texts "
        "are printed, not the tokens. Needs a tokenizer",
    )
    for option, what in (("--logprobs", "output"), ("--prompt-logprobs", "prompt")):
        sampling.add_argument(
            option,
            type=integer(0, MAX_LOGPROBS),
            metavar="N",
            help=f"write the log probability of each {what} token, and of the N most likely ones, "
            "to the file of --json",
        )
    _add_guided(parser.add_argument_group("guided outputs, printed as texts; one of"))
    add_kv_events(parser)
    tiers = parser.add_argument_group("tiers and preemption")
    add_host_tier(tiers, "blocks of --block-size tokens")
    add_storage(tiers)
    add_preempt(tiers, None)
    add_reserve_tokens(tiers, None)
    add_nodes(parser.add_argument_group("prefill and decode nodes"), in_process=True)
    add_processes(parser)
    parser.set_defaults(module="generate")


def add_nodes(group: Options, *, in_process: bool) -> None:
    """Add the options of prefill and decode nodes, which may run in this process or not."""
    group.add_argument(
        "--disaggregate",
        action="store_true",
        default=None,  # not given, for the checks of what needs it
        help="prefill and decode on separate nodes, which are processes of this machine",
    )
    group.add_argument(
        "--transport",
        choices=(*(["inprocess"] if in_process else []), "jax", "nixl", "storage"),
        help="how KV is sent from prefill to decode nodes; with storage, through the server of "
        "--storage, which needs --host-blocks"
        + ("; with inprocess, all nodes run in this process" if in_process else "")
        + " (default: jax)",
    )
    add_count(group, "--prefill", "number of prefill nodes (default: 1)", required=False)
    add_count(group, "--decode", "number of decode nodes (default: 1)", required=False)
    add_layer_groups(group, None, "default: 1")
    group.add_argument(
        "--gateway",
        metavar="ADDRESS:PORT",
        help="start no nodes; listen here for nodes that you start yourself (see `radixkv "
        "prefill-node --help`)",
    )
    group.add_argument(
        "--secret-file",
        metavar="FILE",
        help="file with the secret shared with those nodes (default: the environment variable "
        "RADIXKV_SECRET)",
    )
    group.add_argument(
        "--timeout-s",
        type=seconds,
        metavar="S",
        help="how long to wait for nodes to connect"
        + (", and for one to come back when none of its role is left" if in_process else "")
        + " (default: 120)",
    )
    group.add_argument(
        "--silence-s",
        type=seconds,
        metavar="S",
        help="consider a node lost after S seconds without a message; nodes that this starts do "
        "so, too (default: 5)",
    )


def add_sampling(group: Options) -> None:
    """Add an option for each of `SamplingParams`."""
    for name, type_, what in SAMPLING:
        metavar = "X" if type_ is float else "N"
        group.add_argument(f"--{name}", type=type_, metavar=metavar, help=what)


def _add_guided(group: Options) -> None:
    """Add an option for each field of `Guided`."""
    group.add_argument(
        "--json-schema", metavar="JSON", help="each output is JSON of this schema, given as text"
    )
    group.add_argument("--regex", metavar="EXPR", help="each output matches a regular expression")
    group.add_argument("--choice", nargs="+", metavar="TEXT", help="each output is one of these")
    group.add_argument(
        "--grammar", metavar="LARK", help="each output is of a grammar in llguidance's Lark"
    )


def option_of_texts(arguments: argparse.Namespace) -> str:
    """Return the first option that is about the texts of outputs; empty if none is given."""
    names = [name for name in ("stop", *GUIDED) if getattr(arguments, name) not in (None, ())]
    return f"--{names[0].replace('_', '-')}" if names else ""


def check(arguments: argparse.Namespace) -> None:
    """Reject options that exclude or need each other.

    Raises:
        BadInputError: With both names.
    """
    check_processes(arguments)
    check_tiers(arguments)
    check_excludes(arguments, "--no-prefix-cache", "--host-blocks", "--disaggregate")
    check_nodes(arguments)
    check_excludes(
        arguments, "--disaggregate", "--prompt-logprobs", hint=": nodes send none of prompts"
    )
    check_needs(arguments, "--json", "--logprobs", "--prompt-logprobs")
    guided = [f"--{name.replace('_', '-')}" for name in GUIDED]
    check_excludes(arguments, "--disaggregate", *guided, hint=": nodes do not guide outputs")
    for place, option in enumerate(guided):
        check_excludes(arguments, option, *guided[place + 1 :])
    for option in ("timeout_s", "silence_s"):
        if arguments.transport == "inprocess" and getattr(arguments, option) is not None:
            name = option.replace("_", "-")
            raise BadInputError(f"--{name} cannot be combined with --transport inprocess")


def check_nodes(arguments: argparse.Namespace) -> None:
    """Reject options of nodes that exclude or need each other, and set defaults of those left out.

    Raises:
        BadInputError: With both names.
    """
    check_needs(
        arguments,
        "--disaggregate",
        *("--transport", "--prefill", "--decode", "--gateway", "--secret-file", "--timeout-s"),
        *("--silence-s", "--layer-groups"),
    )
    if arguments.silence_s == 0:
        raise BadInputError("--silence-s must be more than 0, got 0")
    settings_of_nodes = (
        *("--transport", "--dtype", "--tp", "--device-blocks", "--depth", "--layer-groups"),
        *("--host-blocks", "--storage", "--token-budget", "--max-running", "--block-size"),
        *("--preempt", "--reserve-tokens"),
    )
    check_excludes(arguments, "--gateway", *settings_of_nodes, hint=": give it to the nodes")
    check_needs(arguments, "--kv-events", "--kv-events-replay")
    check_excludes(
        arguments, "--disaggregate", "--kv-events", hint=": give it to nodes that you start"
    )
    check_needs(arguments, "--gateway", "--secret-file")
    for name, default in _DEFAULTS.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, default)
