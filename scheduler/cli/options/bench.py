"""Options of `radixkv bench`."""

from __future__ import annotations

from .common import Commands, add_count, add_json, add_trace_lines, integer, milliseconds


def add_parser(commands: Commands) -> None:
    """Add the command and its benchmarks."""
    parser = commands.add_parser(
        "bench",
        help="measure the CPU time of the cache manager, or of the start of an engine",
        description="Measure CPU time.",
    )
    parser.set_defaults(module="bench")
    benches = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)

    cache = benches.add_parser(
        "cache",
        help="whole requests of a trace",
        description="Match, admit, extend, publish and release each request of a trace, one after "
        "the other. Each hash id stands for 512 tokens; output tokens are unique. The trace runs "
        "three times on equal managers: to warm up, to time requests, and to time phases.",
    )
    cache.add_argument("trace", metavar="TRACE", help="a .jsonl trace")
    add_count(cache, "--block-size", "tokens per block")
    add_count(cache, "--device-tokens", "size of the cache in tokens, rounded down to blocks")
    cache.add_argument(
        "--tokens",
        choices=("list", "int64", "int32"),
        default="int32",
        help="form of the token ids that the manager is given; default: %(default)s",
    )
    add_trace_lines(cache)
    add_json(cache)
    cache.set_defaults(benchmark="cache")

    evict = benches.add_parser(
        "evict",
        help="one eviction from a full cache",
        description="Fill a pool with published blocks that no lease holds, evict some of them in "
        "one call, refill the pool, and repeat.",
    )
    add_count(evict, "--device-blocks", "size of the pool in blocks")
    add_count(evict, "--evict", "blocks to evict in one call")
    add_count(evict, "--chain", "blocks per leaf")
    add_count(evict, "--block-size", "tokens per block (default: %(default)s)", default=16)
    add_count(evict, "--calls", "number of timed calls (default: %(default)s)", default=9)
    add_json(evict)
    evict.set_defaults(benchmark="evict")

    start = benches.add_parser(
        "start",
        help="the start of an engine, without and with compiled programs",
        description="Start an engine in a process without compiled programs, and in another one "
        "with the programs of the first. The model has Llama 8B's shapes with a sixteenth of its "
        "width. The times are the CPU times of the whole processes.",
    )
    add_count(start, "--layers", "layers of the model (default: %(default)s)", default=32)
    add_json(start)
    start.set_defaults(benchmark="start")

    step = benches.add_parser(
        "step",
        help="what the host does between two steps",
        description="Decode with the scheduler, the packing and the dispatch of an engine, beside "
        "a stand-in device that takes a set time for a step. Prints the CPU time of the host by "
        "phase, the bytes sent, and the share of the time in which the device is idle.",
    )
    add_count(step, "--rows", "number of running requests")
    add_count(step, "--max-model-len", "limit of prompt and output of a request, in tokens")
    add_count(step, "--prompt-tokens", "length of each prompt (default: %(default)s)", default=64)
    add_count(step, "--depth", "most steps in flight (default: %(default)s)", default=2)
    step.add_argument(
        "--device-ms",
        type=milliseconds,
        metavar="MS",
        default=8.0,
        help="time that the device takes for a step (default: %(default)s)",
    )
    step.add_argument(
        "--waiting",
        type=integer(0),
        metavar="N",
        default=0,
        help="requests that wait for blocks (default: %(default)s)",
    )
    add_json(step)
    step.set_defaults(benchmark="step")

    decode = benches.add_parser(
        "decode",
        help="one more token for every running request",
        description="Extend a batch of leases by one token per step, with extend_batch.",
    )
    add_count(decode, "--batch", "number of running requests (default: %(default)s)", default=256)
    add_count(decode, "--steps", "number of steps")
    add_count(
        decode, "--prompt-tokens", "length of each prompt (default: %(default)s)", default=1024
    )
    add_count(decode, "--block-size", "tokens per block (default: %(default)s)", default=16)
    add_json(decode)
    decode.set_defaults(benchmark="decode")
