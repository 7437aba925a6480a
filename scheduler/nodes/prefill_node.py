"""The engine of a prefill node: computes prompts, and hands them over to decode nodes."""

from __future__ import annotations

from ...kvcache import CacheManager, HostConfig
from ...kvcache.storage import Storage, StorageNamespace
from ...kvcache.tokens import as_count
from ..engine import ModelRunner
from ..handoff import (
    Failed,
    NodeId,
    Offer,
    Order,
    Post,
    Send,
    Timing,
    Withdraw,
)
from ..models import Model
from ..policy import Policy
from ..prefill import PrefillScheduler
from ..request import Request
from .kv_parts import KVParts
from .kv_sender import PartsOut
from .node import (
    Letter,
    NodeEngine,
    check_revision,
)
from .transport import (
    Event,
    Offered,
    OfferFailed,
    Transport,
    Withdrawn,
)


class PrefillEngine(NodeEngine[PrefillScheduler]):
    """A prefill node; see `NodeEngine` for how it is driven.

    Its blocks stay pinned until the decode node has read them, though what is offered is a copy
    of them: the next step takes the arrays, so that no transport could read from those.
    """

    def __init__(
        self,
        model: Model,
        transport: Transport,
        *,
        epoch: int,
        now: float,
        timing: Timing,
        block_size: int,
        num_blocks: int,
        token_budget: int,
        max_running: int,
        max_model_len: int,
        weights_revision: str = "",
        order: Order = "early",
        policy: Policy | None = None,
        host: HostConfig | None = None,
        storage: Storage | None = None,
        storage_namespace: StorageNamespace | None = None,
        max_offered_bytes: int = 256 << 20,
    ) -> None:
        """Allocate the arrays and compile every program.

        Args:
            model: from `load_model`; decode nodes have the same.
            transport: nobody else polls or closes it.
            epoch: higher than that of any earlier life of the node.
            now: the time; see `poll`.
            timing, order: of `PrefillScheduler`.
            block_size: tokens per block; decode nodes have the same.
            num_blocks, token_budget, max_running, max_model_len: of `Engine`.
            weights_revision: which weights these are; parts of others are not taken.
            policy, host, storage, storage_namespace: of `Engine`.
            max_offered_bytes: of the copies that decode nodes have yet to read, beside the blocks;
                what would be more is copied later. One prompt's may come on top.

        Raises:
            ConfigError, CountError, StorageConfigError: for what cannot work; before anything is
                allocated.
        """
        check_revision(weights_revision, storage_namespace)
        max_offered_bytes = as_count("max_offered_bytes", max_offered_bytes, minimum=1)
        manager = CacheManager(num_blocks, block_size, host=host, storage=storage_namespace)
        scheduler = PrefillScheduler(
            manager,
            epoch=epoch,
            timing=timing,
            token_budget=token_budget,
            max_running=max_running,
            policy=policy,
            order=order,
        )
        runner = ModelRunner(
            model,
            manager,
            token_budget=token_budget,
            max_running=max_running,
            max_model_len=max_model_len,
            storage=storage,
            decode=False,
        )
        kv = KVParts(runner, "gather", weights_revision)
        super().__init__(manager, scheduler, runner, transport, kv, now=now)
        self._parts = PartsOut(kv, transport, max_bytes=max_offered_bytes)
        self._reports: list[Failed] = []

    def begin(self, request: Request, peer: NodeId, attempt: int = 1) -> None:
        """Compute a prompt, and hand it over to a decode node; see `PrefillScheduler.begin`.

        Raises:
            RequestError: for a request that the model cannot take, or an attempt that is open.
            RequestTooLargeError: if the prompt does not fit even alone.
            EngineClosedError: after close, with a host tier.
        """
        self.check_request(request)
        self.scheduler.begin(request, peer, attempt)

    @property
    def num_handed_over(self) -> int:
        """Hand-offs that hold blocks."""
        return self.scheduler.num_open

    def take_reports(self) -> list[Failed]:
        """Hand out what the gateway is to know since the last call, in order."""
        reports, self._reports = self._reports, []
        return reports

    def receive(self, letter: Letter) -> None:
        """Take in what a decode node says."""
        self.scheduler.receive(letter.peer, letter.message)

    def _take_in(self, event: Event) -> None:
        match event:
            case Offered():
                letter = self._parts.offered(event)
                if letter is not None:
                    self._letters.append(letter)
            case OfferFailed(ticket, reason):
                self.give_up(ticket.key, f"part {ticket.part} could not be offered: {reason}")
            case Withdrawn(key):
                self._parts.withdrawn(key)
                self.scheduler.fenced(key)

    def _act(self) -> None:
        for action in self.scheduler.take_actions():
            match action:
                case Post(peer, Send() as send):
                    letter = self._parts.letter(peer, send)
                    if letter is not None:
                        self._letters.append(letter)
                case Post(peer, message):
                    self._letters.append(Letter(peer, message))
                case Offer():
                    self._parts.offer(action)
                case Withdraw():
                    self._parts.withdraw(action)
                case Failed():
                    self._reports.append(action)
