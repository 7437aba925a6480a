"""Nodes as processes of this machine, for as long as somebody needs them."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import IO, Any, Final

from ..errors import NodeProcessError
from .channel.secret import ENVIRONMENT, Secret

_END_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class _Node:
    process: subprocess.Popen[bytes]
    out: IO[bytes]
    err: IO[bytes]

    def tell_to_end(self) -> None:
        """Ask the process to end, if it has not."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.send_signal(signal.SIGCONT)

    def last_words(self) -> dict[str, Any] | None:
        """Wait for the end, and return the counts that were printed, if it ended well."""
        try:
            status = self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        stats: dict[str, Any] | None = None
        if status == 0:
            self.out.seek(0)
            stats = json.loads(self.out.read())
        self.forget()
        return stats

    def forget(self) -> None:
        """Close what is open, of a process that has ended or does now."""
        self.process.wait()
        self.out.close()
        self.err.close()


class NodeProcesses:
    """Starts nodes that share a secret of their own, and ends them all at its end.

    Attributes:
        secret: for the channel of the gateway.
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

    def start(
        self,
        name: str,
        command: str,
        arguments: Sequence[object],
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Start a node.

        Args:
            name: of the node; an earlier one of that name has ended.
            command: ``prefill-node`` or ``decode-node``.
            arguments: of the command, but for its name; every user of the machine can see them.
            environment: what is added to that of this process; no other user can see it.
        """
        # Files, because a pipe could fill up; `stop` closes them.
        out, err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        line = [sys.executable, "-m", "radixkv.scheduler.cli.main", command, "--name", name]
        process = subprocess.Popen(
            [*line, "--parent-pid", str(os.getpid()), *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env={**self._environment, **environment},
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
                if status < 0:
                    how = signal.strsignal(-status) or f"signal {-status}"
                    raise NodeProcessError(f"{name} was ended ({how}); the last it said: {last}")
                raise NodeProcessError(f"{name} has ended with status {status}: {last}")

    def end(self, name: str) -> dict[str, Any] | None:
        """End one node; return what it says that it has done, if it ended well."""
        node = self._nodes.pop(name)
        node.tell_to_end()
        return node.last_words()

    def stop(self) -> dict[str, dict[str, Any]]:
        """End all nodes; return what each says that it has done, if it ended well."""
        for node in self._nodes.values():
            node.tell_to_end()
        said = {name: node.last_words() for name, node in self._nodes.items()}
        self._nodes.clear()
        return {name: stats for name, stats in said.items() if stats is not None}
