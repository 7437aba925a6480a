"""Adapter of our prefill nodes, decode nodes and gateway for the specification."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np

from ...kvcache import CacheManager, HostConfig, Int32Array
from ...kvcache.storage.keys import StorageNamespace
from ...kvcache.tiers.operations import Operation, OpKind
from ...spec.adapters import handoff as spec
from ..decode import DecodeScheduler
from ..errors import HandoffsOpenError, StepOrderError
from ..gateway.network_gateway import Connect, Disconnect, NetworkGateway, SendToNode
from ..gateway.node_reporter import NodeReporter
from ..handoff.actions import CancelPull, Finished, Offer, Post, Pull, Started, Timing, Withdraw
from ..handoff.actions import Preempted as PreemptedReport
from ..handoff.gateway_messages import (
    CacheAsk,
    CacheUpdate,
    CancelAttempt,
    DecodeFailed,
    DeliveryAck,
    FollowAttempt,
    GatewayMessage,
    NodeLoad,
    NodeStatus,
    Preempted,
    PrefillFailed,
    Progress,
    RunPrefill,
)
from ..handoff.gateway_messages import Finished as FinishedReport
from ..handoff.gateway_messages import Started as StartedReport
from ..handoff.messages import Abort, AttemptKey, Commit, Grant, Hits, Message, PartId, Refuse
from ..prefill import PrefillScheduler
from ..request import Request, RequestStatus, SamplingParams
from ..step_plan import StepPlan

TIMING: Final = Timing(
    retry_s=spec.RETRY,
    silence_s=spec.SILENCE,
    transfer_s=spec.TRANSFER,
    remember_s=spec.REMEMBER,
)

NAMESPACES: Final = (b"", b"tenant")
"""By the number that the specification has for it."""

NO_ROOM: Final = ("out of blocks", "out of slots", "others wait")

Config: TypeAlias = dict[str, Any]


def attempt_name(key: AttemptKey) -> str:
    """Return the specification's name of an attempt: client's name, gateway's epoch, number."""
    client, _, rest = key.request_id.partition(" #")
    return f"{client}.{rest.partition('.')[0] or 0}.{key.attempt}"


def part_of(part_id: PartId) -> spec.Part:
    """Return the specification's name of a part."""
    return spec.Part(attempt_name(part_id.key), part_id.part, part_id)


def _total(hits: Hits) -> int:
    return hits.device + hits.host + hits.storage


def message_of(body: Message | GatewayMessage) -> spec.Message:
    """Return a message with what the rules need of it."""
    kind = type(body).__name__
    match body:
        case NodeStatus() | CacheUpdate() | CacheAsk():
            return spec.Message(kind, "", body)
        case DeliveryAck(key, of):
            return spec.Message(kind, attempt_name(key), body, of=of)
        case CancelAttempt(key):
            return spec.Message(kind, attempt_name(key), body, cancels=True)
        case FollowAttempt(key):
            return spec.Message(kind, attempt_name(key), body, follows=True)
        case Progress(attempts):
            names = tuple(attempt_name(each.key) for each in attempts)
            return spec.Message(kind, names[0], body, reports=names)
        case PrefillFailed(key):
            return spec.Message(
                kind, attempt_name(key), body, is_repeated=True, is_final=body.is_final,
                has_no_room=body.is_busy, is_failure=not (body.is_busy or body.is_lost),
            )  # fmt: skip
        case Preempted(key, tokens):
            return spec.Message(kind, attempt_name(key), body, tokens=tokens)
        case RunPrefill(key):
            tokens = _tokens(body.request().prompt)
            return spec.Message(kind, attempt_name(key), body, is_repeated=True, tokens=tokens)
        case StartedReport() | FinishedReport() | DecodeFailed():
            is_failure = isinstance(body, DecodeFailed)
            return spec.Message(
                kind, attempt_name(body.key), body, is_repeated=True, is_failure=is_failure
            )
    attempt, grant = attempt_name(body.header.key), body.header.grant
    match body:
        case Commit():
            hits, position = _total(body.hits), body.position
            return spec.Message(kind, attempt, body, hits=hits, position=position)
        case Grant():
            return spec.Message(kind, attempt, body, grant=grant, first_block=body.first_block)
        case Refuse():
            return spec.Message(kind, attempt, body, has_no_room=body.reason in NO_ROOM)
        case Abort():
            return spec.Message(kind, attempt, body, grant=grant)
    return spec.Message(kind, attempt, body)


