"""Bugs to plant into the KV events of the manager and of its tiers."""

from __future__ import annotations

from .plant import bug

EVENTS, MANAGER = "events.py", "manager.py"

EVENT_BUGS = (
    bug(
        "an eviction is not reported",
        MANAGER,
        ("            self._events.evicted(victims)\n", "            pass\n"),
        seen_in="Dynamo #11571",
    ),
    bug(
        "a block is reported as removed while a copy of it is still hit",
        MANAGER,
        (
            "            first = lease.num_shared_blocks\n        if run:",
            "            first = lease.num_shared_blocks\n"
            "            if self._events is not None:\n"
            "                self._events.evicted(lease.block_table[first - 1 : first])\n"
            "        if run:",
        ),
        seen_in="vLLM PR 55092",
    ),
    bug(
        "blocks are reported when they are reserved",
        MANAGER,
        (
            "        if count_hit:\n            self._hit_blocks += match.num_blocks\n",
            "        if count_hit:\n            self._hit_blocks += match.num_blocks\n"
            "        if self._events is not None and not match.num_blocks:\n"
            "            rest = match._tokens[match.num_tokens :]\n"
            "            blocks = ids[: len(rest) // self.block_size]\n"
            "            self._events.published(lease.node, rest.tobytes(), blocks.tobytes())\n",
        ),
    ),
    bug(
        "a reset is not reported",
        MANAGER,
        ("            self._events.cleared()\n", "            pass\n"),
        seen_in="llm-d-kv-cache #593",
    ),
    bug(
        "blocks after a duplicate are not reported",
        MANAGER,
        (
            "            first = lease.num_shared_blocks\n        if run:",
            "            first = lease.num_shared_blocks\n"
            "            recorder = self._events\n"
            "        else:\n"
            "            recorder = None\n"
            "        if run:",
        ),
        (
            "            if self._events is not None:\n"
            "                self._events.published(lease.node, run, blocks)\n",
            "            if self._events is not None and recorder is None:\n"
            "                self._events.published(lease.node, run, blocks)\n",
        ),
    ),
    bug(
        "the parent of a stored block is the first one of the node before",
        EVENTS,
        ("device_blocks, INT32)[-1:]", "device_blocks, INT32)[:1]"),
    ),
    bug(
        "the parent of a stored block is the block itself",
        EVENTS,
        ("run.parent or None,", "run.hashes[0] if run.parent else None,"),
    ),
    bug(
        "a stored block after others has no parent",
        EVENTS,
        ("run.parent or None,", "None,"),
    ),
    bug(
        "two namespaces have the same hashes",
        EVENTS,
        ('_hash(b"radixkv" + namespace)', '_hash(b"radixkv")'),
        seen_in="SGLang 0.5.23",
    ),
    bug(
        "a hash does not depend on the block before",
        EVENTS,
        ('name.to_bytes(HASH_BYTES, "little") + tokens', 'bytes(HASH_BYTES) + tokens'),
    ),
    bug(
        "a block has another hash when it is stored again",
        EVENTS,
        (
            "_chain(parent or _root(namespace), tokens",
            "_chain(parent or _root(namespace + bytes(self._next_seq)), tokens",
        ),
    ),
    bug(
        "an eviction is reported twice",
        EVENTS,
        (
            '        self._removed("GPU", self._device.of(ids))\n',
            '        self._removed("GPU", self._device.of(ids) * 2)\n',
        ),
    ),
    bug(
        "a republication is reported again",
        MANAGER,
        (
            "        run = tokens[first * self.block_size : last * self.block_size].tobytes()\n",
            "        if self._events is not None and first:\n"
            "            whole = tokens[: first * self.block_size].tobytes()\n"
            "            root = lease.node\n"
            "            while root.parent is not None:\n"
            "                root = root.parent\n"
            "            shared = lease.block_table[:first].tobytes()\n"
            "            self._events.published(root, whole, shared)\n"
            "        run = tokens[first * self.block_size : last * self.block_size].tobytes()\n",
        ),
    ),
    bug(
        "a stored event has the tokens of one block only",
        EVENTS,
        ("run.tokens, INT32),", "run.tokens, INT32)[: self.block_size],"),
    ),
    bug(
        "batches of one event have no number of their own",
        EVENTS,
        ("self._next_seq += 1", "self._next_seq += len(self._events) > 1"),
    ),
    bug(
        "an event is lost with the batch that is taken",
        EVENTS,
        ("tuple(self._events))", "tuple(self._events[:2]))"),
    ),
    bug(
        "a replay begins after the batch that was asked for",
        EVENTS,
        ("if each[0] >= seq]", "if each[0] > seq]"),
    ),
)  # fmt: skip

