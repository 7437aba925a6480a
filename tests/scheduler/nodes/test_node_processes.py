"""What a node process that has ended said last."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from radixkv.scheduler.errors import NodeProcessError
from radixkv.scheduler.nodes.processes import NodeProcesses

LINES = "\n".join(f"line {number}" for number in range(20))
LAST = "\n  ".join(f"line {number}" for number in range(12, 20))


@pytest.mark.parametrize(
    ("said", "end", "text"),
    [
        ("", "os._exit(3)", "p has ended with status 3: no output"),
        ("a\nradixkv: b", "os._exit(2)", "p has ended with status 2: radixkv: b"),
        (LINES, "os._exit(1)", f"p has ended with status 1: {LAST}"),
        (LINES, "os.abort()", f"p was ended (Aborted); last lines of its stderr: {LAST}"),
        ("a", "os.abort()", "p was ended (Aborted); last line of its stderr: a"),
        (
            f"{LINES}\nradixkv: p serves",
            "os.abort()",
            "p was ended (Aborted); last line of its stderr: radixkv: p serves",
        ),
        (f"{'x' * (1 << 20)}\nb", "os._exit(1)", f"p has ended with status 1: {'x' * 65534}\n  b"),
    ],
)
def test_the_error_has_the_last_words_of_the_node(
    monkeypatch: pytest.MonkeyPatch, said: str, end: str, text: str
) -> None:
    popen = subprocess.Popen
    program = "import os, sys; sys.stderr.write(os.environ['SAID']); sys.stderr.flush(); "
    repeat = "os.environ['SAID'].replace('X', 'x' * (1 << 20))"
    program = program.replace("os.environ['SAID']", repeat)

    def start(line: list[str], *, env: dict[str, str], **options: Any) -> Any:
        env = {**env, "SAID": said.replace("x" * (1 << 20), "X")}
        return popen([sys.executable, "-S", "-c", program + end], env=env, **options)

    monkeypatch.setattr(subprocess, "Popen", start)
    with NodeProcesses() as processes:
        processes.start("p", "prefill-node", [])
        os.waitid(os.P_PID, processes.pid("p"), os.WEXITED | os.WNOWAIT)
        with pytest.raises(NodeProcessError) as error:
            processes.check()
    assert str(error.value) == text


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let nodes run a program of the test."""
    popen = subprocess.Popen

    def use(program: str) -> None:
        def start(line: list[str], **options: Any) -> Any:
            return popen([sys.executable, "-S", "-c", program], **options)

        monkeypatch.setattr(subprocess, "Popen", start)

    return use


def test_ctrl_c_reaches_the_process_that_has_started_a_node_and_not_the_node(
    run: Callable[[str], None],
) -> None:
    """A terminal sends it to a session, and the node has one of its own."""
    run("import os; print(os.getsid(0) == os.getpid() and '{}' or 0)")
    with NodeProcesses() as processes:
        processes.start("p", "prefill-node", [])
        os.waitid(os.P_PID, processes.pid("p"), os.WEXITED | os.WNOWAIT)
        assert processes.end("p") == {}


def test_a_node_that_is_stopped_ends_in_order(run: Callable[[str], None]) -> None:
    run("""
import os, signal, sys
def end(*_):
    print('{"ended": 1}', flush=True)
    os._exit(0)
signal.signal(signal.SIGTERM, end)
os.kill(os.getpid(), signal.SIGSTOP)
signal.pause()
""")
    with NodeProcesses() as processes:
        processes.start("p", "prefill-node", [])
        os.waitid(os.P_PID, processes.pid("p"), os.WSTOPPED | os.WNOWAIT)
        assert processes.end("p") == {"ended": 1}
