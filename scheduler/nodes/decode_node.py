"""The engine of a decode node: takes computed prompts over, and generates from them."""

from __future__ import annotations

from typing import TypeAlias

from ...kvcache import CacheManager, HostConfig
from ...kvcache.storage import Storage, StorageNamespace
from ..decode import DecodeScheduler
from ..engine import ModelRunner
from ..handoff import (
    CancelPull,
    Finished,
    Post,
    Pull,
    Started,
    Stopped,
    Timing,
)
from ..models import Model
from ..policy import Policy
from ..preemption import PreemptMode
from .kv_parts import KVParts
from .kv_receiver import PartsIn
from .node import (
    Letter,
    NodeEngine,
    check_revision,
)
from .transport import (
    Event,
    PullFailed,
    Received,
    Transport,
    WireTicket,
)

DecodeReport: TypeAlias = Started | Finished | Stopped


class DecodeEngine(NodeEngine[DecodeScheduler]):
    """A decode node; see `NodeEngine` for how it is driven."""

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
        policy: Policy | None = None,
        reserve_tokens: int | None = 512,
        preempt: PreemptMode = "recompute",
        host: HostConfig | None = None,
        storage: Storage | None = None,
        storage_namespace: StorageNamespace | None = None,
    ) -> None:
        """Allocate the arrays and compile every program.

        Args:
            model: from `load_model`; prefill nodes have the same.
            transport: nobody else polls or closes it.
            epoch: higher than that of any earlier life of the node.
            now: the time; see `poll`.
            timing: of `DecodeScheduler`.
            block_size: tokens per block; prefill nodes have the same.
            num_blocks, token_budget, max_running, max_model_len: of `Engine`.
            weights_revision: which weights these are; parts of others are not taken.
            policy, reserve_tokens, preempt, host, storage, storage_namespace: of `Engine`.

        Raises:
            ConfigError, CountError, StorageConfigError: for what cannot work; before anything is
                allocated.
        """
        check_revision(weights_revision, storage_namespace)
        manager = CacheManager(num_blocks, block_size, host=host, storage=storage_namespace)
        scheduler = DecodeScheduler(
            manager,
            epoch=epoch,
            timing=timing,
            token_budget=token_budget,
            max_running=max_running,
            policy=policy,
            reserve_tokens=reserve_tokens,
            preempt=preempt,
            check_request=self.check_request,
            vocab_size=model.config.vocab_size,
        )
        runner = ModelRunner(
            model,
            manager,
            token_budget=token_budget,
            max_running=max_running,
            max_model_len=max_model_len,
            storage=storage,
        )
        kv = KVParts(runner, "scatter", weights_revision)
        super().__init__(manager, scheduler, runner, transport, kv, now=now)
        self._parts = PartsIn(kv, transport, timeout_s=timing.transfer_s)
        self._reports: list[DecodeReport] = []

    @property
    def num_handed_over(self) -> int:
        """Hand-offs that hold blocks."""
        return self.scheduler.num_receiving

    def take_reports(self) -> list[DecodeReport]:
        """Hand out what the gateway is to know since the last call, in order."""
        reports, self._reports = self._reports, []
        return reports

    def receive(self, letter: Letter) -> None:
        """Take in what a prefill node says."""
        self.scheduler.receive(letter.peer, letter.message)
        self._act(letter.wire)

    def _take_in(self, event: Event) -> None:
        match event:
            case Received(ticket):
                self._parts.received(event)
                self.scheduler.pulled(ticket)
            case PullFailed(ticket, _, reason):
                self._parts.failed(event)
                self.scheduler.pull_failed(ticket, fenced=True, reason=reason)

    def _act(self, wire: WireTicket | None = None) -> None:
        """Carry out what the scheduler wants done, with what came along with a SEND."""
        self._parts.release_written()
        for action in self.scheduler.take_actions():
            match action:
                case Post(peer, message):
                    self._letters.append(Letter(peer, message))
                case Pull() if wire is not None:
                    self._parts.pull(action, wire)
                case Pull(ticket=ticket):
                    self.scheduler.pull_failed(ticket, fenced=True, reason="no wire ticket came")
                case CancelPull():
                    self._parts.cancel(action)
                case _:
                    self._reports.append(action)