TIER_EVENT_BUGS = (
    bug(
        "what the host drops is not reported",
        "tiers/host_tier.py",
        (
            "                self.events.dropped(run.blocks)\n            self.num_cached",
            "                pass\n            self.num_cached",
        ),
        seen_in="SGLang #38720, SGLang #39108",
        world="tiers",
    ),
    bug(
        "what the host has is not reported",
        EVENTS,
        ('        self._record("CPU", self._host_run(node, host_blocks))\n', "        pass\n"),
        seen_in="LMCache #3532",
        world="tiers",
    ),
    bug(
        "copies to the host are reported when they are requested",
        "tiers/host_tier.py",
        (
            "        node.host = run\n        return run\n",
            "        node.host = run\n"
            "        if self.events is not None:\n"
            "            self.events.copied(node, run.blocks)\n"
            "        return run\n",
        ),
        (
            "            self.events.copied(run.node, run.blocks)\n        if not run.holders:",
            "            pass\n        if not run.holders:",
        ),
        world="tiers",
    ),
    bug(
        "blocks that move to the device are still reported on the host",
        "tiers/host_tier.py",
        (
            "            self.events.dropped(run.blocks)\n        self._unlink(run)",
            "            pass\n        self._unlink(run)",
        ),
        world="tiers",
    ),
    bug(
        "blocks of the host are reported as those of the device",
        EVENTS,
        ('self._record("CPU", self', 'self._record("GPU", self'),
        world="tiers",
    ),
    bug(
        "blocks that come back to the device are not reported",
        "tiers/api.py",
        (
            "            self.state.events.published(adopted.parent, run, adopted.device_blocks)\n",
            "            pass\n",
        ),
        world="tiers",
    ),
    bug(
        "fetched blocks have the hashes of the first blocks of their path",
        EVENTS,
        (
            "        self._host.set(host_ids, hashes[first:], hashes[first - 1] if first else 0)\n",
            "        self._host.set(host_ids, hashes[: len(host_ids)], 0)\n",
        ),
        world="tiers",
    ),
    bug(
        "fetched blocks have no parent",
        EVENTS,
        ("hashes[first:], hashes[first - 1] if first else 0)", "hashes[first:], 0)"),
        world="tiers",
    ),
    bug(
        "storage reports nothing",
        "tiers/completion_handlers.py",
        ("            self._state.events.stored(self._to_report, ok)\n", "            pass\n"),
        seen_in="llm-d-kv-cache #520",
        world="tiers",
    ),
    bug(
        "writes to storage that failed are reported",
        EVENTS,
        ("(run, ok[place:after])", "(run, [True] * len(run.hashes))"),
        world="tiers",
    ),
    bug(
        "what storage has lost is not reported",
        EVENTS,
        ("in missing if each in self._stored]", "in missing if not each]"),
        world="tiers",
    ),
    bug(
        "a cancelled lookup counts as an answer of storage",
        EVENTS,
        ("if good is not None and not good]", "if not good]"),
        world="tiers",
    ),
    bug(
        "blocks after a missing one are reported in storage",
        EVENTS,
        (
            "self._part(run, first, first + num_found), [True] * num_found)",
            "self._part(run, first, len(run.hashes)), ok)",
        ),
        world="tiers",
    ),
    bug(
        "blocks that are written to storage again are reported again",
        EVENTS,
        ("good and each not in self._stored for each", "good for each"),
        world="tiers",
    ),
    bug(
        "events name each block that was ever in storage",
        EVENTS,
        ("        self._forget_stored([*islice(self._stored, excess)])\n", "        pass\n"),
        world="tiers",
    ),
    bug(
        "what is forgotten of storage is not reported",
        EVENTS,
        (
            "        self._forget_stored([*islice(self._stored, excess)])\n",
            "        for each in [*islice(self._stored, excess)]:\n"
            "            del self._stored[each]\n",
        ),
        world="tiers",
    ),
    bug(
        "what storage was asked about again is forgotten first",
        EVENTS,
        ("            self._stored.move_to_end(each)\n", "            pass\n"),
        world="tiers",
    ),
    bug(
        "a reset is reported before what was evicted before it",
        EVENTS,
        ("self._events = [AllBlocksCleared()]", "self._events.insert(0, AllBlocksCleared())"),
        world="tiers",
    ),
    bug(
        "a reset that keeps namespaces is reported as one of everything",
        MANAGER,
        ("self._events is not None and not keep:", "self._events is not None:"),
        world="tiers",
    ),
    bug(
        "a reset that keeps namespaces reports nothing",
        MANAGER,
        ("                self._events.evicted(removed)\n", "                pass\n"),
        world="tiers",
    ),
)  # fmt: skip
