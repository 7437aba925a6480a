"""The share of file descriptors of each purpose."""

from __future__ import annotations

import os
import re
import resource

import pytest

from radixkv.scheduler.errors import ConfigError
from radixkv.scheduler.nodes.channel.gate import FILES_PER_CONNECTION, MAX_UNPROVEN
from radixkv.scheduler.nodes.channel.zmq_channel import FILES_PER_PEER, MAX_PEERS
from radixkv.scheduler.nodes.open_files import OTHER_FILES, TRANSPORT_FILES, reserve_files


class Limits:
    """Stands for the limits of a process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, soft: int, hard: int) -> None:
        self.limits = (soft, hard)
        monkeypatch.setattr(resource, "getrlimit", lambda kind: self.limits)
        monkeypatch.setattr(resource, "setrlimit", self.set)

    def set(self, kind: int, limits: tuple[int, int]) -> None:
        assert kind == resource.RLIMIT_NOFILE
        self.limits = limits


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [
        (1024, 1024, 1024),
        (1024, 4096, 4096),
        (1024, 1 << 20, 1 << 16),
        (1024, resource.RLIM_INFINITY, 1 << 16),
        (1 << 17, 1 << 20, 1 << 17),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, resource.RLIM_INFINITY),
    ],
)
def test_the_soft_limit_is_raised(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, raised: int
) -> None:
    limits = Limits(monkeypatch, soft, hard)
    num_peers = reserve_files(transport=True)
    assert limits.limits == (raised, hard)
    assert 4 < num_peers <= MAX_PEERS
    assert (num_peers == MAX_PEERS) is (hard not in (1024, 4096))


@pytest.mark.parametrize("transport", [False, True])
@pytest.mark.parametrize("more", [-1, 0, 4 * FILES_PER_PEER - 1, 4 * FILES_PER_PEER])
def test_each_purpose_has_its_share(
    monkeypatch: pytest.MonkeyPatch, transport: bool, more: int
) -> None:
    num_open = len(os.listdir("/proc/self/fd"))
    handshakes, peers = FILES_PER_CONNECTION * MAX_UNPROVEN, 4 * FILES_PER_PEER
    transfers = TRANSPORT_FILES if transport else 0
    needed = num_open + handshakes + transfers + OTHER_FILES + peers
    Limits(monkeypatch, 256, needed + more)
    if more >= 0:
        assert reserve_files(transport=transport) == 4 + more // FILES_PER_PEER
        return
    of_transfers = f"{transfers} for transfers, " if transport else ""
    text = (
        f"this process needs {needed} file descriptors ({num_open} that are open, {handshakes} for "
        f"connections that have not proved the secret, {of_transfers}{OTHER_FILES} for everything "
        f"else, {peers} for 4 peers), and the limit is {needed - 1} (`ulimit -Hn`)"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(text)}$"):
        reserve_files(transport=transport)