class _Node(ABC):
    """Parts that nodes of both roles have: scheduler, manager and reporter."""

    scheduler: PrefillScheduler | DecodeScheduler

    def __init__(self, config: Config, role: spec.Role, num_blocks: int, epoch: int) -> None:
        host = HostConfig(config["host_blocks"]) if config["host_blocks"] else None
        size, storage = config["block_size"], None
        if role == "decode":
            size = config.get("decode_block_size", size)
        if config.get("storage"):
            storage = StorageNamespace("model", "weights", "float32", size, (0, 1), (0, 1))
        self.manager = CacheManager(num_blocks, size, host=host, storage=storage)
        self.reporter = NodeReporter(epoch, TIMING, progress_s=0)
        self.now = 0
        self.plans: deque[StepPlan] = deque()
        self._status = NodeStatus(role, "", "simulated", size, num_blocks, "simulated")

    # Messages, the clock and reports

    def status(self) -> spec.Message:
        """See `spec.Node`, as for all public methods here."""
        load = NodeLoad(
            num_waiting=len(self.scheduler.waiting),
            num_used_blocks=self.manager.num_blocks - self.manager.available,
        )
        return message_of(replace(self._status, load=load))

    def receive(self, source: str, message: spec.Message) -> None:
        """Pass a message to the reporter or the scheduler."""
        match message.body:
            case DeliveryAck() as ack:
                self.reporter.acknowledge(source, ack)
            case FollowAttempt() as follow:
                self.reporter.follow(follow)
            case CancelAttempt(key, reason):
                self.scheduler.give_up(key, reason)
            case Message() as body:
                self.scheduler.receive(source, body)

    def tick(self, now: int) -> None:
        """Advance the clocks."""
        self.now = now
        self.scheduler.tick(now)
        self.reporter.tick(now)

    def take_actions(self) -> list[spec.Action]:
        """Return the actions of the scheduler, then the messages of the reporter."""
        actions = [
            converted
            for action in self.scheduler.take_actions()
            if (converted := self._convert(action)) is not None
        ]
        self.reporter.report_progress(self.now)
        messages = self.reporter.take_messages()
        return [*actions, *(spec.Send(spec.GATEWAY, message_of(each)) for each in messages)]

    @abstractmethod
    def _convert(self, action: object) -> spec.Action | None:
        """Convert an action, or report it to the gateway."""

    # Steps

    def schedule(self) -> spec.Plan:
        """Plan a step."""
        plan = self.scheduler.schedule()
        if plan.chunks:
            self.plans.append(plan)
        admitted = [
            spec.Admitted(
                self._name(each), _tokens(each.tokens), self._num_hit(each), _namespace(each)
            )
            for each in plan.admitted
            if each.lease is not None
        ]
        chunks = [self._chunk(each.request, each.start, each.length) for each in plan.chunks]
        return spec.Plan(chunks, admitted, [self._name(each) for each in plan.preempted])

    def _chunk(self, request: Request, start: int, length: int) -> spec.Chunk:
        lease = request.lease
        assert lease is not None, f"{request!r} is computed without blocks"
        return spec.Chunk(
            self._name(request),
            start,
            start + length,
            _tokens(request.tokens),
            lease.block_table.tolist(),
            lease.num_shared_blocks,
            request.sampling.seed,
            _namespace(request),
        )

    def _num_hit(self, request: Request) -> int:
        lease = request.lease
        return lease.num_hit_blocks * self.manager.block_size if lease is not None else 0

    @abstractmethod
    def _name(self, request: Request) -> str:
        """Return the name of the attempt."""

    def update(self, tokens: Sequence[int]) -> list[bool]:
        """End the first step in flight."""
        plan = self.plans.popleft()
        counts = [each.request.status is RequestStatus.RUNNING for each in plan.chunks]
        self.scheduler.update(plan, tokens)
        return counts

    # Tiers and the cache

    def take_copies(self) -> list[spec.Copy | spec.StorageOperation]:
        """Return the copies between device and host; cancelled ones end later all the same."""
        tiers = self.manager.tiers
        if tiers is None:
            return []
        tiers.take_cancelled()
        return list(map(_copy_of, tiers.take_operations()))

    def copied(self, copy: Hashable, ok: Sequence[bool]) -> None:
        """Report the end of a copy."""
        tiers = self.manager.tiers
        assert tiers is not None and isinstance(copy, Operation), "a copy without a host tier"
        tiers.complete(copy.id, ok)

    def storage_keys(self, tokens: spec.Tokens, namespace: int) -> list[str]:
        """Return the names of the full blocks in storage."""
        storage = None if self.manager.tiers is None else self.manager.tiers.storage
        if storage is None:
            return []
        keys = storage.block_keys(np.array(tokens, np.int32), NAMESPACES[namespace])
        return [key.hex() for key in keys]

    def drain(self) -> None:
        """Give hand-offs up."""
        self.scheduler.drain("the weights change")

    def reset(self) -> bool:
        """Drop all KV, if no hand-off is open and no step is in flight."""
        try:
            self.scheduler.reset_cache()
        except (HandoffsOpenError, StepOrderError):
            return False
        return True

    def evict(self, num_blocks: int) -> None:
        """Evict blocks."""
        self.manager.evict(num_blocks)

    def num_free(self) -> int:
        """Return the number of free blocks."""
        return self.manager.stats().free_blocks

    def num_cached(self, tokens: spec.Tokens, namespace: int) -> int:
        """Return the length of the match on the device."""
        return self.manager.match(tokens, NAMESPACES[namespace]).num_tokens

    def num_evicted(self) -> int:
        """Return the number of evicted blocks."""
        return self.manager.stats().evicted_blocks

    def cached_blocks(self, tokens: spec.Tokens, namespace: int) -> list[int]:
        """Return the blocks of cached tokens."""
        match = self.manager.match(tokens, NAMESPACES[namespace])
        lease = self.manager.admit(match, count_hit=False)
        table: list[int] = lease.block_table.tolist()
        self.manager.release(lease)
        return table

    def has_work(self) -> bool:
        """Whether the scheduler has work."""
        return self.scheduler.has_work

    def counts(self) -> spec.NodeCounts:
        """Return the counts of cache, scheduler and reporter."""
        stats, scheduler = self.manager.stats(), self.scheduler
        done = scheduler.stats()
        return spec.NodeCounts(
            stats.num_blocks,
            self.manager.available,
            stats.live_leases + (stats.tiers.parked if stats.tiers is not None else 0),
            scheduler.num_open,
            self.reporter.num_unacked,
            done.hit_tokens + done.host_hit_tokens + done.storage_hit_tokens,
            stats.hit_blocks * self.manager.block_size,
        )

    def check(self) -> None:
        """Run the manager's own check."""
        self.manager.check()


