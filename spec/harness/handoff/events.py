"""What nodes and the gateway do after each operation, and the rules about it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from ...adapters.handoff import (
    GATEWAY,
    REMEMBER,
    SILENCE,
    Action,
    Begun,
    CancelPull,
    Ended,
    Message,
    Offer,
    Pull,
    Send,
    Started,
    StorageOperation,
    Withdraw,
    request_of,
)
from ...model.handoff import DecodeModel, PrefillModel, Tokens, untagged
from ...rules.handoff import X3
from ...rules.rule import require
from .configuration import AMPLE_HOST
from .state import CopyInFlight, Envelope, HandoffState, LiveNode, Transfer


def carry_out(world: HandoffState) -> None:
    """Carry out the actions of all nodes until there are none, then the gateway's."""
    while touched := [node for node in world.live() if node.is_touched]:
        for node in touched:
            node.is_touched = False
            _begin_copies(node)  # before a step writes to their sources
            settle(node)
            _check_flights(node)
            actions = node.system.take_actions()
            node.room = _room(node, actions)
            for action in actions:
                node.is_touched = True
                _act(world, node, action)
    for send in world.gateway.take_messages():
        _send(world, GATEWAY, world.epochs[GATEWAY], send)
    for told in world.gateway.take_told():
        world.model.told(told.name, told.tokens)
        world.situations["told before the answer"] += 1
    for answer in world.gateway.take_answers():
        name, tokens, reason, hits = answer
        world.model.answered(name, tokens, hits, reason, world.now)
        world.situations["answered" if tokens is not None else "failed"] += 1


def _room(node: LiveNode, actions: Sequence[Action]) -> int:
    """Return the blocks that D has left after a grant; all, if it made several at once."""
    kinds = [action.message.kind for action in actions if isinstance(action, Send)]
    if "Grant" not in kinds:
        return 0
    counts = node.system.counts()
    return counts.available if kinds.count("Grant") == 1 else counts.num_blocks


def _check_flights(node: LiveNode) -> None:
    """Check that a node has not given up the blocks of its steps in flight."""
    if node.flights:
        counts = node.system.counts()
        node.model.kept(counts.num_blocks - counts.available)


def _begin_copies(node: LiveNode) -> None:
    model = node.model
    for copy in node.system.take_copies():
        node.num_copies += 1
        name = f"{node.name}.{node.epoch}.{node.num_copies}"
        if isinstance(copy, StorageOperation):
            content = {
                (block, group): model.host.content.get((block, group), ())
                for block in copy.blocks
                for group in range(model.num_groups)
            }
            node.copies[name] = CopyInFlight(copy, content)
            continue
        source = model.device if copy.is_down else model.host
        if not copy.is_down:
            model.filled(copy.destinations, "the host")
        content = {
            (to, group): source.content.get((block, group), ())
            for block, to in zip(copy.sources, copy.destinations, strict=True)
            for group in range(model.num_groups)
        }
        node.copies[name] = CopyInFlight(copy, content)


def _act(world: HandoffState, node: LiveNode, action: Action) -> None:
    match action:
        case Send():
            _check_sent(world, node, action.to, action.message)
            _send(world, node.name, node.epoch, action)
        case Begun(attempt):
            world.model.begun(node.name, attempt)
            world.situations["attempt"] += 1
        case Offer(part, blocks, group):
            assert isinstance(node.model, PrefillModel), f"{node.name} offers"
            node.model.offered(part.key, part.attempt, blocks, group)
            world.model.offered(part.key)
        case Withdraw(attempt):
            node.withdrawn.append(attempt)
        case Pull(peer, part, blocks, group, num_skipped):
            world.model.pulled(node.name, part.key)
            node.decode_model.pulls(part.key, part.attempt, blocks, group)
            world.situations["block sent"] += len(blocks)
            name = world.unique(f"{part.attempt}.part{part.number}")
            world.transfers.append(
                Transfer(
                    name, node.name, peer, part, list(blocks), group, num_skipped, world.num_shards
                )
            )
        case CancelPull(part):
            for transfer in world.transfers:  # a part is pulled by one node
                transfer.may_fence |= transfer.part.key == part.key
        case Started():
            _start(world, node, action)
        case Ended(attempt):
            assert isinstance(node.model, DecodeModel), f"{node.name} decodes"
            node.model.ended(attempt)


