"""Bugs to plant into eviction and dropping on the host, and into the fork of a request."""

from __future__ import annotations

from .plant import bug

OFFLOADER, TREE, TIERS = "tiers/offload.py", "tiers/tiered_tree.py", "tiers/api.py"

ROOM_BUGS = (
    bug(
        "the end of a request is no use of its copies",
        TREE,
        ("                self.host.touch(place.host)\n", "                pass\n"),
        world="tiers",
    ),
    bug(
        "a hit is no use of the copies",
        OFFLOADER,
        (
            "                self._host.touch(place.host)\n            elif",
            "                pass\n            elif",
        ),
        world="tiers",
    ),
    bug(
        "evicted blocks take the place of no older copy",
        OFFLOADER,
        (
            "needed + idle - self._host.available",
            "needed + idle - self._host.pool.num_free",
        ),
        world="tiers",
    ),
    bug(
        "a block is written through in the place of its parent",
        OFFLOADER,
        ("self._host.available - sum([run", "self._host.available - 0 * sum([run"),
        seen_in="ours, 2026-11",
        world="tiers",
    ),
    bug(
        "blocks that found no room are written through later",
        OFFLOADER,
        ("        self.tree.published.clear()\n", ""),
        world="tiers",
    ),
    bug(
        "hits count on after the blocks have left the device",
        TREE,
        ("            self.hits.pop(node, None)\n            num_blocks", "            num_blocks"),
        world="tiers",
    ),
    bug(
        "fetched blocks are found without their parents",
        "tiers/prefetch.py",
        ("    prefetch.runs = state.host.hold(match.host_runs)\n", ""),
        world="tiers",
    ),
    bug(
        "fetched blocks count as not stored",
        TREE,
        ("        run.stored = True  # it came from storage\n", ""),
        world="tiers",
    ),
    bug(
        "an operation that was not taken has a result",
        "tiers/operations.py",
        (
            "if op_id not in self._open or op_id in self._queued:",
            "if op_id not in self._open:",
        ),
        elsewhere=(
            (
                "tiers/operations.py",
                "        _, handler = self._open.pop(op_id)\n",
                "        _, handler = self._open.pop(op_id)\n"
                "        self._queued.pop(op_id, None)\n",
            ),
        ),
        world="tiers",
    ),
    bug(
        "a request is parked with unpublished blocks",
        "tiers/parking.py",
        (
            "    cache.publish(lease, tokens)\n",
            "    if cache._leases.get(lease.row) is not lease:\n"
            "        raise cache._not_live(lease)\n",
        ),
        world="tiers",
    ),
    bug(
        "the copies of an unparked request go on",
        "tiers/parking.py",
        ("        state.operations.cancel(parked.op_id)\n", "        pass\n"),
        world="tiers",
    ),
    bug(
        "a fork reads the last block of another request before it is copied",
        TIERS,
        (
            "            self.loader.load(OpKind.DEVICE_TO_DEVICE, other, plan)\n",
            "            other.num_ready_tokens = len(tokens)\n",
        ),
        world="tiers",
    ),
    bug(
        "a fork copies the block before the last",
        TIERS,
        (
            "source = lease.block_table[other.num_shared_blocks]",
            "source = lease.block_table[max(other.num_shared_blocks - 1, 0)]",
        ),
        world="tiers",
    ),
    bug(
        "a fork does not copy a last block of one token",
        TIERS,
        ("if tail_tokens > 0:", "if tail_tokens > 1:"),
        world="tiers",
    ),
    bug(
        "a fork forgets its namespace",
        TIERS,
        ("cache.match(tokens, root.key)", "cache.match(tokens)"),
        world="tiers",
    ),
)
