"""The hand-off under every fault: both nodes, the network and the clock as one program.

It changes by operations, which are plain data: a list of words and numbers, as JSON has them. An
operation that names something by a number takes it round what there is, and does nothing if there
is nothing: so every list of operations is a program, and one that fails may be cut anywhere.

==========================================  ====================================================
``submit prompt max_new_tokens seed``       a client's request
``cancel i``                                a client gives an unanswered request up
``deliver i``, ``duplicate i``, ``drop i``  a message that is on its way
``report i``                                what node i says to the front desk arrives
``compute i``                               P computes one group of layers of one chunk
``decode i``                                D decodes one token
``land i``                                  bytes of a pull are written; again, if they were
``pull_end i ok fenced``                    a pull ends; well only if its bytes have landed
``pull_fence i``, ``offer_fence i``         nothing more is written by it; nothing more is served
``crash i``, ``restart i``                  node i (0: P, 1: D) loses all it knows; comes back
``evict i n``                               node i needs n blocks for something else
``tick n``                                  n units of time pass
==========================================  ====================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from ...kvcache import OutOfBlocksError
from .messages import Message
from .nodes import DecodeNode, PrefillNode
from .world import Job, Transfer, World

Op: TypeAlias = Sequence[Any]


class Simulation(World):
    """P, D, what is between them, and who uses them, changed by operations."""

    def apply(self, op: Op) -> None:
        """Do one operation, and all that follows from it at once.

        Raises:
            SimulationError, AssertionError: if what must not happen has.
        """
        getattr(self, f"_op_{op[0]}")(*op[1:])
        self._act()

    # Operations: clients and the network

    def _op_submit(self, prompt: Sequence[int], max_new_tokens: int, seed: int) -> None:
        request_id = f"r{len(self.jobs) + 1}"
        self.jobs[request_id] = Job(np.array(prompt, np.int32), max_new_tokens, seed)
        self.front.submit(request_id)
        self.front.tick(self.now)

    def _op_cancel(self, index: int) -> None:
        open_ids = [each for each in self.jobs if each not in self.answers]
        if open_ids:
            self.front.cancel(open_ids[index % len(open_ids)])

    def _op_deliver(self, index: int) -> None:
        if self.network:
            self._deliver(self.network.pop(index % len(self.network)))

    def _op_duplicate(self, index: int) -> None:
        if self.network:
            self._deliver(self.network[index % len(self.network)])

    def _op_drop(self, index: int) -> None:
        if self.network:
            del self.network[index % len(self.network)]

    def _deliver(self, item: tuple[int, Message]) -> None:
        node = (self.prefill, self.decode)[item[0]]
        if node is not None:
            self.counts[type(item[1]).__name__] += 1
            node.side.receive(item[1])

    def _op_report(self, index: int) -> None:
        if self.reports[index]:
            self.reports[index].pop(0)()

    # Operations: the nodes

    def _op_compute(self, index: int) -> None:
        keys = self.prefill.computable() if self.prefill is not None else []
        if self.prefill is not None and keys:
            self.prefill.compute(keys[index % len(keys)])

    def _op_decode(self, index: int) -> None:
        node = self.decode
        if node is None or not node.running:
            return
        key = list(node.running)[index % len(node.running)]
        try:
            tokens = node.decode(key)
        except OutOfBlocksError as short:
            reason = str(short)
            self.reports[1].append(lambda: self.front.decode_failed(key, reason))
            return
        if tokens is not None:
            done = tokens
            self.reports[1].append(lambda: self.front.finished(key, done))

    def _op_crash(self, index: int) -> None:
        if index == 0 and self.prefill is not None:
            for transfer in self.pulls:
                transfer.on_the_way = self._source_tags(transfer)
            self.prefill = None
            self.reports[0].append(self.front.prefill_lost)
        elif index == 1 and self.decode is not None:
            self.decode = None
            self.pulls.clear()  # its memory is no longer registered
            self.reports[1].append(self.front.decode_lost)

    def _op_restart(self, index: int) -> None:
        if (self.prefill, self.decode)[index] is not None:
            return
        self.epochs[index] += 1
        if index == 0:
            self.prefill = PrefillNode(self.config, self.epochs[0], self.now)
        else:
            self.decode = DecodeNode(self.config, self.epochs[1], self.now)

    def _op_evict(self, index: int, num_blocks: int) -> None:
        node = (self.prefill, self.decode)[index]
        if node is not None:
            node.manager.evict(num_blocks)

    def _op_tick(self, ticks: int) -> None:
        self.now += ticks
        self.front.tick(self.now)
        for node in (self.prefill, self.decode):
            if node is not None:
                node.side.tick(self.now)

    # Operations: transfers

    def _op_land(self, index: int) -> None:
        transfer = self._pull(index)
        tags = self._source_tags(transfer) if transfer is not None else None
        if transfer is None or tags is None or self.decode is None:
            return
        for block, tag in zip(transfer.pull.blocks, tags, strict=True):
            self.decode.memory.tags[block, transfer.pull.group] = tag
        transfer.landed = True

    def _op_pull_end(self, index: int, ok: bool, fenced: bool) -> None:
        transfer = self._pull(index)
        if transfer is None or transfer.ended or self.decode is None:
            return
        ticket = transfer.pull.ticket
        if ok and not transfer.landed:
            return
        if ok or fenced:
            self.pulls.remove(transfer)
        transfer.ended = transfer.may_fence = True
        if ok:
            self.decode.side.pulled(ticket)
        else:
            self.decode.side.pull_failed(ticket, fenced=fenced)

    def _op_pull_fence(self, index: int) -> None:
        transfer = self._pull(index)
        if transfer is not None and transfer.may_fence and self.decode is not None:
            self.pulls.remove(transfer)
            self.decode.side.pull_fenced(transfer.pull.ticket)

    def _op_offer_fence(self, index: int) -> None:
        if self.prefill is not None and self.prefill.withdrawn:
            keys = self.prefill.withdrawn
            self.prefill.fence(keys[index % len(keys)])

    def _pull(self, index: int) -> Transfer | None:
        return self.pulls[index % len(self.pulls)] if self.pulls else None