def _check_sent(world: HandoffState, node: LiveNode, to: str, message: Message) -> None:
    """Check a message of a node to another node."""
    model, attempt = node.model, message.attempt
    if isinstance(model, PrefillModel):
        if message.kind == "Commit":
            model.committed(attempt, message.position, message.hits)
            world.model.hits[attempt] = message.hits
        world.situations["busy"] += message.kind == "PrefillFailed" and message.has_no_room
        return
    peer = world.nodes.get(to)
    if peer is not None and message.kind in ("Grant", "Refuse"):
        assert isinstance(peer.model, PrefillModel), f"{node.name} answers {to}"
        peer.model.answered(attempt, message.kind == "Grant")
    name = attempt.rpartition(".")[0]
    if message.kind in ("Refuse", "Abort"):
        model.declined(attempt)
    if message.kind == "Grant":
        _check_grant(world, node, model, message)
    elif message.kind == "Abort":
        model.gave_up(attempt, message.grant)
    elif message.has_no_room and not world.config["host_blocks"]:
        prompt = world.requests[request_of(attempt)].prompt_of(attempt)
        model.refused(name, prompt, world.now)


def _check_grant(world: HandoffState, node: LiveNode, model: DecodeModel, message: Message) -> None:
    attempt, first_block = message.attempt, message.first_block
    prompt = world.requests[request_of(attempt)].kv_of(attempt)
    if not model.is_granted(attempt, message.grant):
        # With a host tier, D may have admitted it earlier, and grants when the blocks are loaded.
        if not world.config["host_blocks"]:
            model.admitted(attempt.rpartition(".")[0], node.room, world.now)
        if not (world.in_tick and world.config["host_blocks"]):
            model.published.hit(prompt, first_block * world.decode_block_size, attempt)
        if world.config["host_blocks"] >= AMPLE_HOST:
            faults = node.num_faults + world.num_lost
            is_due = model.grants_the_rest(attempt, first_block, faults, world.now)
            world.situations["storage spared a transfer"] += is_due
    model.granted(attempt, message.grant, first_block, prompt, world.now)


def _start(world: HandoffState, node: LiveNode, started: Started) -> None:
    attempt, table, num_cached, hits = started
    world.model.started(attempt)
    world.situations["started"] += 1
    world.situations["token cached on D"] += num_cached
    world.situations["token hit on P"] += hits
    model = node.model
    assert isinstance(model, DecodeModel), f"{node.name} decodes"
    model.started(attempt)
    prompt = world.requests[request_of(attempt)].kv_of(attempt)
    publish(node, prompt)
    if table:
        for group in range(world.num_groups):
            model.device.read(table, prompt, group, attempt)


def settle(node: LiveNode) -> None:
    """Forget the published prefixes that a node has evicted."""
    if node.model.published.settle(node.system.num_evicted(), node.num_cached):
        node.has_evicted = True
        node.num_faults += 1


def publish(node: LiveNode, tokens: tuple[int, ...]) -> None:
    """A node publishes the full blocks of tokens whose KV it has."""
    settle(node)
    num_cached = node.num_cached(tokens)
    if node.has_evicted:  # perhaps these
        tokens = tokens[:num_cached]
    node.model.published.add(tokens, num_cached)


def check_cached(node: LiveNode, kv: Tokens) -> None:
    """Read what the cache of a node finds of some tokens, in all groups of layers."""
    namespace, tokens = untagged(kv[: node.num_cached(kv)])
    table = node.system.cached_blocks(tokens, namespace)
    for group in range(node.model.num_groups):
        node.model.device.read(table, kv[: len(tokens)], group, f"the cache of {node.name}")


