"""Planted bugs that change no result: calls that walk over what they need not look at, or wait."""

from __future__ import annotations

from typing import Final

from .planting import Bug, bug

MANAGER: Final = "kvcache.manager"
BATCH: Final = "scheduler.batching.batch"
QUEUES: Final = "scheduler.batching.queues"
LRU: Final = "kvcache.storage.files.lru_index"
TABLE: Final = "kvcache.storage.operation_table"


def then(name: str, module: str, line: str, added: str) -> Bug:
    """Write a bug that adds a line after another one, as far indented."""
    indent = line[: len(line) - len(line.lstrip())]
    return bug(name, module, (f"{line}\n", f"{line}\n{indent}{added}\n"))


WALKS: Final[dict[str, tuple[Bug, ...]]] = {
    "the cache with idle blocks": (
        bug(
            "available walks over the idle nodes",
            MANAGER,
            (
                "        return self._pool.num_free + self._tree.num_idle\n",
                "        return self._pool.num_free + sum(\n"
                "            node.num_blocks for node in self._tree.idle_nodes()\n        )\n",
            ),
        ),
        then(
            "an admission lists the idle nodes",
            MANAGER,
            "        node = tree.pin(walk)",
            "list(tree.idle_nodes())",
        ),
        then(
            "a publication walks over the tree",
            MANAGER,
            "        first = lease.num_shared_blocks\n        last = first + len(run)"
            " // tree.block_bytes",
            "any(node is None for node in tree.nodes())",
        ),
        then(
            "a match sorts the beginnings of all prompts",
            MANAGER,
            "        root = self._tree.roots.get(namespace)",
            "sorted(root.children) if root is not None else None",
        ),
        then(
            "an eviction looks for the coldest node",
            MANAGER,
            "        tiers = self.tiers\n        victims = (self._tree if tiers is None else "
            "tiers.offloader).evict(num_blocks)",
            "min((node.num_blocks for node in self._tree.idle_nodes()), default=0)",
        ),
        then(
            "the counts are counted",
            MANAGER,
            "        free, cached = self._pool.num_free, self._tree.num_cached",
            "cached = sum(node.num_blocks for node in self._tree.nodes())",
        ),
        then(
            "a step begins with a walk",
            MANAGER,
            "        self._steps_begun += 1",
            "all(node.num_blocks for node in self._tree.idle_nodes())",
        ),
    ),
    "the cache with free blocks": (
        then(
            "a release checks the pool",
            MANAGER,
            "        tables.give_row(row)",
            "self._pool.check()",
        ),
        then(
            "an allocation copies the free list",
            "kvcache.prefix.block_pool",
            "        rest = self.num_free - num_blocks",
            "self._stack[: self.num_free].copy()",
        ),
        then(
            "recycled blocks are looked for in the free list",
            "kvcache.prefix.block_pool",
            '        ids = as_ids("block id", ids)',
            "set(ids.tolist()) & set(self.free_ids().tolist())",
        ),
        then(
            "an extension looks at the free blocks",
            MANAGER,
            '        num_tokens = as_count("num_tokens", num_tokens)',
            "self._pool.free_ids()",
        ),
    ),
    "the cache with leases": (
        then(
            "a release looks at all leases",
            MANAGER,
            "        tables.give_row(row)",
            "all(each.row >= 0 for each in self._leases.values())",
        ),
        then(
            "an admission copies the table of leases",
            MANAGER,
            "        self._admitted += 1",
            "dict(self._leases)",
        ),
    ),
    "tiers with idle blocks": (
        then(
            "the operations are taken after a look at the host",
            "kvcache.tiers.api",
            "        self.offloader.write_through()",
            "list(self.state.host.idle_runs())",
        ),
        then(
            "a request is parked after a look at the tree",
            "kvcache.tiers.parking",
            "    cache, host = state.cache, state.host",
            "any(node is None for node in state.tree.nodes())",
        ),
        then(
            "the counts of the tiers are counted",
            "kvcache.tiers.api",
            "        host, operations = state.host, state.operations",
            "sum(run.num_blocks for run in host.idle_runs())",
        ),
    ),
    "the scheduler with idle blocks": (
        then(
            "a step looks at the tree",
            BATCH,
            "            self._stats.steps += 1",
            "any(node is None for node in self.manager._tree.nodes())",
        ),
        then(
            "a finished request lists the tree",
            BATCH,
            "        self.queues.remove(request)",
            "list(self.manager._tree.nodes())",
        ),
    ),
    "the scheduler with waiting requests": (
        then(
            "a step looks at all waiting requests",
            BATCH,
            "            self._stats.steps += 1",
            "any(each.match for each in self.queues.waiting)",
        ),
        bug(
            "a request is looked for among all",
            QUEUES,
            (
                "        return self._requests.get(request_id)\n",
                "        found = [r for k, r in self._requests.items() if k == request_id]\n"
                "        return found[0] if found else None\n",
            ),
        ),
        then(
            "a new request is sorted with all others",
            QUEUES,
            "        insort(self.waiting, request, key=self.policy.order)  # the policy may raise",
            "self.waiting.sort(key=self.policy.order)",
        ),
        then(
            "an update copies the requests",
            BATCH,
            "        self.in_flight.popleft()",
            "list(self.queues._requests)",
        ),
    ),
    "the scheduler after requests": (
        then(
            "a step remembers and looks at all earlier ones",
            BATCH,
            "            self._stats.steps += 1",
            "[number for number in range(self._stats.steps)]",
        ),
    ),
    "the gateway with open requests": (
        bug(
            "the clock looks at all requests",
            "scheduler.gateway.retries",
            (
                "        self._now = now\n        late",
                "        self._now = now\n        any(r is None for r in self._requests.values())\n"
                "        late",
            ),
        ),
        bug(
            "an answer looks at all routes",
            "scheduler.gateway.gateway",
            (
                "        self._avoided.pop(name, None)\n",
                "        for key in [each for each in self._routes if each.request_id == name]:\n"
                "            self._end(key)\n        self._avoided.pop(name, None)\n",
            ),
        ),
        then(
            "an attempt looks at the loads of all",
            "scheduler.gateway.router",
            "        tokens = as_tokens(prompt)\n        avoided = frozenset(avoid)",
            "any(each < 0 for node in self._decode.values() for each in node.lacks.values())",
        ),
    ),
    "the index of stored values": (
        bug(
            "a look-up copies the index",
            LRU,
            (
                "[key in self._values for key in keys]",
                "[key in list(self._values) for key in keys]",
            ),
        ),
        bug(
            "a use ranks the values",
            LRU,
            (
                "            self._values.move_to_end(key)\n            is_due",
                "            self._values.move_to_end(key)\n"
                "            sum(1 for each in self._values if each < key)\n            is_due",
            ),
        ),
        bug(
            "the coldest is looked for",
            LRU,
            (
                "            return next(iter(self._values))\n",
                "            return [*self._values][0]\n",
            ),
        ),
    ),
    "storage after operations": (
        then(
            "a task is looked for among all ids",
            TABLE,
            "        queue = next(filter(None, self._queues), None)",
            "[each for each in range(self._last_id) if each in self._known]",
        ),
    ),
    "the hand-off after attempts": (
        then(
            "D's clock looks at the attempts that have ended",
            "scheduler.handoff.decode_side",
            "        self._now = now\n        timing = self._timing",
            "[each for each in self._attempts._ended if each is None]",
        ),
        bug(
            "D looks for an attempt among all",
            "scheduler.handoff.attempts",
            (
                "        attempts = self._by_request.get(key.request_id, ())\n        return next(",
                "        attempts = [each for some in self._by_request.values() for each in some]\n"
                "        return next(",
            ),
        ),
    ),
}
"""By the subject that has many of what they walk over."""
