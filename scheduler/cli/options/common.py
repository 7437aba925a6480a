"""Option types, option groups and checks that several commands share."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from ..errors import BadInputError

if TYPE_CHECKING:
    from ....kvcache.tiers.host_tier import HostConfig, WritePolicy

LARGEST_INT32 = 2**31 - 1
"""Upper limit of sizes, because block ids and token ids are int32."""

BLOCK_SIZE: Final = 16
PREEMPT: Final = "recompute"
RESERVE_TOKENS: Final = 512
"""Defaults of options with these names."""

NO_EVICT: Final = "no_evict"
"""Value of --reserve-tokens that reserves all tokens of a request, so none is preempted."""

Commands: TypeAlias = Any
"""What `add_subparsers` returns; argparse's type is private, and generic only in type stubs."""

Options: TypeAlias = argparse._ActionsContainer
"""A parser, or a group of its options."""

_MAX_SECONDS: Final = 2_000_000
"""A socket takes at most an int32 of milliseconds."""

_BYTES_PER_BLOCK: Final = 16
"""Bytes per block of a `BlockPool` while it is created."""


def integer(
    minimum: int = 1, maximum: int | None = LARGEST_INT32, *, words: tuple[str, ...] = ()
) -> Callable[[str], Any]:
    """Return an option type: an integer within limits, or one of `words` as it is."""
    expected = f"an integer of at least {minimum}"
    if maximum is not None:
        expected = f"an integer from {minimum} to {maximum}"
    if words:
        expected = f"{', '.join(words)} or {expected}"

    def parse(text: str) -> int | str:
        if text in words:
            return text
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if value < minimum or (maximum is not None and value > maximum):
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
        return value

    return parse