class PrefillNode(_Node):
    """A `PrefillScheduler` and its `CacheManager`."""

    def __init__(self, config: Config, epoch: int, now: int) -> None:
        super().__init__(config, "prefill", config["prefill_blocks"], epoch)
        self.scheduler: PrefillScheduler = PrefillScheduler(
            self.manager,
            epoch=epoch,
            timing=TIMING,
            token_budget=config["budget"],
            max_running=min(config["max_running"], config["budget"]),
            order=config["order"],
            num_groups=config["num_groups"],
        )
        self._begun: list[spec.Action] = []
        self._withdrawn: dict[str, AttemptKey] = {}
        self.tick(now)

    def receive(self, source: str, message: spec.Message) -> None:
        """Begin an attempt, or pass a message on."""
        if isinstance(message.body, RunPrefill):
            self.reporter.begin(message.body, self._begin, self.now)
        else:
            super().receive(source, message)

    def _begin(self, request: Request, peer: str, attempt: int) -> None:
        self._begun.append(spec.Begun(attempt_name(AttemptKey(request.request_id, attempt))))
        self.scheduler.begin(request, peer, attempt)

    def take_actions(self) -> list[spec.Action]:
        """Return the attempts that have begun, and all else."""
        begun, self._begun = self._begun, []
        return [*begun, *super().take_actions()]

    def _convert(self, action: object) -> spec.Action | None:
        match action:
            case Post(peer, message):
                return spec.Send(peer, message_of(message))
            case Offer(_, part_id, blocks, group):
                return spec.Offer(part_of(part_id), blocks, group)
            case Withdraw(key):
                self._withdrawn[attempt_name(key)] = key
                return spec.Withdraw(attempt_name(key))
            case PrefillFailed():
                self.reporter.report(action, self.now)
        return None

    def _name(self, request: Request) -> str:
        key: AttemptKey = request.key  # type: ignore[attr-defined]  # the prompt of an attempt
        return attempt_name(key)

    def wrote(self, group: int) -> None:
        """Report that a group of layers is written."""
        self.scheduler.wrote(self.plans[0], group)

    def fenced(self, attempt: str) -> None:
        """Report that the offers of an attempt are no longer served."""
        self.scheduler.fenced(self._withdrawn.pop(attempt))


