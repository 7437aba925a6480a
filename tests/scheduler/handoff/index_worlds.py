"""Nodes with real cache managers, their gateway, and a network that loses messages."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field, replace
from random import Random
from types import ModuleType
from typing import Any, Final

import numpy as np

from radixkv.kvcache import BlockStored, CacheManager, EventBatch, HostConfig
from radixkv.kvcache.errors import OutOfBlocksError
from radixkv.kvcache.events import hash_blocks
from radixkv.scheduler.handoff.gateway_messages import MAX_UPDATE_BLOCKS, NodeStatus
from radixkv.spec.harness.events import check_index

BLOCK_SIZE: Final = 2
NUM_BLOCKS: Final = 12
HOST_BLOCKS: Final = 6
NAMESPACES: Final = (b"", b"tenant")
SILENCE_S: Final = 5.0


def load(name: str) -> Any:
    """Return a module of the scheduler or of a copy with a bug."""
    return importlib.import_module(name)


@dataclass
class Node:
    """A node's cache and its end of the index."""

    manager: CacheManager
    reporter: Any
    status: NodeStatus
    epoch: int
    outbox: list[Any] = field(default_factory=list)


class IndexWorld:
    """Serves random prompts on two nodes, and loses messages in both directions."""

    def __init__(self, handoff: ModuleType, seed: int) -> None:
        package = handoff.__name__.removesuffix(".handoff")
        self.random = Random(seed)
        self.index_module = load(f"{package}.gateway.cache_index")
        self.gateway_module = load(f"{package}.gateway.network_gateway")
        self.messages = load(f"{package}.handoff.gateway_messages")
        self.loss = self.random.choice([0.0, 0.1, 0.4])
        self.index_module.MAX_UPDATE_BLOCKS = self.random.choice([2, 5, 100])
        self.now = 0.0
        self.epoch = 0
        self.prompts: list[tuple[bytes, list[int]]] = []
        self.nodes: dict[str, Node] = {}
        self.gateway: Any = None
        self.start_gateway()
        for name in ("prefill-0", "decode-0"):
            self.start_node(name)

    def start_gateway(self) -> None:
        self.gateway = self.gateway_module.NetworkGateway(silence_s=SILENCE_S)

    def start_node(self, name: str) -> None:
        """Start a node, or another process of it, with an empty cache."""
        self.epoch += 1
        host = HostConfig(HOST_BLOCKS, self.random.choice(["back", "through"]))
        reporter = self.index_module.CacheReporter()
        if self.random.random() < 0.5:  # few are kept, so that replays fail
            reporter._kept = self.index_module.ReplayBuffer(2)
        self.nodes[name] = Node(
            CacheManager(NUM_BLOCKS, BLOCK_SIZE, host=host, record_events=True),
            reporter,
            self.messages.NodeStatus(
                name.split("-")[0], "127.0.0.1:1", "jax", BLOCK_SIZE, NUM_BLOCKS, "m"
            ),
            self.epoch,
        )

    # Operations

    def step(self) -> None:
        name = self.random.choice(list(self.nodes))
        node = self.nodes[name]
        match self.random.choices(
            ["serve", "evict", "reset", "restart", "gateway", "status"], [12, 3, 1, 0.3, 0.3, 6]
        )[0]:
            case "serve":
                self.serve(node.manager)
            case "evict":
                node.manager.evict(self.random.randint(1, 4))
            case "reset":
                node.manager.reset(keep=[b"tenant"] if self.random.random() < 0.5 else [])
            case "restart":
                self.start_node(name)
            case "gateway":
                self.start_gateway()
            case "status":
                self.tell(name, is_status=True)
        self.complete(node.manager, self.random.random())
        if self.random.random() < 0.8:
            self.tell(name, is_status=False)

    def serve(self, manager: CacheManager) -> None:
        tokens = [self.random.randint(0, 1) for _ in range(BLOCK_SIZE * self.random.randint(1, 5))]
        namespace = self.random.choice(NAMESPACES)
        try:
            lease = manager.admit(manager.match(tokens, namespace))
        except OutOfBlocksError:
            return
        self.complete(manager, 1.0)  # a load from the host
        if self.random.random() < 0.9:
            manager.publish(lease, tokens)
            self.prompts.append((namespace, tokens))
        manager.release(lease)

    def complete(self, manager: CacheManager, chance: float) -> None:
        """End some of the copies between the tiers."""
        assert manager.tiers is not None
        for operation in manager.tiers.take_operations():
            good = self.random.random() < 0.8 or chance == 1.0
            manager.tiers.complete(operation.id, [good] * max(len(operation.sources), 1))

    # The network

    def tell(self, name: str, *, is_status: bool) -> None:
        """Let a node send what it has, and the gateway answer."""
        node = self.nodes[name]
        while (batch := node.manager.take_events()) is not None:
            node.reporter.take_in(batch)
        messages = list(node.reporter.take_messages())
        if is_status:
            fields = {"num_updates": node.reporter.num_updates}
            messages.append(replace(node.status, **fields))
        for message in messages:
            if self.random.random() >= self.loss:
                self.gateway.receive(name, node.epoch, message, self.now)
        for action in self.gateway.take_actions():
            message = getattr(action, "message", None)
            if isinstance(message, self.messages.CacheAsk) and self.random.random() >= self.loss:
                node.reporter.answer(message)

    def settle(self) -> None:
        """Lose nothing until two statuses and what they ask for have come."""
        self.loss = 0.0
        for name, node in self.nodes.items():
            self.complete(node.manager, 1.0)
            for _ in range(3):
                self.tell(name, is_status=True)

    def check(self) -> None:
        """Compare the index of each node with its manager."""
        router = self.gateway._gateway._router
        for name, node in self.nodes.items():
            index = router._node(name).index
            stats = node.manager.stats()
            assert stats.tiers is not None
            found: dict[str, list[int]] = {"GPU": []}
            for namespace, tokens in self.prompts:
                match = node.manager.match(tokens, namespace)
                hashes = hash_blocks(np.array(tokens, np.int32), BLOCK_SIZE, namespace)
                found["GPU"] += hashes[: match.num_blocks]
                if index is not None:
                    wanted = match.num_blocks + match.num_host_blocks
                    assert index.num_leading(hashes) == wanted
            check_index(
                {} if index is None else index.held,
                {"GPU": stats.cached_blocks, "CPU": stats.tiers.host_cached_blocks},
                found,
            )


def check_repeats(handoff: ModuleType) -> None:
    """Updates that come again change nothing, and lead to no others."""
    package = handoff.__name__.removesuffix(".handoff")
    module = load(f"{package}.gateway.cache_index")
    reporter, index = module.CacheReporter(), module.CacheIndex()
    updates = []
    for name in (1, 2):
        stored = BlockStored("CPU", (name,), None, np.zeros(1, np.int32), 1, b"")
        reporter.take_in(EventBatch(0, (stored,)))
        updates += reporter.take_messages()
    for update in (*updates, updates[0]):
        assert index.apply(update)
    assert (index.held["CPU"], index.next_number) == ({1, 2}, 2)


def run_index(handoff: ModuleType, seed: int, num_steps: int = 60) -> None:
    """Run a world of a seed; raise a Violation of K9 if an index differs from its manager."""
    world = IndexWorld(handoff, seed)
    try:
        for _ in range(num_steps):
            world.step()
            if world.random.random() < 0.05:
                loss = world.loss
                world.settle()
                world.check()
                world.loss = loss
        world.settle()
        world.check()
    finally:
        world.index_module.MAX_UPDATE_BLOCKS = MAX_UPDATE_BLOCKS