def seconds(text: str, unit: str = "seconds") -> float:
    """Parse a number of seconds that a socket can wait."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= _MAX_SECONDS:
        raise argparse.ArgumentTypeError(
            f"expected a number of {unit} from 0 to {_MAX_SECONDS}, got {text!r}"
        )
    return value


def milliseconds(text: str) -> float:
    """Parse a number of milliseconds."""
    return seconds(text, "milliseconds")


def storage_url(text: str) -> str:
    """Return a URL, or for env:NAME that of the environment: other users see a command line."""
    scheme, _, name = text.partition(":")
    if scheme != "env":
        return text
    if not name:
        raise argparse.ArgumentTypeError("expected the name of an environment variable after env:")
    if not os.environ.get(name):
        raise argparse.ArgumentTypeError(f"the environment variable {name} is not set")
    return os.environ[name]


def add_count(
    parser: Options,
    option: str,
    help_text: str,
    *,
    default: int | None = None,
    required: bool = True,
) -> None:
    """Add an option that takes a positive int32; one with a default is not required."""
    parser.add_argument(
        option,
        type=integer(),
        metavar="N",
        default=default,
        required=required and default is None,
        help=help_text,
    )


def add_depth(parser: Options, default: int | None, note: str) -> None:
    """Add --depth; the note says what the default is."""
    add_count(
        parser,
        "--depth",
        f"maximum number of steps in flight; with 1, host and device take turns ({note})",
        default=default,
        required=False,
    )


def add_model(parser: Options) -> None:
    """Add MODEL and --revision; see `locate_model`."""
    parser.add_argument(
        "model", metavar="MODEL", help="directory of a checkpoint, or name on the Hugging Face Hub"
    )
    parser.add_argument(
        "--revision", metavar="NAME", help="branch, tag or commit on the hub (default: main)"
    )


def add_dtype(parser: Options) -> None:
    """Add --dtype; its value is None if it was not given."""
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="dtype of weights, computation and KV. auto: float32 on a CPU, the checkpoint's own "
        "elsewhere (default: auto)",
    )


def add_layer_groups(parser: Options, default: int | None, note: str) -> None:
    """Add --layer-groups; the note says what the default is."""
    add_count(
        parser,
        "--layer-groups",
        "groups of layers whose KV a prefill node sends while it computes the next group; decode "
        f"nodes compile for them ({note})",
        default=default,
        required=False,
    )


def add_tp(parser: Options) -> None:
    """Add --tp."""
    add_count(
        parser,
        "--tp",
        "tensor parallelism: number of devices that share the model and its KV by heads (default: "
        "1)",
        required=False,
    )


def add_processes(parser: Options) -> None:
    """Add the options of a model on the devices of several processes."""
    group = parser.add_argument_group(
        "several processes, on one machine or more",
        "Run the same command for each, with its own --process-id. Process 0 does the work of the "
        "command, and the others compute with it. Set RADIXKV_SECRET to the same secret for all.",
    )
    group.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="address of process 0, with a numeric HOST and a free PORT, where JAX connects the "
        "processes (default: one process)",
    )
    group.add_argument(
        "--num-processes",
        type=integer(2),
        metavar="N",
        help="number of processes; they share the model by --tp (default: all devices of all)",
    )
    group.add_argument(
        "--process-id", type=integer(0), metavar="K", help="which of them this is, 0 to N - 1"
    )


def add_compilation_cache(parser: Options) -> None:
    """Add --no-compilation-cache; `main` sets the cache of commands that have this option."""
    parser.add_argument(
        "--no-compilation-cache",
        action="store_true",
        help="compile every program again (default: keep programs in the directory "
        "JAX_COMPILATION_CACHE_DIR, or else in the user's cache directory)",
    )


def add_json(parser: Options) -> None:
    """Add --json."""
    parser.add_argument(
        "--json", metavar="FILE", help="write the results to FILE as JSON; - prints only JSON"
    )


def add_kv_events(parser: Options) -> None:
    """Add the options that publish KV events."""
    parser.add_argument(
        "--kv-events",
        metavar="ENDPOINT",
        help="publish KV events as vLLM does, at this address, such as tcp://127.0.0.1:5557 "
        "(default: none). They contain token ids: bind another address than the loopback only in "
        "a network that you trust",
    )
    parser.add_argument(
        "--kv-events-replay",
        metavar="ENDPOINT",
        help="answer requests for missed events at this address; needs --kv-events",
    )


def add_trace_lines(parser: Options) -> None:
    """Add --requests, which cuts a trace."""
    add_count(parser, "--requests", "use only the first N requests of the trace", required=False)


def add_skip_malformed(parser: Options) -> None:
    """Add --skip-malformed."""
    parser.add_argument(
        "--skip-malformed",
        action="store_true",
        help="skip and count the lines of the trace that do not parse",
    )


def add_host_tier(parser: Options, unit: str, *, write: WritePolicy | None = None) -> None:
    """Add the options of a host tier.

    Args:
        parser: Parser of the command, or a group of it.
        unit: What a block is.
        write: Default of --host-write; None for that of `HostConfig`.
    """
    add_count(
        parser, "--host-blocks", f"size of the host tier in {unit} (default: none)", required=False
    )
    parser.add_argument(
        "--host-write",
        choices=("exclusive", "back", "through"),
        help="when blocks are copied to the host. exclusive: when the device evicts them, and a "
        "hit moves them back; back: the same, but the host keeps its copy; through: as soon as "
        f"they are computed (default: {write or 'through with storage, else back'})",
    )
    parser.set_defaults(default_host_write=write)


def add_storage(parser: Options) -> None:
    """Add the options of a storage tier."""
    parser.add_argument(
        "--storage",
        type=storage_url,
        metavar="URL",
        help="URL of the storage tier, which keeps blocks for other processes and later runs: "
        "file:///DIRECTORY, redis://HOST[:PORT][/DB], rediss://..., unix:///SOCKET, "
        "s3://BUCKET[/PREFIX] or mooncake://HOST[:PORT]. env:NAME reads the URL from an "
        "environment variable and keeps the password out of the process list. Needs "
        "--host-blocks. A directory serves one process; each node started by generate gets its "
        "own subdirectory",
    )
    parser.add_argument(
        "--storage-max-bytes",
        type=integer(maximum=None),
        metavar="N",
        help="size limit of a file: storage; the least recently used blocks are removed first "
        "(default: 16 GiB)",
    )


def add_preempt(parser: Options, default: str | None = PREEMPT) -> None:
    """Add --preempt."""
    parser.add_argument(
        "--preempt",
        choices=("recompute", "host", "storage"),
        default=default,
        help="what to do with the KV of a preempted request: recompute it later, or park it on "
        f"the host or in storage (default: {PREEMPT})",
    )


def add_reserve_tokens(parser: Options, default: int | None = RESERVE_TOKENS) -> None:
    """Add --reserve-tokens."""
    parser.add_argument(
        "--reserve-tokens",
        type=integer(0, words=(NO_EVICT,)),
        metavar="N",
        default=default,
        help="admit a request only if blocks remain for N more tokens of every running request. A "
        f"smaller N causes more preemptions; {NO_EVICT} reserves all tokens, so none is preempted "
        f"(default: {RESERVE_TOKENS})",
    )


def reserve_tokens(arguments: argparse.Namespace) -> int | None:
    """Return --reserve-tokens as schedulers take it: None reserves all tokens."""
    value = arguments.reserve_tokens
    return None if value == NO_EVICT else int(value)


def host_tier(arguments: argparse.Namespace) -> HostConfig | None:
    """Return the host tier that the options configure, or None."""
    if arguments.host_blocks is None:
        return None
    from ....kvcache.tiers.host_tier import HostConfig  # here, because --help must not load numpy

    return HostConfig(arguments.host_blocks, arguments.host_write or arguments.default_host_write)


def check_needs(arguments: argparse.Namespace, needed: str, *options: str) -> None:
    """Reject options that are given without the option that they need.

    Raises:
        BadInputError: With both names.
    """
    if _value(arguments, needed) is None:
        for option in options:
            if _value(arguments, option) is not None:
                raise BadInputError(f"{option} needs {needed}")


def check_excludes(
    arguments: argparse.Namespace, option: str, *others: str, hint: str = ""
) -> None:
    """Reject options that are given together with an option that excludes them.

    Raises:
        BadInputError: With both names, and the hint.
    """
    if _value(arguments, option):
        for other in others:
            if _value(arguments, other) is not None:
                raise BadInputError(f"{other} cannot be combined with {option}{hint}")


def check_processes(arguments: argparse.Namespace) -> None:
    """Reject options of several processes that are incomplete, or for another kind of nodes.

    Raises:
        BadInputError: With the names or numbers.
    """
    names = ("--coordinator", "--num-processes", "--process-id")
    for name in names:
        check_needs(arguments, name, *names)
    check_excludes(arguments, "--coordinator", "--disaggregate", "--gateway", "--ray")
    if arguments.coordinator is not None and arguments.process_id >= arguments.num_processes:
        raise BadInputError(
            f"--process-id must be less than --num-processes {arguments.num_processes}, "
            f"got {arguments.process_id}"
        )


def check_tiers(arguments: argparse.Namespace, storage: str = "--storage") -> None:
    """Reject options of tiers that are given without those that they need.

    Args:
        arguments: The parsed options; a command has only some of them.
        storage: The option that adds a storage tier.

    Raises:
        BadInputError: With both names.
    """
    check_needs(arguments, "--host-blocks", storage, "--host-write")
    preempt = _value(arguments, "--preempt") or PREEMPT
    for tier in ("--host-blocks", storage):
        is_needed = preempt == "storage" or (preempt == "host" and tier == "--host-blocks")
        if is_needed and _value(arguments, tier) is None:
            raise BadInputError(f"--preempt {preempt} needs {tier}")
    check_needs(arguments, storage, "--storage-max-bytes")
    is_shared = _value(arguments, "--transport") == "storage" and not _value(arguments, "--gateway")
    if is_shared and _value(arguments, storage) is None:
        raise BadInputError(f"--transport storage needs {storage}")


def check_memory(arguments: argparse.Namespace) -> None:
    """Reject tiers whose bookkeeping alone needs more memory than the machine has.

    Linux would grant it, and later kill this process or another.

    Raises:
        BadInputError: With both figures.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for option in ("--device-blocks", "--host-blocks"):
        num_blocks = _value(arguments, option) or 0
        needed = num_blocks * _BYTES_PER_BLOCK
        if needed > memory:
            raise BadInputError(
                f"{option} {num_blocks} needs {needed:,} bytes for bookkeeping alone, but this "
                f"machine has {memory:,} bytes of memory"
            )


def _value(arguments: argparse.Namespace, option: str) -> Any:
    """Return the value of an option; None if it was not given or the command does not have it."""
    return getattr(arguments, option.removeprefix("--").replace("-", "_"), None)
