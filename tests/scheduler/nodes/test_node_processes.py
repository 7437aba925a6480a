"""What a node process that has ended said last."""

from __future__ import annotations

import os
import subprocess
import sys
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
