"""A process with a transport that tests stop, continue and kill.

Segment by path. It does what the lines of its input say, and answers each with a line:

    offer PART ARRAYS BYTES   the packet with the pull info, in hexadecimal
    pull PACKET               "begun", and when it has ended, how
    withdraw                  "withdrawn"
    reopen BYTES              "open"; another transport with this much staging memory
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from radixkv.scheduler.handoff import AttemptKey, Header, PartId, Send
from radixkv.scheduler.nodes.channel.codec import Packet, decode, encode
from radixkv.scheduler.nodes.transport import (
    Event,
    Offered,
    PullFailed,
    PullInfo,
    Transport,
    describe,
    open_transport,
)

KEY = AttemptKey("r1", 1)
STAGING_BYTES = 160 << 20


def content(part: int, num_arrays: int, num_bytes: int) -> list[npt.NDArray[np.uint8]]:
    """The arrays that a peer offers as a part; no byte is 0."""
    draw = np.random.default_rng(part)
    return [draw.integers(1, 256, num_bytes, np.uint8) for _ in range(num_arrays)]


class Peer:
    """The test's handle of the process."""

    def __init__(self, transport: str, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__)), transport],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **environment},
            bufsize=0,
        )
        self._said = b""

    def ask(self, line: str) -> str:
        """Send a command, and return the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())
        return self.answer()

    def answer(self) -> str:
        """Return the next line of its output."""
        assert self._process.stdout is not None
        waiter = select.poll()
        waiter.register(self._process.stdout, select.POLLIN)
        while b"\n" not in self._said:
            assert waiter.poll(300_000), "the peer says nothing"
            said = os.read(self._process.stdout.fileno(), 1 << 16)
            assert said, "the peer has ended"
            self._said += said
        answer, _, self._said = self._said.partition(b"\n")
        return answer.decode()

    def offer(self, part: int, num_arrays: int, num_bytes: int) -> PullInfo:
        """Let the peer offer `content`."""
        info = decode(bytes.fromhex(self.ask(f"offer {part} {num_arrays} {num_bytes}"))).pull_info
        assert info is not None
        return info

    def stop(self) -> None:
        """Stop the process, and wait until it has stopped."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the process, unless it has ended."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def packet_of(info: PullInfo) -> str:
    send = Send(Header(info.part_id.key, info.part_id.epoch), info.part_id.part, 0, 1, 0)
    return encode(Packet("p", "d", 1, 1, send, info)).hex()


def _next(transport: Transport) -> Event:
    while not (events := transport.poll()):
        time.sleep(1e-3)
    (event,) = events
    return event


def _say(line: str) -> None:
    print(line, flush=True)


def main() -> None:
    transport = open_transport(sys.argv[1], staging_bytes=STAGING_BYTES)
    for line in sys.stdin:
        words: list[Any] = line.split()
        match words[0]:
            case "offer":
                part, num_arrays, num_bytes = map(int, words[1:])
                arrays = content(part, num_arrays, num_bytes)
                part_id = PartId(KEY, 7, 8, 3, part)
                transport.offer(part_id, arrays, describe(arrays, num_blocks=1), ttl_s=3600)
                offered = _next(transport)
                assert isinstance(offered, Offered), offered
                _say(packet_of(offered.info))
            case "pull":
                info = decode(bytes.fromhex(words[1])).pull_info
                assert info is not None
                transport.pull(info.part_id, info, info.descriptor, timeout_s=60)
                _say("begun")
                event = _next(transport)
                _say(event.fault.name if isinstance(event, PullFailed) else type(event).__name__)
            case "reopen":
                transport.close()
                transport = open_transport(sys.argv[1], staging_bytes=int(words[1]))
                _say("open")
            case "withdraw":
                transport.withdraw(KEY)
                _say(type(_next(transport)).__name__)
    transport.close()


if __name__ == "__main__":
    main()