class DecodeNode(_Node):
    """A `DecodeScheduler` and its `CacheManager`."""

    def __init__(self, config: Config, epoch: int, now: int) -> None:
        super().__init__(config, "decode", config["decode_blocks"], epoch)
        self.scheduler: DecodeScheduler = DecodeScheduler(
            self.manager,
            epoch=epoch,
            timing=TIMING,
            token_budget=config["budget"],
            max_running=min(config["max_running"], config["budget"]),
            reserve_tokens=config["reserve_tokens"],
            preempt="host" if config["host_blocks"] else "recompute",
            vocab_size=spec.VOCABULARY,
            max_overtaken=config["max_overtaken"],
            depth=config.get("depth", 1),
        )
        self._names: WeakKeyDictionary[Request, str] = WeakKeyDictionary()
        self.tick(now)

    def _convert(self, action: object) -> spec.Action | None:
        match action:
            case Post(peer, message):
                return spec.Send(peer, message_of(message))
            case Pull(peer, part_id, blocks, group, _, sent):
                num_skipped = sent.num_skipped_tokens
                return spec.Pull(peer, part_of(part_id), blocks, group, num_skipped)
            case CancelPull(part_id):
                return spec.CancelPull(part_of(part_id))
            case Started(key, request, num_cached):
                self.reporter.report(action, self.now)
                self._names[request] = attempt_name(key)
                table = [] if request.lease is None else request.lease.block_table.tolist()
                return spec.Started(attempt_name(key), table, num_cached, request.num_hit_tokens)
            case PreemptedReport():
                self.reporter.report(action, self.now)
            case Finished(key) | DecodeFailed(key):
                self.reporter.report(action, self.now)
                return spec.Ended(attempt_name(key))
        return None

    def _name(self, request: Request) -> str:
        return self._names[request]

    def pulled(self, part: spec.Part) -> None:
        """Report that a part has arrived."""
        self.scheduler.pulled(_part_id(part))

    def pull_failed(self, part: spec.Part, fenced: bool) -> None:
        """Report that a pull has failed."""
        self.scheduler.pull_failed(_part_id(part), fenced=fenced, reason="it was lost")

    def pull_fenced(self, part: spec.Part) -> None:
        """Report that a pull writes no more."""
        self.scheduler.pull_fenced(_part_id(part))


def _copy_of(operation: Operation) -> spec.Copy | spec.StorageOperation:
    sources, destinations = operation.sources.tolist(), operation.destinations.tolist()
    keys = [key.hex() for key in operation.keys]
    match operation.kind:
        case OpKind.LOOKUP:
            return spec.StorageOperation(operation, "lookup", [], keys)
        case OpKind.HOST_TO_STORAGE:
            return spec.StorageOperation(operation, "store", sources, keys)
        case OpKind.STORAGE_TO_HOST:
            return spec.StorageOperation(operation, "fetch", destinations, keys)
    return spec.Copy(operation, operation.kind is OpKind.DEVICE_TO_HOST, sources, destinations)


def _part_id(part: spec.Part) -> PartId:
    assert isinstance(part.key, PartId), f"{part} is none of ours"
    return part.key


def _namespace(request: Request) -> int:
    return NAMESPACES.index(request.namespace)


def _tokens(tokens: Int32Array) -> spec.Tokens:
    return tuple(tokens.tolist())


