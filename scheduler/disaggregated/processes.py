"""Nodes as processes of this machine, for as long as somebody needs them."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any, Final

from ..channel.secret import ENVIRONMENT, Secret
from ..errors import SchedulerError

_END_S: Final = 30.0


class NodeProcessError(SchedulerError):
    """The process of a node has ended by itself."""


@dataclass(frozen=True, slots=True)
class _Node:
    process: subprocess.Popen[bytes]
    out: IO[bytes]
    err: IO[bytes]

    def forget(self) -> None:
        """Close what is open, of a process that has ended or does now."""
        self.process.wait()
        self.out.close()
        self.err.close()


class NodeProcesses:
    """Starts nodes that share a secret of their own, and ends them all at its end.

    Attributes:
        secret: for the channel of the desk.
    """

    def __init__(self) -> None:
        text = secrets.token_hex(32)
        self.secret = Secret(text.encode())
        self._environment = {**os.environ, ENVIRONMENT: text}
        self._nodes: dict[str, _Node] = {}

    def __enter__(self) -> NodeProcesses:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self, name: str, command: str, arguments: Sequence[object]) -> None:
        """Start a node.

        Args:
            name: of the node; an earlier one of that name has ended.
            command: ``prefill-node`` or ``decode-node``.
            arguments: of the command, but for its name.
        """
        # Files, because a pipe could fill up; `stop` closes them.
        out, err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        line = [sys.executable, "-m", "radixkv.scheduler.cli", command, "--name", name]
        process = subprocess.Popen(
            [*line, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=self._environment,
            start_new_session=True,  # ctrl-C is for us, who then end it
        )
        if name in self._nodes:
            self._nodes.pop(name).forget()
        self._nodes[name] = _Node(process, out, err)

    def pid(self, name: str) -> int:
        """Return the process id of a node."""
        return self._nodes[name].process.pid

    def check(self) -> None:
        """Refuse to go on if a node has ended.

        Raises:
            NodeProcessError: with the last thing that it said.
        """
        for name, node in self._nodes.items():
            status = node.process.poll()
            if status is not None:
                node.err.seek(0)
                lines = node.err.read().decode(errors="replace").strip().splitlines()
                last = lines[-1] if lines else "it said nothing"
                raise NodeProcessError(f"{name} has ended with status {status}: {last}")

    def stop(self) -> dict[str, dict[str, Any]]:
        """End all nodes; return what each says that it has done, if it ended well."""
        for node in self._nodes.values():
            if node.process.poll() is None:
                node.process.send_signal(signal.SIGTERM)
                node.process.send_signal(signal.SIGCONT)
        stats = {}
        for name, node in self._nodes.items():
            try:
                status = node.process.wait(_END_S)
            except subprocess.TimeoutExpired:
                node.process.kill()
                status = node.process.wait()
            if status == 0:
                node.out.seek(0)
                stats[name] = json.loads(node.out.read())
            node.forget()
        self._nodes.clear()
        return stats
