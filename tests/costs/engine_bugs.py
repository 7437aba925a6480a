"""Planted bugs of engines, nodes, transports and the channel: walks, what is kept, and waits."""

from __future__ import annotations

from typing import Final

from .planting import Bug, bug
from .work_bugs import then

DRIVER: Final = "kvcache.copies.tier_driver"
IN_FLIGHT: Final = "kvcache.copies.in_flight"
STORAGE_COPIES: Final = "kvcache.copies.storage_copies"
ENGINE: Final = "scheduler.engine.engine"
RUNNER: Final = "scheduler.engine.model_runner"
COPIES: Final = "scheduler.engine.tier_copies"
NODE: Final = "scheduler.nodes.node"
LOOP: Final = "scheduler.nodes.event_loop"
REMOTE: Final = "scheduler.nodes.remote_nodes"
SENDER: Final = "scheduler.nodes.kv_sender"
RECEIVER: Final = "scheduler.nodes.kv_receiver"
REPORTER: Final = "scheduler.gateway.node_reporter"
IN_PROCESS: Final = "scheduler.nodes.transport.in_process"
THREADED: Final = "scheduler.nodes.transport.threaded"
TRANSFERS: Final = "scheduler.nodes.transport.transfer_table"
CODEC: Final = "scheduler.nodes.channel.codec"
CHANNEL: Final = "scheduler.nodes.channel.zmq_channel"
GATE: Final = "scheduler.nodes.channel.gate"
JAX: Final = "scheduler.nodes.transport.jax_engine"
NIXL: Final = "scheduler.nodes.transport.nixl_engine"
AGENT: Final = "scheduler.nodes.transport.nixl_agent"

IDLE: Final = "any(node is None for node in self.manager._tree.nodes())"


def kept(name: str, module: str, line: str, what: str) -> Bug:
    """Write a bug that keeps something for ever, after a line."""
    return then(name, module, line, f"self.__dict__.setdefault('_past', []).append({what})")


WALKS: Final[dict[str, tuple[Bug, ...]]] = {
    "the engine with idle blocks": (
        then("a step of the engine looks at the tree", ENGINE,
             "        self._runner.collect()", IDLE),
        then("a request is compared with the tree", RUNNER,
             "        vocab_size = self.model.config.vocab_size", IDLE),
        then("the dispatch of a step lists the tree", RUNNER,
             "        slots = self._batch.send(plan, tables)", "list(self.manager._tree.nodes())"),
        then("the end of a step looks at idle nodes", ENGINE,
             "        self._advanced += plan.requests",
             "sum(each.num_blocks for each in self.manager._tree.idle_nodes())"),
        then("copies are collected after a look at the host", COPIES,
             '        """Report completions and fences to the manager."""',
             "any(each is None for each in self._tiers.state.tree.nodes())"),
        bug("has_work looks at the tree", ENGINE,
            ("        return self.scheduler.has_work or bool(self._finished)\n",
             f"        {IDLE}\n        return self.scheduler.has_work or bool(self._finished)\n")),
    ),
    "the engine after requests": (
        then("a step looks at all earlier ones", RUNNER,
             "        self._steps += 1", "[each for each in range(self._steps)]"),
        then("a read looks at all earlier steps", ENGINE,
             "        self._finished += self.scheduler.update(plan, next_tokens)",
             "[each for each in range(self._runner._steps)]"),
    ),
    "the tier driver after operations": (
        then("an operation is compared with all earlier ones", IN_FLIGHT,
             "        entry = InFlightOperation(operation, deadline, "
             "[nothing] * operation.num_blocks)", "[each for each in range(operation.id)]"),
        then("a poll of the driver looks at what has ended", DRIVER,
             "        self._collect_writes()",
             "[each for each in range(self._table.operations.total())]"),
        then("storage is asked about what has ended", STORAGE_COPIES,
             "        for completion in self._storage.poll():",
             "    [each for each in range(completion.operation)]"),
    ),
    "the tier driver with operations": (
        bug("an operation is looked for in a new table", IN_FLIGHT,
            ("operation.id not in self.open and operation.id not in self.unfenced\n",
             "operation.id not in self.open | self.unfenced\n")),
        then("a cancellation lists what is open", DRIVER,
             "            self._table.retract(op_id)", "[each for each in self._table.open]"),
        then("a touch looks at all entries", STORAGE_COPIES,
             "        if len(self._touches) < _MAX_TOUCHES:",
             "    [each for each in self._entries.values() if each is None]"),
    ),
    "nodes with idle blocks": (
        then("a poll of a node looks at the tree", NODE,
             "        events = self._transport.poll()", IDLE),
        then("a node's load is counted", NODE,
             "        scheduler, counts = self.scheduler, self.scheduler.stats()", IDLE),
        then("a node's loop lists the tree", LOOP,
             "        self._reporter.tick(now)", "list(self._engine.manager._tree.nodes())"),
    ),
    "nodes after requests": (
        then("a node's step looks at all earlier ones", NODE,
             "            self._num_started += 1",
             "[each for each in range(self._num_started)]"),
        then("received parts are counted", RECEIVER,
             "        pull = self._pulls.pop(event.part_id)",
             "[each for each in range(num_started)]"),
        then("the gateway counts its messages", REMOTE,
             "        self._advanced = self._gateway.take_advanced()",
             "[each for each in range(self._channel._sequence)]"),
        then("a frame is compared with all earlier ones", CODEC,
             "        now = self._clock()", "[each for each in range(packet.sequence)]"),
    ),
    "the transport after transfers": (
        then("a step visits the parts that have arrived", TRANSFERS,
             "        pulls = list(self._pulls.items())",
             "[each for each in range(self.parts_received)]"),
        then("a poll of the transport counts failures", THREADED,
             "            crash = self._crash",
             "[each for each in range(self._table.faults.total())]"),
    ),
    "the transport of a process after transfers": (
        then("a poll in a process counts the parts", IN_PROCESS,
             "        self._events = []",
             "[each for each in range(self._parts_received)]"),
    ),
    "the gate with connections": (
        then("a turn looks at all connections", GATE,
             "        is_called = False", "[each for each in self._proven if not each.is_open]"),
        then("a word is looked for among the proven", GATE,
             "        limit = _CHUNK_BYTES", "sorted(each.since for each in self._proven)"),
    ),
    "the channel with peers": (
        then("a message looks at all peers", CHANNEL,
             "        to = self._peers[peer]", "[each.address for each in self._peers.values()]"),
        then("a peer is looked for among all", CHANNEL,
             "        check_target(address)", "[each for each in self._peers if each == peer]"),
        bug("the peers are counted one by one", CHANNEL,
            ("        return len(self._peers) < self._max_peers\n",
             "        return sum(1 for _ in self._peers) < self._max_peers\n")),
    ),
    "the jax engine with idle connections": (
        bug("connections are counted one by one", JAX,
            ("        return len(self._idle)\n", "        return sum(1 for _ in self._idle)\n")),
        then("an idle connection is looked for", JAX,
             "        self._idle.append(connection)",
             "[each for each in self._idle if each is connection]"),
    ),
    "the nixl engine with parts": (
        then("offers are looked at in each turn", NIXL,
             "        for confirmation in self._agent.take_notifications():",
             "    [each for each in self._unconfirmed.values() if each.is_read]"),
        then("an offer is compared with those that are not confirmed", NIXL,
             "            offer = NixlOffer(self, slot, confirmation)",
             "any(each == confirmation for each in self._unconfirmed)"),
    ),
}  # fmt: skip