class GatewayAdapter:
    """A `NetworkGateway`."""

    def __init__(self, config: Config, epoch: int, now: int) -> None:
        self.gateway = NetworkGateway(
            silence_s=spec.SILENCE,
            max_attempts=config["max_attempts"],
            backoff_s=spec.BACKOFF,
            request_s=config["request_s"],
            lost_s=config["request_s"],
            epoch=epoch,
            stream=config.get("stream", False),
        )
        self._connected: set[str] = set()
        self.tick(now)  # also sets `_now`

    def submit(
        self,
        name: str,
        prompt: spec.Tokens,
        max_new_tokens: int,
        seed: int,
        namespace: int,
        stop: spec.Tokens,
    ) -> None:
        """Add a request; see `spec.Gateway`, as for all methods here."""
        sampling = SamplingParams(seed=seed)
        request = Request(
            name,
            np.array(prompt, np.int32),
            max_new_tokens,
            sampling=sampling,
            stop_token_ids=stop,
            namespace=NAMESPACES[namespace],
        )
        self.gateway.add_request(request, self._now)

    def cancel(self, name: str) -> None:
        """Abort a request."""
        self.gateway.abort(name)

    def receive(self, source: str, epoch: int, message: spec.Message) -> None:
        """Pass a message on."""
        self.gateway.receive(source, epoch, message.body, self._now)

    def tick(self, now: int) -> None:
        """Advance the clock."""
        self._now = now
        self.gateway.tick(now)

    def take_messages(self) -> list[spec.Send]:
        """Return the messages to nodes, which must be connected."""
        messages = []
        for action in self.gateway.take_actions():
            match action:
                case SendToNode(peer, message):
                    assert peer in self._connected, f"the gateway has no address of {peer}"
                    messages.append(spec.Send(peer, message_of(message)))
                case Connect(peer):
                    self._connected.add(peer)
                case Disconnect(peer):
                    self._connected.remove(peer)
        return messages

    def take_told(self) -> list[spec.Told]:
        """Return the requests with new tokens."""
        advanced = self.gateway.take_advanced()
        return [spec.Told(each.request_id, tuple(each.output_tokens)) for each in advanced]

    def take_answers(self) -> list[spec.Answer]:
        """Return the requests that have ended."""
        answers = []
        for request in self.gateway.take_ended():
            name, hits = request.request_id, _total(Hits.of(request))
            if request.status is RequestStatus.FINISHED:
                tokens = tuple(map(int, request.output_tokens))
                answers.append(spec.Answer(name, tokens, "", hits))
            else:
                answers.append(spec.Answer(name, None, self.gateway.failures[name], hits))
        return answers

    def epoch_of(self, node: str) -> int | None:
        """Return the epoch of a node."""
        known = self.gateway.nodes.get(node)
        return None if known is None else known.epoch

    def state_of(self, node: str) -> Hashable:
        """Return the record of a node, and the counts."""
        return self.gateway.nodes.get(node), self.gateway.num_open, self.gateway.num_unacked

    def num_open(self) -> int:
        """Return the number of open requests."""
        return self.gateway.num_open

    def num_unacked(self) -> int:
        """Return the number of messages without acknowledgement."""
        return self.gateway.num_unacked

    def loads(self) -> dict[str, int]:
        """Return the router's loads."""
        return self.gateway.loads


class HandoffAdapter:
    """Makes our nodes and gateways.

    Args:
        config: As drawn by `radixkv.spec.harness.handoff.configuration`.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self.max_overtaken: int = config["max_overtaken"]
        self.depth: int = config.get("depth", 1)

    def gateway(self, epoch: int, now: int) -> GatewayAdapter:
        """Make a gateway without memory."""
        return GatewayAdapter(self._config, epoch, now)

    def node(self, name: str, role: spec.Role, epoch: int, now: int) -> PrefillNode | DecodeNode:
        """Make a node without memory."""
        kind: Callable[[Config, int, int], PrefillNode | DecodeNode]
        kind = PrefillNode if role == "prefill" else DecodeNode
        config = self._config
        if name == "d1":
            more = config.get("more_blocks", 0)
            config = config | {"decode_blocks": config["decode_blocks"] + more}
        return kind(config, epoch, now)


def make_factory() -> Callable[[Config], HandoffAdapter]:
    """Return a factory of adapters of our hand-off."""
    return HandoffAdapter
