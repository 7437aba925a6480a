"""The hand-off under every fault: nodes, network and clock as one program.

It changes by operations, which are plain data: a list of words and numbers, as JSON has them. An
operation that names something by a number takes it round what there is, and does nothing if there
is nothing: so every list of operations is a program, and one that fails may be cut anywhere.

==========================================  ====================================================
``submit prompt max_new_tokens seed``       a client's request
``cancel i``                                a client gives an unanswered request up
``deliver i``, ``duplicate i``, ``drop i``  a message that is on its way, of nodes or of the gateway
``cut i``                                   all that is on its way from and to node i is lost
``compute i``                               P plans a step, or computes a group of its layers
``decode i``                                D plans a step, or computes it
``land i``                                  bytes of a pull are written; again, if they were
``pull_end i ok fenced``                    a pull ends; well only if its bytes have landed
``pull_fence i``, ``offer_fence i``         nothing more is written by it; nothing more is served
``crash i``, ``restart i``                  node i (P first) loses all it knows; comes back
``new_gateway``                             the gateway loses all it knows; clients ask the next one
``copy i ok``                               a copy from or to a host tier ends
``evict i n``                               node i needs n blocks for something else
``drain i``                                 node i gives hand-offs up, to forget its cache
``tick n``                                  n units of time pass
==========================================  ====================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from .gateway_world import Job
from .nodes import DecodeNode, try_reset
from .world import Transfer, World

Op: TypeAlias = Sequence[Any]


class Simulation(World):
    """Nodes, what is between them, and who uses them, changed by operations."""

    def apply(self, op: Op) -> None:
        """Do one operation, and all that follows from it at once.

        Raises:
            SimulationError, AssertionError: if what must not happen has.
        """
        getattr(self, f"_op_{op[0]}")(*op[1:])
        self._act()

    # Operations: clients and the network

    def _op_submit(self, prompt: Sequence[int], max_new_tokens: int, seed: int) -> None:
        self.ask(Job(np.array(prompt, np.int32), max_new_tokens, seed))

    def _op_cancel(self, index: int) -> None:
        open_ids = [each for each in self.jobs if each not in self.answers]
        if open_ids:
            self.cancel(open_ids[index % len(open_ids)])

    def _op_deliver(self, index: int) -> None:
        if self.network:
            self._deliver(self.network.pop(index % len(self.network)))

    def _op_duplicate(self, index: int) -> None:
        if self.network:
            self._deliver(self.network[index % len(self.network)])

    def _op_drop(self, index: int) -> None:
        if self.network:
            del self.network[index % len(self.network)]

    def _op_cut(self, index: int) -> None:
        name = self._name(index)
        self.network = [each for each in self.network if name not in (each.source, each.to)]

    # Operations: the nodes

    def _name(self, index: int) -> str:
        return self.names[index % len(self.names)]

    def _op_compute(self, index: int) -> None:
        node = self.prefill(self.prefill_names[index % len(self.prefill_names)])
        if node is not None:
            node.step()

    def _op_decode(self, index: int) -> None:
        node = self.decode(self.decode_names[index % len(self.decode_names)])
        if node is not None:
            before = node.preemptions
            node.step()
            if node.preemptions > before:
                self.counts["preemptions"] += node.preemptions - before

    def _op_crash(self, index: int) -> None:
        name = self._name(index)
        if self.nodes[name] is None:
            return
        if name in self.prefill_names:
            for transfer in self.pulls:
                if transfer.pull.peer == name:
                    transfer.on_the_way = self._source_tags(transfer)
        else:  # its memory is no longer registered
            self.pulls = [transfer for transfer in self.pulls if transfer.node != name]
        self.nodes[name] = None
        self.draining.discard(name)

    def _op_restart(self, index: int) -> None:
        name = self._name(index)
        if self.nodes[name] is None:
            self.nodes[name] = self._node(name)
            self.say_alive(name)

    def _op_new_gateway(self) -> None:
        self.open_gateway()

    def _op_evict(self, index: int, num_blocks: int) -> None:
        node = self.nodes[self._name(index)]
        if node is not None:
            node.manager.evict(num_blocks)

    def _op_drain(self, index: int) -> None:
        name = self._name(index)
        node = self.nodes[name]
        if node is not None:
            node.scheduler.drain("the weights change")
            self.draining.add(name)

    def _op_tick(self, ticks: int) -> None:
        self.now += ticks
        self.gateway.tick(self.now)
        for name, node in self.nodes.items():
            if node is not None:
                node.scheduler.tick(self.now)
                node.reporter.tick(self.now)
                self.say_alive(name)
                if name in self.draining and try_reset(node):
                    self.draining.remove(name)
                    self.counts["resets"] += 1

    # Operations: transfers

    def _op_copy(self, index: int, ok: bool) -> None:
        flying = [
            (node.copies, place)
            for node in self.nodes.values()
            if node is not None
            for place in range(len(node.copies.flying))
        ]
        if flying:
            copies, place = flying[index % len(flying)]
            copies.end(place, ok)
            self.counts["copies"] += 1

    def _op_land(self, index: int) -> None:
        transfer = self._pull(index)
        if transfer is None:
            return
        tags = self._source_tags(transfer)
        if tags is None:
            return
        memory = self._puller(transfer).memory
        for block, tag in zip(transfer.pull.blocks, tags, strict=True):
            memory.tags[block, transfer.pull.group] = tag
        transfer.landed = True

    def _op_pull_end(self, index: int, ok: bool, fenced: bool) -> None:
        transfer = self._pull(index)
        if transfer is None or transfer.ended or (ok and not transfer.landed):
            return
        if ok or fenced:
            self.pulls.remove(transfer)
        transfer.ended = transfer.may_fence = True
        scheduler, ticket = self._puller(transfer).scheduler, transfer.pull.ticket
        if ok:
            scheduler.pulled(ticket)
        else:
            scheduler.pull_failed(ticket, fenced=fenced, reason="it was lost")

    def _op_pull_fence(self, index: int) -> None:
        transfer = self._pull(index)
        if transfer is not None and transfer.may_fence:
            self.pulls.remove(transfer)
            self._puller(transfer).scheduler.pull_fenced(transfer.pull.ticket)

    def _op_offer_fence(self, index: int) -> None:
        waiting = [
            (node, key)
            for node in map(self.prefill, self.prefill_names)
            if node is not None
            for key in node.withdrawn
        ]
        if waiting:
            node, key = waiting[index % len(waiting)]
            node.fence(key)

    def _puller(self, transfer: Transfer) -> DecodeNode:
        node = self.decode(transfer.node)
        assert node is not None, "a pull of a node that has crashed"
        return node

    def _pull(self, index: int) -> Transfer | None:
        return self.pulls[index % len(self.pulls)] if self.pulls else None
