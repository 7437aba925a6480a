"""What the engines of prefill and decode nodes share: a step at a time, and no other wait."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from ...kvcache import CacheManager
from ...kvcache.storage import StorageNamespace
from ..decode import DecodeScheduler
from ..engine import EngineStats, ModelRunner
from ..errors import ConfigError
from ..handoff import (
    AttemptKey,
    Message,
    NodeId,
)
from ..models import Params
from ..prefill import PrefillScheduler
from ..request import Request
from .kv_parts import KVParts
from .transport import (
    Event,
    Transport,
    TransportStats,
    WireTicket,
)


class Letter(NamedTuple):
    """A message between two nodes.

    Attributes:
        peer: whom it is for; on arrival, whom it is from.
        message: of the protocol.
        wire: along with SEND, what a transport needs to pull the part.
    """

    peer: NodeId
    message: Message
    wire: WireTicket | None = None


@dataclass(frozen=True, slots=True)
class NodeStats:
    """What a node has done so far, and what its transport holds."""

    engine: EngineStats
    transport: TransportStats


SchedulerT = TypeVar("SchedulerT", bound=PrefillScheduler | DecodeScheduler)


def check_revision(weights_revision: str, namespace: StorageNamespace | None) -> None:
    """Refuse a storage of other weights than those of the parts.

    Raises:
        ConfigError: with both names.
    """
    if namespace is not None and namespace.weights_revision != weights_revision:
        raise ConfigError(
            f"storage_namespace is of weights_revision {namespace.weights_revision!r}, the node of "
            f"{weights_revision!r}"
        )


class NodeEngine(ABC, Generic[SchedulerT]):
    """A node without its network, its clock and its gateway: a loop outside has those.

    ::

        while the node lives:
            receive(letter) ...            what has come
            poll(now)                      transport, time, and one step of the model
            take_letters, take_reports     what is to be sent

    One thread uses it, and dispatches all array work; a transport's threads touch staging memory
    alone.

    Attributes:
        manager: holds the block tables.
        model_name: `ModelConfig.name`.
        scheduler: plans the steps, and knows the hand-offs.
    """

    def __init__(
        self,
        manager: CacheManager,
        scheduler: SchedulerT,
        runner: ModelRunner,
        transport: Transport,
        kv: KVParts,
        *,
        now: float,
    ) -> None:
        """Join the parts of a node.

        Args:
            manager: whose blocks it has.
            scheduler: of the manager.
            runner: of the manager, too.
            transport: nobody else polls or closes it.
            kv: over the runner.
            now: the time; see `poll`.
        """
        self.manager = manager
        self.model_name = runner.model.config.name
        self.scheduler = scheduler
        self.scheduler.tick(now)
        self._runner = runner
        self._transport = transport
        self._kv = kv
        self._letters: list[Letter] = []

    def check_request(self, request: Request) -> None:
        """Refuse a request that the model cannot take.

        Raises:
            RequestError: for a token outside the vocabulary, or a request longer than
                max_model_len.
            EngineClosedError: after close, with a host tier.
        """
        self._runner.check_request(request)

    def give_up(self, key: AttemptKey, reason: str) -> None:
        """End an attempt in any state; nothing happens if it is not known."""
        self.scheduler.give_up(key, reason)

    @abstractmethod
    def receive(self, letter: Letter) -> None:
        """Take in what another node says."""

    def poll(self, now: float) -> bool:
        """Take in what has happened, and run a step if there is work; it waits for nothing else.

        Args:
            now: of a clock that never goes back, in seconds.

        Returns:
            Whether anything was done; if not, it may be left alone for a moment.

        Raises:
            EngineClosedError: after close, with a host tier.
        """
        self._runner.collect()
        self.scheduler.tick(now)
        events = self._transport.poll()
        for event in events:
            self._take_in(event)
        self._act()
        has_stepped = self._step()
        self._act()
        return has_stepped or bool(events or self._letters)

    def reset_cache(
        self,
        keep: Collection[bytes] = (),
        *,
        params: Params | None = None,
        weights_revision: str = "",
    ) -> None:
        """Forget the KV of all tiers, and go on with other weights, if some are given.

        Call `scheduler.drain` first, and poll until the scheduler's `reset_cache` may be called. A
        decode node goes on with what it generates, by the new weights. Nodes need not be reset at
        the same time: parts of other weights are not taken, and such an attempt is made again.

        Args:
            keep: namespaces whose published KV stays.
            params: other weights of the same shapes; None: those of now.
            weights_revision: what they are called, by nodes and in storage; see
                `Engine.reset_cache`.

        Raises:
            ConfigError: for weights of other shapes, or without a name or under that of those of
                now. Nothing is changed.
            HandoffsOpenError: if hand-offs hold blocks. Nothing is changed.
        """
        self.check_reset(params, weights_revision)
        self.scheduler.reset_cache(keep, weights_revision)
        if params is not None:
            self._runner.set_params(params)
        if weights_revision:
            self._kv.set_revision(weights_revision)

    @property
    @abstractmethod
    def num_handed_over(self) -> int:
        """Hand-offs that hold blocks: `reset_cache` is refused while there are any."""

    def check_reset(self, params: Params | None, weights_revision: str) -> None:
        """Refuse other weights that `reset_cache` must not be given.

        Raises:
            ConfigError: for weights of other shapes, or without a name or under that of those of
                now.
        """
        if params is None:
            return
        if weights_revision in ("", self._kv.weights_revision):
            raise ConfigError(
                f"parts of KV are of weights_revision {self._kv.weights_revision!r}: other "
                "weights need a name of their own"
            )
        self._runner.check_params(params, weights_revision)

    def take_letters(self) -> list[Letter]:
        """Hand out what is to be sent since the last call, in order."""
        letters, self._letters = self._letters, []
        return letters

    def stats(self) -> NodeStats:
        """Return what was done so far."""
        return NodeStats(self._runner.stats(self.scheduler.stats()), self._transport.stats())

    def close(self, *, timeout_s: float = 30.0) -> bool:
        """Stop the transport, and the threads of a host tier; see `Engine.close`.

        Storage stays open.
        """
        self._transport.close()
        return self._runner.close(timeout_s)

    def _step(self) -> bool:
        if not self.scheduler.has_work:
            self._runner.dispatch()
            return False
        plan = self.scheduler.schedule()
        next_tokens = self._runner.step(plan.chunks)
        if plan.chunks:
            self.scheduler.update(plan, next_tokens)
        return bool(plan.chunks)

    @abstractmethod
    def _take_in(self, event: Event) -> None:
        """Pass an event of the transport on."""

    @abstractmethod
    def _act(self) -> None:
        """Carry out what the scheduler wants done."""
