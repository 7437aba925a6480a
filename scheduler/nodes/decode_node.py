"""The engine of a decode node: receives the KV of prompts, and generates from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from ...kvcache import CacheManager, EventBatch, HostConfig
from ...kvcache.storage import Storage, StorageNamespace
from ..batching.preemption import PreemptMode
from ..decode import DecodeScheduler
from ..engine import ModelRunner
from ..handoff import CancelPull, DecodeFailed, Finished, Post, Preempted, Pull, Started, Timing
from ..models import Model
from ..policy import Policy
from .kv_receiver import KVReceiver
from .node import NodeEngine, PeerMessage, check_groups, check_revision
from .transport import Event, PullFailed, PullInfo, Received, Transport

DecodeReport: TypeAlias = Started | Preempted | Finished | DecodeFailed
"""What a decode node reports of an attempt."""


class DecodeEngine(NodeEngine[DecodeScheduler, DecodeReport]):
    """A decode node; see `NodeEngine` for the loop that drives it."""

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
        depth: int = 2,
        num_groups: int = 1,
        host: HostConfig | None = None,
        storage: Storage | None = None,
        storage_namespace: StorageNamespace | None = None,
        on_events: Callable[[EventBatch], object] | None = None,
    ) -> None:
        """Allocate the arrays and compile every program.

        Args:
            model, transport, epoch, now, block_size: see `PrefillEngine`.
            timing: see `DecodeScheduler`.
            num_blocks, token_budget, max_running, max_model_len: see `Engine`.
            weights_revision: name of the weights; the node refuses parts of other weights.
            num_groups: groups of layers in which prefill nodes send, to compile for. Copies for
                other numbers are compiled when they are first needed.
            policy, reserve_tokens, preempt, depth, host, storage, storage_namespace, on_events:
                see `Engine`.

        Raises:
            ConfigError, CountError, StorageConfigError: for invalid arguments, before anything is
                allocated.
        """
        check_revision(weights_revision, storage_namespace)
        num_groups = check_groups(num_groups, model)
        manager = CacheManager(
            num_blocks,
            block_size,
            host=host,
            storage=storage_namespace,
            record_events=on_events is not None,
        )
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
            depth=depth,
        )
        runner = ModelRunner(
            model,
            manager,
            token_budget=token_budget,
            max_running=max_running,
            max_model_len=max_model_len,
            storage=storage,
        )
        super().__init__(
            manager,
            scheduler,
            runner,
            transport,
            kind="scatter",
            weights_revision=weights_revision,
            num_groups=num_groups,
            now=now,
            timing=timing,
            on_events=on_events,
        )
        self._receiver = KVReceiver(self._kv, transport, timeout_s=timing.transfer_s)

    @property
    def num_open_handoffs(self) -> int:
        """Number of hand-offs that hold blocks."""
        return self.scheduler.num_receiving

    def receive(self, message: PeerMessage) -> None:
        """Process a message of a prefill node."""
        self.scheduler.receive(message.peer, message.message)
        self._act(message.pull_info)

    def _process(self, event: Event) -> None:
        match event:
            case Received(part_id):
                self._receiver.received(event, self._num_started)
                self.scheduler.pulled(part_id)
            case PullFailed(part_id, _, reason):
                self._receiver.failed(event)
                self.scheduler.pull_failed(part_id, fenced=True, reason=reason)

    def _act(self, pull_info: PullInfo | None = None) -> None:
        """Carry out the scheduler's actions.

        Args:
            pull_info: how to pull the part, if the actions answer a SEND.
        """
        self._receiver.release_written(self._num_started - len(self._in_flight))
        for action in self.scheduler.take_actions():
            match action:
                case Post(peer, message):
                    self._outbox.append(PeerMessage(peer, message))
                case Pull() if pull_info is not None:
                    self._receiver.pull(action, pull_info)
                case Pull(part_id=part_id):
                    self.scheduler.pull_failed(
                        part_id, fenced=True, reason="SEND came without a PullInfo"
                    )
                case CancelPull():
                    self._receiver.cancel(action)
                case _:
                    self._reports.append(action)
