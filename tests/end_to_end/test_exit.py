"""No thread of radixkv runs when the interpreter ends, also if nothing was closed.

Python unwinds the stack of a daemon thread that asks for the GIL after that. If it meets frames of
JAX's or NIXL's C++, the process aborts: `terminate called after throwing an instance of ''`.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from .small import NODE_OPTIONS

LAST = """
import atexit, threading

@atexit.register  # what is registered first runs last
def report():
    print([each.name for each in threading.enumerate() if each is not threading.main_thread()])
"""

TRANSPORT = """
import sys
from radixkv.scheduler.nodes.transport import open_transport

transport = open_transport(sys.argv[1], staging_bytes=1 << 20)
"""

ENGINE = """
import atexit, time
from threading import Event
from radixkv.scheduler.serving.engine_thread import EngineThread

is_closing, may_close = Event(), Event()

class Engine:
    has_work = False

    def close(self, timeout_s):
        is_closing.set()
        may_close.wait()
        time.sleep(0.2)
        return True

thread = EngineThread(Engine())
thread.close(drain=False, timeout_s=1.0)
is_closing.wait()
atexit.register(may_close.set)
"""

WRITER = """
import jax.numpy as jnp
import numpy as np
from radixkv.kvcache.copies.background_writer import BackgroundWriter, StagedBlocks

class Host:
    def write(self, destinations, pools):
        for _ in range(500):
            np.asarray(arrays[0] + 1)  # asks for the GIL in JAX's C++

arrays = [jnp.zeros(8)]
writer = BackgroundWriter(Host(), 2)
for number in range(2):
    writer.submit(StagedBlocks(number, slice(0, 1), np.zeros(1, np.int32), arrays, 32))
"""

STORAGE = """
from radixkv.kvcache.storage.workers import StorageWorkers

class Backend:
    def close(self):
        print("closed")

storage = StorageWorkers(Backend(), max_bytes_in_flight=1)
"""


def end(program: str, *arguments: str) -> tuple[int, str, str]:
    """Run a program to its end; return its status, its output, and the end of its stderr."""
    command = [sys.executable, "-c", LAST + program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout, done.stderr[-2000:]


@pytest.mark.parametrize("name", ["jax", "nixl"])
def test_a_transport_may_stay_open(name: str) -> None:
    assert end(TRANSPORT, name) == (0, "[]\n", "")


def test_the_end_waits_for_an_engine_that_is_closing() -> None:
    assert end(ENGINE) == (0, "[]\n", "")


def test_the_end_waits_for_copies() -> None:
    assert end(WRITER) == (0, "[]\n", "")


def test_the_end_closes_storage() -> None:
    assert end(STORAGE) == (0, "closed\n[]\n", "")


SWALLOWED = """
import gc, signal
from radixkv.scheduler.terminal.interrupts import exit_on_interrupt

def collected(*_):  # Python prints and forgets what such a callback raises; JAX has one
    signal.raise_signal(signal.SIGINT)

gc.callbacks.append(collected)
with exit_on_interrupt():
    gc.collect()
print("the interrupt is lost")
"""


def test_an_interrupt_is_not_lost_in_a_callback() -> None:
    assert end(SWALLOWED) == (130, "", "radixkv: interrupted\n")


COMMAND = """
import gc, signal, sys
from importlib import import_module
from radixkv.scheduler.cli.main import main

def interrupted(*_, **__):
    gc.callbacks.append(lambda *_: signal.raise_signal(signal.SIGINT))
    gc.collect()
    gc.callbacks.pop()
    raise SystemExit(77)

place, name, *arguments = sys.argv[1:]
setattr(import_module(f"radixkv.scheduler.{place}"), name, interrupted)
sys.exit(main(arguments))
"""


@pytest.mark.parametrize(
    ("place", "options"),
    [
        ("cli.shared.model_loading load_model", ()),
        ("cli.generate Engine", ()),
        ("cli.generate PrefillEngine", ("--disaggregate", "--transport", "inprocess")),
        ("bench.step bench_step", ("bench", "step", "--rows", 2, "--max-model-len", 512)),
    ],
)
def test_an_interrupt_is_not_lost_while_a_command_starts(
    model_dir: Callable[[str], Path], tmp_path: Path, place: str, options: tuple[object, ...]
) -> None:
    (tmp_path / "prompts.json").write_text("[[5]]")
    if "bench" not in options:
        prompts = ("--prompts", tmp_path / "prompts.json", "--max-new-tokens", 1)
        options = ("generate", model_dir("qwen3"), *prompts, *options)
    assert end(COMMAND, *place.split(), *map(str, options)) == (130, "", "radixkv: interrupted\n")


STARTING = """
import gc, sys, time
from radixkv.scheduler.cli.main import main

def wait():
    while True:
        time.sleep(0.01)

gc.freeze = wait  # what a node calls last before it serves: an interrupt comes before
sys.exit(main())
"""


@pytest.mark.parametrize("transport", ["jax", "nixl"])
def test_an_interrupt_ends_a_node_that_starts(
    model_dir: Callable[[str], Path], transport: str
) -> None:
    command = [sys.executable, "-c", STARTING, "decode-node", *NODE_OPTIONS]
    command += ["--gateway", "127.0.0.1:9", "--transport", transport, model_dir("qwen3")]
    with subprocess.Popen(
        [*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as node:
        assert node.stderr is not None and node.stdout is not None
        while "compiling" not in (line := node.stderr.readline()):
            assert line, "the node has ended"
        node.send_signal(signal.SIGINT)
        assert "radixkv: interrupted\n" in node.stderr.read()
        assert (node.wait(), node.stdout.read()) == (130, "")
