"""How node processes are started and ended, and what those that have ended said last."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from radixkv.scheduler.errors import NodeProcessError
from radixkv.scheduler.nodes import processes as processes_module
from radixkv.scheduler.nodes.channel import Secret
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


def wait_for_end(processes: NodeProcesses, name: str) -> None:
    os.waitid(os.P_PID, processes.pid(name), os.WEXITED | os.WNOWAIT)


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_node_gets_the_secret_and_its_own_variables_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that it is given replace those of this process; the secret is in no argument."""
    started: list[tuple[list[str], dict[str, str]]] = []
    popen = subprocess.Popen

    def start(line: list[str], *, env: dict[str, str], **options: Any) -> Any:
        started.append((line, env))
        return popen([sys.executable, "-S", "-c", "pass"], env=env, **options)

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setenv("OURS", "ours")
    monkeypatch.setenv("THEIRS", "ours")
    before = num_files()
    with NodeProcesses() as processes:
        processes.start("p", "prefill-node", ["--blocks", 3], {"THEIRS": "theirs"})
        for _ in range(2):
            wait_for_end(processes, "p")
            processes.restart("p")
        assert num_files() == before + 2, "what earlier ones have printed is closed"
    assert num_files() == before
    assert len(started) == 3 and started[1:] == started[:-1]
    [(line, environment), *_] = started
    parent = ["--parent-pid", str(os.getpid())]
    assert line[3:] == ["prefill-node", "--name", "p", *parent, "--blocks", "3"]
    assert (environment["OURS"], environment["THEIRS"]) == ("ours", "theirs")
    secret = environment["RADIXKV_SECRET"]
    assert Secret(secret.encode()).key(b"x") == processes.secret.key(b"x")
    assert secret not in " ".join(line)
    with NodeProcesses() as others:
        assert others.secret.key(b"x") != processes.secret.key(b"x")


def test_the_statistics_are_those_of_nodes_that_have_ended_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if they are empty; what has been ended is ended once, and is known no more."""
    popen = subprocess.Popen
    printed = {"good": ("{'a': 1}", 0), "empty": ("{}", 0), "bad": ("{'a': 1}", 3)}

    def start(line: list[str], **options: Any) -> Any:
        text, status = printed[line[line.index("--name") + 1]]
        program = f"import os; print({text!r}.replace(chr(39), chr(34)), flush=True)"
        program += f"; os._exit({status})"
        return popen([sys.executable, "-S", "-c", program], **options)

    monkeypatch.setattr(subprocess, "Popen", start)
    before = num_files()
    with NodeProcesses() as processes:
        for together in (False, True):
            for name in printed:
                processes.start(name, "prefill-node", [])
                wait_for_end(processes, name)
            assert set(processes.ended()) == set(printed)
            if together:
                stats = processes.stop()
            else:
                ends = {name: processes.end(name) for name in printed}
                assert ends["bad"] is None
                stats = {name: each for name, each in ends.items() if each is not None}
            assert stats == {"good": {"a": 1}, "empty": {}}
            assert (processes.ended(), processes.stop(), num_files()) == ({}, {}, before)


def test_a_node_that_does_not_end_is_killed(
    run: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes_module, "_END_S", 0.01)
    run("""
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.kill(os.getpid(), signal.SIGSTOP)
while True:
    signal.pause()
""")
    with NodeProcesses() as processes:
        processes.start("p", "prefill-node", [])
        os.waitid(os.P_PID, processes.pid("p"), os.WSTOPPED | os.WNOWAIT)
        assert processes.end("p") is None


def test_all_nodes_are_told_to_end_before_one_of_them_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    popen, told = subprocess.Popen, tmp_path / "told"
    does = {"first": "while not told.exists(): time.sleep(0.001)", "last": "told.touch()"}

    def start(line: list[str], **options: Any) -> Any:
        program = f"""
import os, pathlib, signal, time
told = pathlib.Path({str(told)!r})
def end(*_):
    {does[line[line.index("--name") + 1]]}
    print("{{}}", flush=True)
    os._exit(0)
signal.signal(signal.SIGTERM, end)
os.kill(os.getpid(), signal.SIGSTOP)
while True:
    signal.pause()
"""
        return popen([sys.executable, "-S", "-c", program], **options)

    monkeypatch.setattr(subprocess, "Popen", start)
    with NodeProcesses() as processes:
        for name in does:
            processes.start(name, "prefill-node", [])
        for name in does:
            os.waitid(os.P_PID, processes.pid(name), os.WSTOPPED | os.WNOWAIT)
        assert processes.stop() == {"first": {}, "last": {}}
