"""Node processes under connections without their secret; a small `strangers`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from radixkv.scheduler.handoff.gateway_messages import GATEWAY
from radixkv.scheduler.nodes.open_files import HANDSHAKE_FILES

from .strangers import Cluster, under_attack

_MORE_FILES = {"jax": 200, "nixl": 64}
"""Connections of transfers, also with a node that has restarted, which these may open meanwhile."""
_MORE_MIB = 64


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transport", "num_connections", "restarts"),
    [("jax", 3000, 1), ("nixl", 3000, 1)],
)
def test_nodes_serve_whatever_strangers_do(
    model_dir: Callable[[str], Path], transport: str, num_connections: int, restarts: int
) -> None:
    with ExitStack() as stack:
        cluster = Cluster(model_dir("qwen3"), transport, stack)
        result = under_attack(cluster, num_connections, restarts)
        # The gates notice in their threads that the strangers have gone.
        most_files = {
            name: before.files + _MORE_FILES[transport] for name, before in result.before.items()
        }
        while any(now.files > most_files[name] for name, now in cluster.usage().items()):
            cluster.step()
        assert sorted(cluster.processes.stop()) == ["decode-0", "prefill-0"]
    assert result.num_requests > 0
    # A connection that comes while the queue of the system is full is not refused but never made.
    assert result.num_refused > num_connections // 10
    for name, before in result.before.items():
        most, after = result.most[name], result.after[name]
        assert most.files <= before.files + HANDSHAKE_FILES + _MORE_FILES[transport]
        if name != GATEWAY:  # this process runs other tests
            assert max(most.rss_mib, after.rss_mib) <= before.rss_mib + _MORE_MIB
