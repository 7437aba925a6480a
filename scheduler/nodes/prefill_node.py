"""The engine of a prefill node: computes prompts, and hands their KV to decode nodes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ...kvcache import CacheManager, EventBatch, HostConfig
from ...kvcache.storage import Storage, StorageNamespace
from ...kvcache.tokens import as_count
from ..engine import ModelRunner
from ..handoff import NodeId, Offer, Order, Post, PrefillFailed, Send, Timing, Withdraw
from ..models import Model
from ..policy import Policy
from ..prefill import PrefillScheduler
from ..request import Request
from ..step_plan import StepPlan
from .kv_sender import KVSender
from .node import NodeEngine, PeerMessage, check_groups, check_revision
from .transport import Event, Offered, OfferFailed, Transport, Withdrawn


class PrefillEngine(NodeEngine[PrefillScheduler, PrefillFailed]):
    """A prefill node; see `NodeEngine` for the loop that drives it.

    The node offers copies of blocks, because each step donates the arrays of blocks, so that no
    transport can read them. The blocks stay pinned until the decode node has read the copies.
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
        num_groups: int = 1,
        policy: Policy | None = None,
        host: HostConfig | None = None,
        storage: Storage | None = None,
        storage_namespace: StorageNamespace | None = None,
        on_events: Callable[[EventBatch], object] | None = None,
        max_offered_bytes: int = 256 << 20,
    ) -> None:
        """Allocate the arrays and compile every program.

        Args:
            model: result of `load_model`; all nodes need the same model.
            transport: polled and closed only by this node.
            epoch: higher than the epoch of every earlier process of this node.
            now: current time; see `poll`.
            num_groups: number of groups of layers. A group is sent while the next one is computed;
                each is a program of its own.
            timing, order: see `PrefillScheduler`.
            block_size: tokens per block; decode nodes may have blocks of other sizes.
            num_blocks, token_budget, max_running, max_model_len: see `Engine`.
            weights_revision: name of the weights; decode nodes refuse parts of other weights.
            policy, host, storage, storage_namespace, on_events: see `Engine`.
            max_offered_bytes: limit of the device memory for copies that decode nodes have yet to
                read. Copies beyond it are made later. The oldest attempt may exceed it.

        Raises:
            ConfigError, CountError, StorageConfigError: for invalid arguments, before anything is
                allocated.
        """
        check_revision(weights_revision, storage_namespace)
        num_groups = check_groups(num_groups, model)
        max_offered_bytes = as_count("max_offered_bytes", max_offered_bytes, minimum=1)
        manager = CacheManager(
            num_blocks,
            block_size,
            host=host,
            storage=storage_namespace,
            record_events=on_events is not None,
        )
        scheduler = PrefillScheduler(
            manager,
            epoch=epoch,
            timing=timing,
            token_budget=token_budget,
            max_running=max_running,
            policy=policy,
            order=order,
            num_groups=num_groups,
        )
        runner = ModelRunner(
            model,
            manager,
            token_budget=token_budget,
            max_running=max_running,
            max_model_len=max_model_len,
            storage=storage,
            decode=False,
            num_groups=num_groups,
        )
        super().__init__(
            manager,
            scheduler,
            runner,
            transport,
            kind="gather",
            weights_revision=weights_revision,
            num_groups=num_groups,
            now=now,
            timing=timing,
            on_events=on_events,
        )
        self._sender = KVSender(
            self._kv, transport, max_bytes=max_offered_bytes, num_groups=num_groups
        )
        self._num_groups = num_groups

    def begin(self, request: Request, peer: NodeId, attempt: int = 1) -> None:
        """Compute a prompt, and hand it to a decode node; see `PrefillScheduler.begin`.

        Raises:
            RequestError: for a request that the model cannot serve, or an attempt that is open.
            RequestTooLargeError: if the prompt does not fit the empty cache.
            EngineClosedError: after close, with a host tier.
        """
        self.check_request(request)
        self.scheduler.begin(request, peer, attempt)

    @property
    def num_open_handoffs(self) -> int:
        """Number of hand-offs that hold blocks."""
        return self.scheduler.num_open

    def receive(self, message: PeerMessage) -> None:
        """Process a message of a decode node."""
        self.scheduler.receive(message.peer, message.message)

    def _start(self, plan: StepPlan) -> None:
        wrote = partial(self._wrote, plan) if self._num_groups > 1 else None
        self._runner.start(plan, wrote)

    @property
    def _waits(self) -> bool:
        """A part that the transport serves during a step is sent then."""
        return self._num_groups == 1 and not self._sender.num_waiting

    def _wrote(self, plan: StepPlan, group: int) -> None:
        """Offer a group of layers: its copies run before the next group is computed."""
        self.scheduler.wrote(plan, group)
        self._act()

    def _process(self, event: Event) -> None:
        match event:
            case Offered():
                self._outbox += self._sender.offered(event)
            case OfferFailed(part_id, reason):
                self.give_up(part_id.key, f"part {part_id.part} could not be offered: {reason}")
            case Withdrawn(key):
                self._sender.withdrawn(key)
                self.scheduler.fenced(key)

    def _act(self) -> None:
        for action in self.scheduler.take_actions():
            match action:
                case Post(peer, Send() as send):
                    self._outbox += self._sender.send(peer, send)
                case Post(peer, message):
                    self._outbox.append(PeerMessage(peer, message))
                case Offer():
                    self._sender.offer(action)
                case Withdraw():
                    self._sender.withdraw(action)
                case PrefillFailed():
                    self._reports.append(action)
