"""The world of a hand-off: its operations, each on things with names.

==============================================  ================================================
``submit r1 prompt max_new_tokens seed``        a client submits a request
``cancel r1``                                   a client cancels an unanswered request
``deliver m``, ``duplicate m``, ``drop m``      a message in the network arrives, arrives and
                                                stays, or is lost
``cut p0``                                      all messages from and to a node are lost
``compute p0``                                  P plans a step, or computes a group of its layers
``decode d0``                                   D plans a step, or computes it
``pull_write t``                                the bytes of a pull are written, maybe again
``pull_end t ok fenced``                        a pull ends; well only if its bytes are written
``pull_fence t``, ``offer_fence attempt``       a pull can no longer write; an offer is withdrawn
``crash p0``, ``restart p0``                    a node loses its memory; it comes back
``new_gateway``                                 the gateway loses its memory; clients ask again
``copy c ok``                                   a copy from or to a host tier ends
``evict p0 n``                                  a node evicts n blocks
``reset p0``                                    a node gives hand-offs up and resets its cache
``tick n``                                      n units of time pass
``drain``                                       the faults stop until everything has ended
==============================================  ================================================

The world names a message, a pull or a copy after its attempt or node. If an operation is left out
of a program, the names of the others therefore stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol, TypeVar

from ...adapters.handoff import Chunk, HandoffFactory
from ...model.handoff import DecodeModel, Outcome, PrefillModel, Request, Tokens, next_token
from ...rules.handoff import X11
from ...rules.rule import require
from ..engine import Below, Config, Operation
from .drain import drain
from .draw import OPERATIONS, draw, draw_config, weights_of
from .events import carry_out, deliver, publish, send_status, settle
from .state import Envelope, HandoffState, LiveNode, Transfer

OPS_PER_CHECK: Final = 32
"""Operations between two checks of all caches."""


class _Named(Protocol):
    name: str


Thing = TypeVar("Thing", bound=_Named)


class HandoffWorld(HandoffState):
    """Prefill and decode nodes, a gateway, and the network between them."""

    def __init__(self, config: Config, factory: HandoffFactory) -> None:
        super().__init__(config, factory)
        self.weights = weights_of(config)
        self._num_operations = 0
        for node in self.live():
            send_status(self, node)
        while self.network:
            deliver(self, self.network.pop())

    def draw(self, below: Below) -> Operation:
        """Draw an operation that applies now."""
        return draw(self, below)

    def apply(self, operation: Operation) -> bool:
        """Do one operation and all that follows; False if it does not apply."""
        word, *arguments = operation
        assert word in OPERATIONS, f"{word!r} is no operation"
        method: Callable[..., bool] = getattr(self, word)
        for node in self.live():
            node.has_evicted = False
        if not method(*arguments):
            return False
        carry_out(self)
        self.in_tick = False
        self._num_operations += 1
        if self._num_operations % OPS_PER_CHECK == 0:
            self.check_caches()
        return True

    def picture(self) -> str:
        """Draw the requests, the nodes and the network as text."""
        lines = []
        for name, request in self.requests.items():
            state = (
                "answered" if name in self.model.answers else f"open, {sorted(request.attempts)}"
            )
            lines.append(f"{name} {list(request.prompt)} + {request.max_new_tokens}, {state}")
        for name, node in self.nodes.items():
            if node is None:
                lines.append(f"{name} has crashed")
                continue
            counts = node.system.counts()
            step = ", in a step" if node.is_stepping else ""
            waits = f", waits to withdraw {node.withdrawn}" if node.withdrawn else ""
            used = counts.num_blocks - counts.available
            lines.append(f"{name} uses {used} of {counts.num_blocks} blocks{step}{waits}")
        lines += [
            f"pull {each.name} from {each.peer} into blocks {each.blocks} of {each.node}"
            for each in self.transfers
        ]
        lines += [
            f"message {each.name} to {each.to}" for each in self.network if not each.is_status
        ]
        return "\n".join(lines)

    # Clients, gateway and network: each operation returns whether it applied

    def submit(self, name: str, prompt: Sequence[int], max_new_tokens: int, seed: int) -> bool:
        """A client submits a request."""
        if name in self.requests or not prompt or max_new_tokens < 1:
            return False
        self.requests[name] = Request(tuple(prompt), max_new_tokens, seed)
        self._add_request(name)
        self.gateway.tick(self.now)
        return True

    def _add_request(self, name: str) -> None:
        config, request = self.config, self.requests[name]
        most = self.block_size * min(config["prefill_blocks"], config["decode_blocks"])
        deadline = self.now + config["request_s"]
        self.model.submitted(name, deadline, is_hopeless=len(request.prompt) > most)
        self.gateway.submit(name, request.prompt, request.max_new_tokens, request.seed)

    def cancel(self, name: str) -> bool:
        """A client cancels a request."""
        if name not in self.model.open():
            return False
        self.gateway.cancel(name)
        self.model.answers[name] = Outcome(None, "cancelled by the client")
        return True

    def new_gateway(self) -> bool:
        """A gateway without memory takes the place of the present one; clients ask again."""
        self.gateway = self.new_gateway_side()
        for name in self.model.open():
            self._add_request(name)
        return True

    def deliver(self, name: str) -> bool:
        """A message arrives."""
        envelope = _find(self.network, name)
        if envelope is not None:
            self.network.remove(envelope)
            deliver(self, envelope)
        return envelope is not None

    def duplicate(self, name: str) -> bool:
        """A message arrives, and stays in the network."""
        envelope = _find(self.network, name)
        if envelope is not None:
            deliver(self, envelope)
        return envelope is not None

    def drop(self, name: str) -> bool:
        """A message is lost."""
        envelope = _find(self.network, name)
        if envelope is not None:
            self.network.remove(envelope)
        return envelope is not None

    def cut(self, name: str) -> bool:
        """All messages from and to a node are lost."""
        before: list[Envelope] = self.network
        self.network = [each for each in before if name not in (each.source, each.to)]
        return len(self.network) < len(before)

    # Steps of nodes

    def compute(self, name: str) -> bool:
        """P plans a step, or computes one group of layers of the planned one."""
        node = self.nodes.get(name)
        if node is None or not isinstance(node.model, PrefillModel):
            return False
        target, model = node.target, node.model
        if not node.is_stepping:
            self._plan(node)
            for chunk in target.chunks():
                model.computes(chunk.name, chunk.start)
            model.counted(target.counts().hits)
            return True
        chunks = target.chunks()
        self._write(node, node.num_written)
        node.num_written += 1
        if node.num_written < self.num_groups:
            target.wrote(node.num_written - 1)
            return True
        owned: list[
            Chunk
        ] = []  # P postpones the publication of what D may read and the tree has partly
        for chunk in chunks:
            model.computed[chunk.name] += chunk.stop - chunk.start
            has_offers = any(each[0] == chunk.name for each in model.offers.values())
            num_cached = target.num_cached(chunk.tokens[: chunk.stop])
            is_first = num_cached <= chunk.num_shared * self.block_size
            if self.num_groups == 1 or not has_offers or is_first:
                owned.append(chunk)
        self._end_step(node)
        for chunk in owned:
            publish(node, chunk.tokens[: chunk.stop])
        return True

    def decode(self, name: str) -> bool:
        """D plans a step, or computes it."""
        node = self.nodes.get(name)
        if node is None or not isinstance(node.model, DecodeModel):
            return False
        if not node.is_stepping:
            self._plan(node)
            return True
        for group in range(self.num_groups):
            self._write(node, group)
        chunks = node.target.chunks()
        self._end_step(node)
        for chunk in chunks:
            if not chunk.is_aborted:
                publish(node, chunk.tokens[: chunk.stop])
        return True

    def _plan(self, node: LiveNode) -> None:
        plan = node.target.schedule()
        published = node.model.published
        settle(node)
        for name, tokens, num_hit in plan.admitted:
            if isinstance(node.model, PrefillModel):
                node.model.admitted(name, tokens)
            published.hit(tokens, num_hit, name)
        if plan.preempted:
            self.situations["preemptions"] += len(plan.preempted)
            may = self.config["reserve_tokens"] is not None
            require(may, X11, "{} preempts {}", node.name, plan.preempted)
        node.is_stepping, node.num_written = plan.num_chunks > 0, 0

    def _write(self, node: LiveNode, group: int) -> None:
        """Compute one group of layers of a step."""
        device = node.model.device
        for chunk in node.target.chunks():
            device.read(chunk.table, chunk.tokens[: chunk.start], group, chunk.name)
            tokens = chunk.tokens[: chunk.stop]
            device.write(chunk.table, chunk.num_shared, tokens, chunk.start, group)

    def _end_step(self, node: LiveNode) -> None:
        node.is_stepping = False
        node.target.update(
            [
                next_token(chunk.seed, chunk.tokens) if chunk.stop == len(chunk.tokens) else -1
                for chunk in node.target.chunks()
            ]
        )

    # The life of nodes, and the clock

    def crash(self, name: str) -> bool:
        """A node loses its memory."""
        node = self.nodes.get(name)
        if node is None:
            return False
        if isinstance(node.model, PrefillModel):
            for transfer in self.transfers:
                if transfer.peer == name:
                    transfer.crashed_source = self._source(transfer)
        else:  # its memory is no longer registered
            self.transfers = [each for each in self.transfers if each.node != name]
        self.nodes[name] = None
        return True

    def restart(self, name: str) -> bool:
        """A crashed node comes back."""
        if self.nodes.get(name, ...) is not None:
            return False
        self.nodes[name] = node = self.new_node(name)
        send_status(self, node)
        return True

    def evict(self, name: str, num_blocks: int) -> bool:
        """A node evicts blocks."""
        node = self.nodes.get(name)
        if node is not None:
            node.target.evict(num_blocks)
        return node is not None

    def reset(self, name: str) -> bool:
        """A node gives hand-offs up, and resets its cache as soon as none is open."""
        node = self.nodes.get(name)
        if node is not None:
            node.target.drain()
            node.is_draining = True
        return node is not None

    def tick(self, ticks: int) -> bool:
        """Time passes."""
        self.now += ticks
        self.in_tick = True
        self.gateway.tick(self.now)
        for node in self.live():
            node.target.tick(self.now)
            send_status(self, node)
            if node.is_draining and node.target.reset():
                node.is_draining = False
                node.model.reset(node.target.num_evicted())
                self.situations["resets"] += 1
        return True

    # Transfers

    def copy(self, name: str, ok: bool) -> bool:
        """A copy between tiers ends; if ok, its destinations are written."""
        node = next((each for each in self.live() if name in each.copies), None)
        if node is None:
            return False
        copy, content = node.copies[name].copy, node.copies.pop(name).content
        if ok:
            memory = node.model.host if copy.is_down else node.model.device
            memory.content.update(content)
        node.target.copied(copy.id, ok)
        self.situations["copies"] += 1
        return True

    def pull_write(self, name: str) -> bool:
        """The bytes of a pull are written."""
        transfer = _find(self.transfers, name)
        content = None if transfer is None else self._source(transfer)
        if transfer is None or content is None:
            return False
        device = self._puller(transfer).model.device
        device.put(transfer.blocks, transfer.group, content)
        transfer.written = True
        return True

    def pull_end(self, name: str, ok: bool, fenced: bool) -> bool:
        """A pull ends; one that is not fenced may still write."""
        transfer = _find(self.transfers, name)
        if transfer is None or transfer.ended or (ok and not transfer.written):
            return False
        if ok or fenced:
            self.transfers.remove(transfer)
        transfer.ended = transfer.may_fence = True
        target = self._puller(transfer).target
        if ok:
            target.pulled(transfer.part)
        else:
            target.pull_failed(transfer.part, fenced)
        return True

    def pull_fence(self, name: str) -> bool:
        """A pull that has ended or was cancelled writes no more."""
        transfer = _find(self.transfers, name)
        if transfer is None or not transfer.may_fence:
            return False
        self.transfers.remove(transfer)
        self._puller(transfer).target.pull_fenced(transfer.part)
        return True

    def offer_fence(self, attempt: str) -> bool:
        """P serves the offers of a withdrawn attempt no more."""
        node = next((each for each in self.live() if attempt in each.withdrawn), None)
        if node is None:
            return False
        assert isinstance(node.model, PrefillModel), f"{node.name} withdraws offers"
        node.withdrawn.remove(attempt)
        node.model.fenced(attempt)
        node.target.fenced(attempt)
        return True

    def _puller(self, transfer: Transfer) -> LiveNode:
        node = self.nodes[transfer.node]
        assert node is not None, "a pull of a node that has crashed"
        return node

    def _source(self, transfer: Transfer) -> list[Tokens] | None:
        """Return the contents of P's blocks for a pull; None if P does not serve them."""
        node = self.nodes[transfer.peer]
        if node is None or transfer.crashed_source is not None:
            return transfer.crashed_source
        assert isinstance(node.model, PrefillModel), f"{node.name} serves"
        return node.model.served(transfer.part.key)

    # The end

    def drain(self) -> bool:
        """The faults stop; everything ends, and the nodes are emptied."""
        drain(self, self.apply)
        return True


def _find(things: Iterable[Thing], name: str) -> Thing | None:
    return next((each for each in things if each.name == name), None)


class HandoffSubject:
    """A hand-off to test, in worlds of all sizes.

    Args:
        factory: makes the nodes and the gateway from a configuration.

    Attributes:
        steps_per_case: enough for a dozen requests.
    """

    steps_per_case = 150

    def __init__(self, factory: HandoffFactory) -> None:
        self.factory = factory

    def configure(self, below: Below) -> Config:
        """Draw the sizes and options of a world."""
        return draw_config(below)

    def world(self, config: Config) -> HandoffWorld:
        """Make a world without requests."""
        return HandoffWorld(config, self.factory)