KEPT: Final[dict[str, tuple[Bug, ...]]] = {
    "engine": (
        kept("plans of the engine are kept", ENGINE,
             "        next_tokens, plan = self._runner.read(), self._in_flight.popleft()", "plan"),
        kept("a name per request of the engine is kept", ENGINE,
             "        self._runner.check_request(request)", "request.request_id"),
        kept("requests that advanced are kept", ENGINE,
             "        self._advanced += plan.requests", "plan.requests"),
        kept("events of the engine are kept", ENGINE,
             "        batch = self.manager.take_events()", "batch"),
        kept("the tokens of each step are kept", RUNNER,
             "        results = self._results[0]", "results"),
        kept("the requests of slots are kept", "scheduler.engine.batch_state",
             "            row = rows.item(index)", "request"),
        kept("names of aborted requests are kept", ENGINE,
             '        """End a request in any state; return False if no active request has this '
             'id."""', "request_id"),
    ),
    "tier driver": (
        kept("operations that have ended are kept by the driver", IN_FLIGHT,
             "        kind = entry.operation.kind", "entry"),
        kept("fenced operations are kept", IN_FLIGHT,
             "        fenced, self._fenced = self._fenced, []", "tuple(fenced)"),
        kept("storage operations that have ended are kept", STORAGE_COPIES,
             "                del self._entries[storage_id]", "storage_id"),
        bug("touches that have ended are kept", STORAGE_COPIES,
            ("            self._touches.discard(completion.operation)\n", "")),
        kept("reports of writes are kept", "kvcache.copies.background_writer",
             "            reports, self._reports = self._reports, []", "reports"),
    ),
    "nodes": (
        kept("plans of a node are kept", NODE,
             "        next_tokens, plan = self._runner.read(), self._in_flight.popleft()", "plan"),
        kept("messages of a node are kept", NODE,
             "        messages, self._outbox = self._outbox, []", "tuple(messages)"),
        kept("a name per request of a node is kept", LOOP,
             "                    self._connect(run.decode_node, run.decode_address, now)",
             "run.key.request_id"),
        bug("offers are kept by the sender", SENDER,
            ("self._offers.pop(withdraw.key, {})", "self._offers.get(withdraw.key, {})")),
        bug("pulls are kept by the receiver", RECEIVER,
            ("self._pulls.pop(event.part_id)", "self._pulls[event.part_id]")),
        bug("attempts are remembered for ever", REPORTER,
            ("            del self._begun[key]\n", "            break\n")),
        bug("requests that have ended are kept by a node", REPORTER,
            ("            self._decoding.pop(report.key, None)\n", "")),
        bug("requests that were aborted are kept by a node", REPORTER,
            ("        else:\n            self._decoding.pop(report.key, None)\n",
             "        elif isinstance(report, DecodeFinished):\n"
             "            self._decoding.pop(report.key, None)\n")),
        bug("followed attempts are kept", "scheduler.gateway.network_gateway",
            ("                del self._followed[key]\n", "                continue\n")),
        bug("peers that are gone stay connected", LOOP,
            ("                self._channel.disconnect(peer)\n", "")),
    ),
    "transports": (
        bug("offers that were withdrawn are kept", THREADED,
            ("                self._offered = {each for each in self._offered if each.key != "
             "event.key}\n", "                pass\n")),
        bug("parts are kept after their release", TRANSFERS,
            ("        self._received.pop(part_id).free()\n",
             "        self._received[part_id].free()\n")),
        bug("parts are kept after their release in a process", IN_PROCESS,
            ("        self._received.discard(part_id)\n", "        pass\n")),
        kept("failures of pulls are kept", TRANSFERS,
             "        self.faults[failed.fault] += 1", "failed"),
        kept("attempts that were withdrawn are kept", TRANSFERS,
             "            self._withdrawn.remove(key)", "key"),
    ),
    "the jax engine": (
        kept("pulls that have arrived are kept", JAX,
             "        self._idle.append(connection)", "connection"),
        bug("broken pulls stay in quarantine", JAX,
            ("[pull for pull in self._quarantine if not pull.has_ended()]",
             "list(self._quarantine)")),
        kept("routes of peers are kept", JAX, "        route = unseal(route)", "route"),
    ),
    "the nixl engine": (
        bug("offers wait for a confirmation after their end", NIXL,
            ("        self._engine._unconfirmed.pop(self._confirmation, None)\n", "")),
        kept("pulls that have ended are kept", NIXL,
             "                self._quarantine.remove(pull)", "pull"),
        bug("peers that are gone are counted", AGENT,
            ("            del self._num_pulls[peer]\n", "")),
        bug("the reads of a part are not released", AGENT,
            ("                self.nixl.release_dlist_handle(each)\n", "                pass\n")),
    ),
    "channel": (
        kept("addresses of peers are kept", CHANNEL,
             "        known = self._peers.pop(peer, None)", "peer"),
        kept("frames are kept", CHANNEL,
             "        frame = encode_frame(packet)", "frame"),
        kept("connections that have closed are kept", GATE,
             "        connection.is_open = False", "connection"),
    ),
}  # fmt: skip

