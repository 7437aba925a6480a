"""Base class of the prefill and decode engines: runs steps, and never waits for other nodes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Final, Generic, NamedTuple, TypeVar

from ...kvcache import CacheManager, EventBatch
from ...kvcache.cleanup import give_back
from ...kvcache.copies.block_copies import CopyKind
from ...kvcache.storage import StorageNamespace
from ...kvcache.tokens import as_count
from ..decode import DecodeScheduler
from ..engine import EngineStats, ModelRunner
from ..errors import ConfigError
from ..handoff import AttemptKey, Message, NodeId, Timing
from ..handoff.gateway_messages import NodeLoad
from ..models import Model, Params
from ..prefill import PrefillScheduler
from ..request import Request
from ..step_plan import StepPlan
from .kv_parts import KVParts
from .transport import Event, PullInfo, Transport, TransportStats

_CLOSE_S: Final = 5.0
"""Longest wait for the threads of a node that could not be made. They have nothing to do."""


class PeerMessage(NamedTuple):
    """A hand-off message to or from another node.

    Attributes:
        peer: name of the receiver; of the sender for a received message.
        message: message of the protocol.
        pull_info: how to pull the part; only with SEND.
    """

    peer: NodeId
    message: Message
    pull_info: PullInfo | None = None


@dataclass(frozen=True, slots=True)
class NodeStats:
    """Statistics of a node's engine and of its transport."""

    engine: EngineStats
    transport: TransportStats


SchedulerT = TypeVar("SchedulerT", bound=PrefillScheduler | DecodeScheduler)
ReportT = TypeVar("ReportT")


def check_revision(weights_revision: str, namespace: StorageNamespace | None) -> None:
    """Reject a storage namespace of other weights than the node's.

    Raises:
        ConfigError: with both revisions.
    """
    if namespace is not None and namespace.weights_revision != weights_revision:
        raise ConfigError(
            f"storage_namespace must have weights_revision {weights_revision!r} as the node, got "
            f"{namespace.weights_revision!r}"
        )


def check_groups(num_groups: int, model: Model) -> int:
    """Check a number of groups of layers.

    Raises:
        ConfigError: if the model has fewer layers.
        CountError: if it is less than 1.
    """
    num_groups, most = as_count("num_groups", num_groups, minimum=1), model.config.num_layers
    if num_groups > most:
        raise ConfigError(f"num_groups must be at most the model's {most} layers, got {num_groups}")
    return num_groups