# Messages


def _send(world: HandoffState, source: str, epoch: int, send: Send) -> None:
    to, message = send
    attempt, kind = message.attempt, message.kind
    if GATEWAY in (source, to):
        sender = f"{source} in epoch {epoch}"
        if message.is_repeated:
            world.model.sent(sender, attempt, kind)
        if message.follows:
            world.model.followed(attempt)
        for each in message.reports:
            world.model.reported(sender, each)
        if message.cancels:
            world.model.cancelled(attempt)
        if kind == "RunPrefill":
            world.model.runs(request_of(attempt), attempt, message.tokens)
            num_prompt = len(world.requests[request_of(attempt)].prompt)
            world.situations["moved"] += len(message.tokens) > num_prompt
        elif message.is_final:
            world.requests[request_of(attempt)].is_hopeless = True
    name = world.unique(f"{attempt}.{kind}.{source}")
    if f"{source}>{to}" in world.severed:
        return
    world.network.append(Envelope(name, source, to, epoch, world.now, message))


def send_status(world: HandoffState, node: LiveNode) -> None:
    """Send a node's status to the gateway, unless one is in the network."""
    if f"{node.name}>{GATEWAY}" in world.severed:
        return
    sent = ((each.source, each.epoch) for each in world.network if each.is_status)
    if (node.name, node.epoch) not in sent:
        status = node.system.status()
        name = world.unique(f"{node.name}.{status.kind}")
        world.network.append(Envelope(name, node.name, GATEWAY, node.epoch, world.now, status))


def deliver(world: HandoffState, envelope: Envelope) -> None:
    """Pass a message to its receiver."""
    message, age = envelope.message, world.now - envelope.sent_at
    if message.kind == "RunPrefill" and age >= REMEMBER - SILENCE:
        return  # a connection does not hold it until P has forgotten the other copies
    if envelope.to == GATEWAY:
        _deliver_to_gateway(world, envelope)
    else:
        node = world.nodes.get(envelope.to)
        if node is None:
            return
        if message.kind == "DeliveryAck":
            sender = f"{node.name} in epoch {node.epoch}"
            world.model.acknowledged(sender, message.attempt, message.of)
        if message.kind == "Ask":
            _note_stored(world, node, message.attempt)
        node.target.receive(envelope.source, message)
    world.situations[f"arrived: {message.kind}"] += 1


def _note_stored(world: HandoffState, node: LiveNode, attempt: str) -> None:
    """Note what storage holds of a prompt that D is asked about."""
    assert isinstance(node.model, DecodeModel), f"{node.name} is asked"
    request = world.requests[request_of(attempt)]
    keys = node.system.storage_keys(request.prompt_of(attempt), request.namespace)
    num_stored = len([*takewhile(world.storage.__contains__, keys)])
    node.model.asked(attempt, num_stored, node.num_faults + world.num_lost, world.now)


def _deliver_to_gateway(world: HandoffState, envelope: Envelope) -> None:
    gateway, source, message = world.gateway, envelope.source, envelope.message
    known = gateway.epoch_of(source)
    if message.kind == "DeliveryAck" and known == envelope.epoch:
        sender = f"{GATEWAY} in epoch {world.epochs[GATEWAY]}"
        world.model.acknowledged(sender, message.attempt, message.of)
    is_old = known is not None and envelope.epoch < known
    request = world.requests.get(request_of(message.attempt))
    if message.is_failure and request is not None and message.attempt not in request.moved:
        request.failed.add(message.attempt)
    if message.kind == "Preempted":
        world.model.preempted(request_of(message.attempt), message.attempt, message.tokens)
    before = gateway.state_of(source)
    gateway.receive(source, envelope.epoch, message)
    if is_old:
        world.situations["message of an old epoch"] += 1
        is_same = gateway.state_of(source) == before and not gateway.take_messages()
        require(is_same, X3, "{} of epoch {} of {}", message.kind, envelope.epoch, source)
