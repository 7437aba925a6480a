"""Starts and ends node processes on this machine."""

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
_LAST_LINES: Final = 8
_MAX_STDERR_BYTES: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class _Node:
    """A node.

    Attributes:
        start: command, arguments and environment of `NodeProcesses.start`.
        out, err: what it prints.
    """

    start: tuple[str, Sequence[object], Mapping[str, str]]
    process: subprocess.Popen[bytes]
    out: IO[bytes]
    err: IO[bytes]

    def describe_end(self, name: str) -> str:
        """Say how the process has ended, with its last line or, of a crash, its last lines."""
        status = self.process.returncode
        self.err.seek(max(0, self.err.seek(0, os.SEEK_END) - _MAX_STDERR_BYTES))
        lines = self.err.read().decode(errors="replace").strip().splitlines() or ["no output"]
        is_ours = lines[-1].startswith("radixkv: ")
        last = lines[-1] if is_ours else "\n  ".join(lines[-_LAST_LINES:])
        if status < 0:
            how = signal.strsignal(-status) or f"signal {-status}"
            what = "lines" if "\n" in last else "line"
            return f"{name} was ended ({how}); last {what} of its stderr: {last}"
        return f"{name} has ended with status {status}: {last}"

    def terminate(self) -> None:
        """Send SIGTERM to the process, unless it has ended."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.send_signal(signal.SIGCONT)

    def wait(self) -> dict[str, Any] | None:
        """Wait for the end; return the printed statistics if the exit status is 0."""
        try:
            status = self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        stats: dict[str, Any] | None = None
        if status == 0:
            self.out.seek(0)
            stats = json.loads(self.out.read())
        self.close()
        return stats

    def close(self) -> None:
        """Wait for the end, and close the output files."""
        self.process.wait()
        self.out.close()
        self.err.close()


class NodeProcesses:
    """Node processes that share a new secret. As a context manager, it ends them on exit.

    Attributes:
        secret: the secret, which the gateway's channel needs, too.
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
            name: name of the node; an earlier node of this name must have ended.
            command: ``prefill-node`` or ``decode-node``.
            arguments: arguments of the command except its name, visible to all users of the
                machine.
            environment: additional environment variables, which other users cannot see.
        """
        # Files, because a pipe could fill up.
        out, err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        line = [sys.executable, "-m", "radixkv.scheduler.cli.main", command, "--name", name]
        process = subprocess.Popen(
            [*line, "--parent-pid", str(os.getpid()), *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env={**self._environment, **environment},
            start_new_session=True,  # ctrl-C reaches only this process, which ends the node
        )
        if name in self._nodes:
            self._nodes.pop(name).close()
        self._nodes[name] = _Node((command, arguments, environment), process, out, err)

    def pid(self, name: str) -> int:
        """Return the process id of a node."""
        return self._nodes[name].process.pid

    def check(self) -> None:
        """Raise an error if a node has ended.

        Raises:
            NodeProcessError: with the last line of the node's stderr.
        """
        for reason in self.ended().values():
            raise NodeProcessError(reason)

    def ended(self) -> dict[str, str]:
        """Return how nodes have ended that nobody ended, with the last lines of their stderr."""
        return {
            name: node.describe_end(name)
            for name, node in self._nodes.items()
            if node.process.poll() is not None
        }

    def restart(self, name: str) -> None:
        """Start a node that has ended again, with the same arguments."""
        self.start(name, *self._nodes[name].start)

    def end(self, name: str) -> dict[str, Any] | None:
        """End one node; return its statistics if its exit status is 0."""
        node = self._nodes.pop(name)
        node.terminate()
        return node.wait()

    def stop(self) -> dict[str, dict[str, Any]]:
        """End all nodes; return the statistics of those with exit status 0."""
        for node in self._nodes.values():
            node.terminate()
        stats = {name: node.wait() for name, node in self._nodes.items()}
        self._nodes.clear()
        return {name: each for name, each in stats.items() if each is not None}