class NodeEngine(ABC, Generic[SchedulerT, ReportT]):
    """A node without network and clock, which a loop outside provides.

    ::

        while the node serves:
            set_time(now)                  dates the messages
            receive(message) ...           messages of other nodes
            poll(now)                      transport and deadlines
            take_messages, take_reports    messages to other nodes and the gateway
            step()                         at most one step of the model
            take_messages, take_reports    again, as a step takes long

    One thread calls the engine and dispatches all array work. The threads of a transport touch only
    staging memory.

    Attributes:
        manager: the cache manager of the node's blocks.
        max_model_len: limit of prompt and output together, in tokens, which also fit into all
            blocks.
        model_name: ``ModelConfig.name``, and the dtype of the KV: nodes need the same.
        scheduler: the scheduler, which also runs the hand-off protocol.
        timing: times of the hand-off.
    """

    def __init__(
        self,
        manager: CacheManager,
        scheduler: SchedulerT,
        runner: ModelRunner,
        transport: Transport,
        *,
        kind: CopyKind,
        weights_revision: str,
        num_groups: int,
        now: float,
        timing: Timing,
        on_events: Callable[[EventBatch], object] | None = None,
    ) -> None:
        """Assemble a node, and compile the copies of parts; if this raises, close the runner.

        Args:
            manager: the cache manager.
            scheduler: a scheduler over the manager.
            runner: a model runner over the manager.
            transport: polled and closed only by this node.
            kind, weights_revision, num_groups: see `KVParts`.
            now: current time; see `poll`.
            timing: the scheduler's.
            on_events: takes the KV events after each poll; see `Engine`.
        """
        self.manager = manager
        self._on_events = on_events
        self.max_model_len = min(runner.max_model_len, manager.num_blocks * manager.block_size)
        self.model_name = f"{runner.model.config.name} {runner.model.params.embedding.dtype}"
        self.scheduler = scheduler
        self.timing = timing
        self._runner = runner
        self._transport = transport
        try:
            self.scheduler.tick(now)
            self._kv = KVParts(runner, kind, weights_revision, num_groups)
        except BaseException:
            give_back(partial(runner.close, _CLOSE_S))
            raise
        self._in_flight: deque[StepPlan] = deque()
        self._num_started = 0  # steps, with those in flight
        self._outbox: list[PeerMessage] = []
        self._reports: list[ReportT] = []

    def check_request(self, request: Request) -> None:
        """Reject a request that the model cannot serve.

        Raises:
            RequestError: for a token outside the vocabulary, or a request longer than
                max_model_len.
            EngineClosedError: after close, with a host tier.
        """
        self._runner.check_request(request)

    def give_up(self, key: AttemptKey, reason: str) -> None:
        """End an attempt in any state. An unknown attempt is ignored."""
        self.scheduler.give_up(key, reason)

    def set_time(self, now: float) -> None:
        """Date the messages that are received until the next poll, where the deadlines pass.

        A message that arrived during a long step is thus no older than the end of the step.
        """
        self.scheduler.set_time(now)

    @abstractmethod
    def receive(self, message: PeerMessage) -> None:
        """Process a message of another node."""

    def poll(self, now: float) -> bool:
        """Process the transport's events and deadlines.

        Args:
            now: current time of a monotonic clock, in seconds.

        Returns:
            Whether anything was done. If neither `poll` nor `step` has, the loop may pause.

        Raises:
            EngineClosedError: after close, with a host tier.
        """
        self._runner.collect()
        self.scheduler.set_time(now)
        events = self._transport.poll()
        for event in events:
            self._process(event)
        self.scheduler.tick(now)  # after what has ended during a long step
        self._act()
        return bool(events or self._outbox)

    def step(self) -> bool:
        """Plan one step if there is work; return whether anything was done.

        The first step in flight is read if they are as many as the scheduler's ``depth``, or if
        nothing can be planned. If messages may soon be sent meanwhile, it is read when it is ready.

        Raises:
            EngineClosedError: after close, with a host tier.
        """
        has_stepped = self._step()
        self._act()
        self._report_events()
        return has_stepped or bool(self._outbox)

    def _report_events(self) -> None:
        if self._on_events is not None and (batch := self.manager.take_events()) is not None:
            self._on_events(batch)

    def reset_cache(
        self,
        keep: Collection[bytes] = (),
        *,
        params: Params | None = None,
        weights_revision: str = "",
    ) -> None:
        """Forget the KV of all tiers, and optionally switch to other weights.

        Call ``scheduler.drain`` first, and `poll` until `num_open_handoffs` is 0. Steps in flight
        are read first. A decode node continues its running requests with the new weights. Nodes
        need not be reset at the same time: a node refuses parts of other weights, and the attempt
        is repeated.

        Args:
            keep: namespaces whose published KV stays.
            params: new weights of the same shapes; None keeps the current ones.
            weights_revision: name of the new weights, for nodes and storage; see
                `Engine.reset_cache`.

        Raises:
            ConfigError: for weights of other shapes, or without a new name. Nothing changes.
            HandoffsOpenError: if hand-offs hold blocks. Nothing else changes.
        """
        self.check_reset(params, weights_revision)
        while self._in_flight:
            self._read()
        self.scheduler.reset_cache(keep, weights_revision)
        if params is not None:
            self._runner.set_params(params, weights_revision)
        if weights_revision:
            self._kv.set_revision(weights_revision)

    @property
    @abstractmethod
    def num_open_handoffs(self) -> int:
        """Number of hand-offs that hold blocks; `reset_cache` needs it to be 0."""

    def check_reset(self, params: Params | None, weights_revision: str) -> None:
        """Reject weights that `reset_cache` would reject.

        Raises:
            ConfigError: for weights of other shapes, or without a new name.
        """
        if params is None:
            return
        if weights_revision in ("", self._kv.weights_revision):
            raise ConfigError(
                f"new weights need a weights_revision other than {self._kv.weights_revision!r}, "
                f"got {weights_revision!r}"
            )
        self._runner.check_params(params, weights_revision)

    @property
    def is_waiting(self) -> bool:
        """Whether a transfer or a copy is under way, whose end wakes nobody."""
        tiers = self.manager.tiers
        return self.scheduler.num_open > 0 or (tiers is not None and tiers.num_open_operations > 0)

    def take_messages(self) -> list[PeerMessage]:
        """Return the messages to send since the last call, in order."""
        messages, self._outbox = self._outbox, []
        return messages

    def take_reports(self) -> list[ReportT]:
        """Return the reports to the gateway since the last call, in order."""
        reports, self._reports = self._reports, []
        return reports

    def stats(self) -> NodeStats:
        """Return the statistics so far."""
        return NodeStats(self._runner.stats(self.scheduler.stats()), self._transport.stats())

    def load(self) -> NodeLoad:
        """Return what the node does, and has done, for its status."""
        scheduler, counts = self.scheduler, self.scheduler.stats()
        return NodeLoad(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_used_blocks=self.manager.num_blocks - self.manager.available,
            prompt_tokens=counts.prompt_tokens,
            hit_tokens=counts.hit_tokens,
            host_hit_tokens=counts.host_hit_tokens,
            storage_hit_tokens=counts.storage_hit_tokens,
            preemptions=counts.preemptions,
        )

    def close(self, *, timeout_s: float = 30.0) -> bool:
        """Stop the transport and the threads of a host tier; see `Engine.close`.

        Storage stays open.
        """
        self._transport.close()
        closed = self._runner.close(timeout_s)
        self._report_events()
        return closed

    def _step(self) -> bool:
        if len(self._in_flight) == self.scheduler.depth:
            is_ready = self._waits or self._runner.is_ready
            if is_ready:
                self._read()
            return is_ready
        if not self.scheduler.has_work:
            self._runner.dispatch()
            return False
        plan = self.scheduler.schedule()
        self._start(plan)
        if plan.num_chunks:
            self._in_flight.append(plan)
            self._num_started += 1
        has_stepped = bool(self._in_flight)
        is_full = not plan.num_chunks or len(self._in_flight) == self.scheduler.depth
        if has_stepped and is_full and self._waits:
            self._read()
        return has_stepped

    @property
    def _waits(self) -> bool:
        """Whether to wait for a step: nothing that comes meanwhile lets the node send more."""
        return True

    def _start(self, plan: StepPlan) -> None:
        """Dispatch a step."""
        self._runner.start(plan)

    def _read(self) -> None:
        """Wait for the first step in flight, and apply its results."""
        next_tokens, plan = self._runner.read(), self._in_flight.popleft()
        append_logprobs = partial(self._runner.append_logprobs, plan)
        self.scheduler.update(plan, next_tokens, append_logprobs)

    @abstractmethod
    def _process(self, event: Event) -> None:
        """Process an event of the transport."""

    @abstractmethod
    def _act(self) -> None:
        """Carry out the scheduler's actions."""