WAITS: Final[dict[str, tuple[Bug, ...]]] = {
    "the engine with idle blocks": (
        then("a step of the engine sleeps", ENGINE,
             "        self._runner.collect()", "__import__('time').sleep(0.001)"),
        then("the engine waits for copies in each step", COPIES,
             "            self._driver.dispatch(operations, arrays)",
             "self._driver._writer.wait(0.001)"),
    ),
    "the tier driver after operations": (
        then("a poll of the driver waits for a write", DRIVER,
             "        self._collect_writes()", "self._writer.wait(0.001)"),
        then("a dispatch sleeps", DRIVER,
             "        entries = [self._table.add(each, now + each.timeout_s) for each in "
             "operations]", "time.sleep(0.001)"),
        then("a storage operation is waited for", STORAGE_COPIES,
             "        self._entries[storage_id] = entry", "__import__('time').sleep(0.001)"),
    ),
    "nodes after requests": (
        then("a poll of a node sleeps", NODE,
             "        events = self._transport.poll()", "__import__('time').sleep(0.005)"),
        then("a node's loop sleeps", LOOP,
             "        packets = self._channel.receive()", "time.sleep(0.001)"),
    ),
    "the transport after transfers": (
        then("a poll of the transport waits for an event", THREADED,
             "            crash = self._crash", "self._changed.wait(0.001)"),
        then("an offer sleeps", THREADED,
             "            self._offered.add(part_id)", "time.sleep(0.001)"),
    ),
    "the transport of a process after transfers": (
        then("a poll in a process sleeps", IN_PROCESS,
             "        now = time.monotonic()", "time.sleep(0.001)"),
    ),
    "the jax engine after transfers": (
        then("a pull sleeps until it has arrived", JAX,
             "        self.num_running += 1", "time.sleep(0.001)"),
        then("a withdrawal sleeps", JAX,
             "        self._is_waiting = not was_read", "time.sleep(0.001)"),
    ),
    "the nixl engine after transfers": (
        then("a part is waited for", NIXL,
             "        self._waiting.clear()  # stops the helper",
             "__import__('time').sleep(0.001)"),
        then("a read is waited for", AGENT,
             "            state = self.nixl.check_xfer_state(handle)",
             "__import__('threading').Event().wait(0.001)"),
    ),
    "the channel with peers": (
        then("a message waits for an answer", CHANNEL,
             "        self._sent += 1", "self.wait(0.001)"),
        then("messages are waited for", CHANNEL,
             "        newcomers: set[str] = set()", "self._inbox.poll(1)"),
    ),
}  # fmt: skip
