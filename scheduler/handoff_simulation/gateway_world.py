"""The gateway of the simulation in each of its lives, its clients, and the network."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...kvcache import Int32Array
from ..handoff.gateway_messages import (
    GATEWAY,
    DeliveryAck,
    GatewayMessage,
    NodeStatus,
)
from ..handoff.messages import (
    AttemptKey,
    Message,
    NodeId,
)
from ..handoff.network_gateway import (
    Connect,
    Disconnect,
    NetworkGateway,
    SendToNode,
)
from ..handoff.retries import Answer
from ..request import (
    Request,
    RequestStatus,
    SamplingParams,
)
from .invariants import (
    OLD_LIVES,
    ONE_ANSWER,
    SAME_TOKENS,
    SimulationError,
)
from .nodes import SimulationConfig, sample
from .observer import Watch, client_id


@dataclass(frozen=True)
class Job:
    """What a client asked for."""

    prompt: Int32Array
    max_new_tokens: int
    seed: int

    def answer(self) -> tuple[int, ...]:
        """What one node alone would generate."""
        tokens = self.prompt
        for _ in range(self.max_new_tokens):
            tokens = np.append(tokens, np.int32(sample(self.seed, tokens)))
        return tuple([int(token) for token in tokens[len(self.prompt) :]])


class Envelope(NamedTuple):
    """A message on its way.

    Attributes:
        epoch, sent_at: of who sent it, and when that was.
    """

    source: NodeId
    to: NodeId
    epoch: int
    sent_at: int
    message: Message | GatewayMessage

    @property
    def is_alive(self) -> bool:
        """Whether it says no more than that a node is up."""
        return isinstance(self.message, NodeStatus)


class GatewayWorld:
    """A gateway that knows of nodes what they say, clients that ask it, and messages on their way.

    Attributes:
        now: the clock, in ticks.
        gateway: the gateway with its router, and which of its lives it is.
        network: messages on their way, between nodes, and between nodes and gateway.
        jobs: what clients have asked for, by request.
        answers: what clients were told.
        counts: how often each thing happened.
    """

    def __init__(self, config: SimulationConfig | None = None) -> None:
        self.config = config = config or SimulationConfig()
        self.now = 0
        self.network: list[Envelope] = []
        self.jobs: dict[str, Job] = {}
        self.answers: dict[str, Answer] = {}
        self.counts: Counter[str] = Counter()
        self._watch = Watch(config)
        self._gateway_epoch = 0
        self.open_gateway()

    def open_gateway(self) -> None:
        """Put a gateway that knows nothing in the place of what there was; clients ask it again."""
        self._gateway_epoch += 1
        self._connected: set[NodeId] = set()
        config = self.config
        self.gateway = NetworkGateway(
            config.block_size,
            silence_s=config.timing.silence_s,
            max_attempts=config.max_attempts,
            backoff_s=2,
            request_s=config.request_s,
            epoch=self._gateway_epoch,
        )
        self.gateway.tick(self.now)
        for request_id in self.jobs:
            if request_id not in self.answers:
                self._ask_gateway(request_id)

    def job_of(self, key: AttemptKey) -> Job:
        """Return what an attempt is for."""
        return self.jobs[client_id(key)]

    def ask(self, job: Job) -> None:
        """A client asks for something."""
        request_id = f"r{len(self.jobs) + 1}"
        self.jobs[request_id] = job
        self._ask_gateway(request_id)
        self.gateway.tick(self.now)

    def cancel(self, request_id: str) -> None:
        """A client wants no answer any more, and knows so."""
        self.gateway.abort(request_id)
        self.answers[request_id] = Answer(request_id, None, "cancelled by the client")

    def _ask_gateway(self, request_id: str) -> None:
        job = self.jobs[request_id]
        sampling = SamplingParams(seed=job.seed)
        request = Request(request_id, job.prompt, job.max_new_tokens, sampling=sampling)
        self._watch.asks(request_id, len(job.prompt), self.now)
        self.gateway.add_request(request, self.now)

    def _act_gateway(self) -> None:
        """Carry out what the gateway wants done, and let clients hear their answers."""
        for action in self.gateway.take_actions():
            match action:
                case SendToNode(peer, message):
                    assert peer in self._connected, f"the gateway does not know where {peer} is"
                    self._post(Envelope(GATEWAY, peer, self._gateway_epoch, self.now, message))
                case Connect(peer):
                    self._connected.add(peer)
                case Disconnect(peer):
                    self._connected.remove(peer)
        for request in self.gateway.take_ended():
            self._answer(request)

    def _answer(self, request: Request) -> None:
        """A client hears what has become of its request."""
        name, tokens, reason = request.request_id, None, ""
        if request.status is RequestStatus.FINISHED:
            tokens = tuple(request.output_tokens)
        else:
            reason = self.gateway.failures[name]
        if name in self.answers:
            raise SimulationError(ONE_ANSWER, f"{name} has two")
        if tokens is not None and tokens != self.jobs[name].answer():
            raise SimulationError(SAME_TOKENS, f"{name} has others")
        if tokens is None:
            self._watch.fails(name, reason, self.now)
        self.answers[name] = Answer(name, tokens, reason)
        self.counts["answers" if tokens is not None else "failures"] += 1

    def _post(self, envelope: Envelope) -> None:
        """Send what is for the gateway, or from it."""
        self._watch.says((envelope.source, envelope.epoch), envelope.message)
        self.network.append(envelope)

    def _tell_gateway(self, envelope: Envelope) -> None:
        """Let the gateway hear what a node has said.

        Raises:
            SimulationError: if that is of an earlier life than it knows of, and changes anything.
        """
        gateway, peer, message = self.gateway, envelope.source, envelope.message
        known = gateway.nodes.get(peer)
        if isinstance(message, DeliveryAck) and known is not None and known.epoch == envelope.epoch:
            self._watch.hears((GATEWAY, self._gateway_epoch), message)
        before = known, gateway.num_open, gateway.num_unacked
        gateway.receive(peer, envelope.epoch, message, self.now)
        if known is not None and envelope.epoch < known.epoch:
            after = gateway.nodes.get(peer), gateway.num_open, gateway.num_unacked
            if after != before or gateway.take_actions():
                raise SimulationError(OLD_LIVES, f"the gateway heeds {envelope}")
