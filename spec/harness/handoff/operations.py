"""The operations of a hand-off's world, each on a thing with a name, and their table.

==============================================  ================================================
``submit r1 prompt limit seed namespace stop``   a client submits a request; `stop` is a list of
                                                tokens that end it
``cancel r1``                                   a client cancels an unanswered request
``deliver m``, ``duplicate m``, ``drop m``      a message in the network arrives, arrives and
                                                stays, or is lost
``hold m``, ``release m``                       a copy of a message stays in the network until it
                                                is released
``cut p0``                                      all messages from and to a node are lost
``sever p0>d0``                                 from now on all messages from one end to the other
                                                are lost, and no pull between them goes on
``mend p0>d0 n``                                n units of time later they arrive again
``compute p0``                                  P plans a step, or computes a group of its layers
``decode d0``                                   D plans a step, or computes the first in flight if
                                                it can plan none
``complete d0``                                 D computes the first step in flight
``pull_write t n``                              the n-th piece of a pull is written, maybe again;
                                                without n, or with 0, all pieces are
``pull_end t ok fenced``                        a pull ends; well only if its bytes are written
``pull_fence t``, ``offer_fence attempt``       a pull can no longer write; an offer is withdrawn
``hang t``                                      a pull does not end until D cancels it
``crash p0``, ``restart p0``                    a node loses its memory; it comes back
``reboot p0``                                   both at once, so that no message is lost
``leave p0``                                    a node crashes for ever, if others remain
``new_gateway``                                 the gateway loses its memory; clients ask again
``copy c ok``                                   a copy from or to a host tier ends, or an operation
                                                on storage
``spoil v``                                     storage loses a value, or it fails its checksum
``evict p0 n``                                  a node evicts n blocks
``reset p0``                                    a node gives hand-offs up and resets its cache
``tick n``                                      n units of time pass
``flood f1 prompt limit``                       the faults stop until all requests have ended,
                                                while new ones come in every round
``partition p0+d0 r1 prompt limit cut``         other faults stop until all requests have ended, and
                                                r1, which is new; of the links other than those of
                                                p0, d0 and the gateway some are severed; `cut` is a
                                                list of their numbers
``probe r1 prompt limit n``                     after a drain, a request loses its n-th message
``interrupt r1 prompt limit seed n``            after a drain, the decode node of a request
                                                reboots when the client was told n tokens
``crowd r1 prompt limit seed n``                after a drain, n requests come at once, and
                                                nodes with little room preempt some
``drain``                                       the faults stop until everything has ended
==============================================  ================================================

The world names a message, a pull or a copy after its attempt or node. If an operation is left out
of a program, the names of the others therefore stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, Protocol, TypeVar

from ...adapters.handoff import GATEWAY, StorageOperation, request_of
from ...model.handoff import (
    VOCABULARY,
    DecodeModel,
    Outcome,
    Place,
    PrefillModel,
    Request,
    Tokens,
    cut_and_join,
)
from ...rules.handoff import X14
from ...rules.rule import require
from ..engine import Below
from ..operations import ALWAYS, Groups, Operation, Table, name_drawn, number
from .drain import drain, run_crowd, run_flood, run_interrupt, run_partition, run_probe
from .events import deliver as pass_on
from .events import send_status
from .state import Envelope, HandoffState, LiveNode, Transfer
from .steps import complete, compute, decode


class _Named(Protocol):
    name: str


Thing = TypeVar("Thing", bound=_Named)


# Clients, gateway and network


def submit(
    world: HandoffState,
    name: str,
    prompt: Sequence[int],
    max_new_tokens: int,
    seed: int,
    namespace: int = 0,
    stop: Sequence[int] = (),
) -> bool:
    """A client submits a request."""
    if name in world.requests or not prompt or max_new_tokens < 1:
        return False
    world.requests[name] = Request(tuple(prompt), max_new_tokens, seed, namespace, tuple(stop))
    _add_request(world, name)
    world.gateway.tick(world.now)
    return True


def _add_request(world: HandoffState, name: str) -> None:
    config, request = world.config, world.requests[name]
    most = _num_tokens(world)
    deadline = world.now + config["request_s"]
    world.model.submitted(name, deadline, is_hopeless=len(request.prompt) > most)
    world.gateway.submit(
        name, request.prompt, request.max_new_tokens, request.seed, request.namespace, request.stop
    )


def cancel(world: HandoffState, name: str) -> bool:
    """A client cancels a request."""
    if name not in world.model.open():
        return False
    world.gateway.cancel(name)
    world.model.answers[name] = Outcome(None, "cancelled by the client")
    return True


def new_gateway(world: HandoffState) -> bool:
    """A gateway without memory takes the place of the present one; clients ask again."""
    world.gateway = world.new_gateway_side()
    for name in world.model.open():
        _add_request(world, name)
    return True


def deliver(world: HandoffState, name: str) -> bool:
    """A message arrives."""
    envelope = _find(world.network, name)
    if envelope is not None:
        world.network.remove(envelope)
        pass_on(world, envelope)
    return envelope is not None


def duplicate(world: HandoffState, name: str) -> bool:
    """A message arrives, and stays in the network."""
    envelope = _find(world.network, name)
    if envelope is not None:
        pass_on(world, envelope)
    return envelope is not None


def drop(world: HandoffState, name: str) -> bool:
    """A message is lost."""
    envelope = _find(world.network, name)
    if envelope is not None:
        world.network.remove(envelope)
    return envelope is not None


def hold(world: HandoffState, name: str) -> bool:
    """A copy of a message stays in the network."""
    envelope = _find(world.network, name)
    if envelope is not None:
        world.network.append(replace(envelope, name=world.unique(name), is_held=True))
    return envelope is not None


def release(world: HandoffState, name: str) -> bool:
    """A copy stays in the network no longer."""
    envelope = _find(world.network, name)
    if envelope is not None:
        envelope.is_held = False
    return envelope is not None


def cut(world: HandoffState, name: str) -> bool:
    """All messages from and to a node are lost."""
    before: list[Envelope] = world.network
    world.network = [each for each in before if name not in (each.source, each.to)]
    return len(world.network) < len(before)


def sever(world: HandoffState, name: str) -> bool:
    """From now on, all messages from one end of a link to the other are lost."""
    source, _, to = name.partition(">")
    if name in world.severed or name not in links(world):
        return False
    world.severed[name] = None
    world.network = [each for each in world.network if (each.source, each.to) != (source, to)]
    return True


def mend(world: HandoffState, name: str, ticks: int) -> bool:
    """A link is whole again, and its ends connect so many units of time later."""
    if name not in world.severed:
        return False
    if ticks:
        world.severed[name] = world.now + ticks
    else:
        del world.severed[name]
    return True


def links(world: HandoffState) -> list[str]:
    """Return the directions in which messages go: between P and D, and the gateway and each."""
    ends = [(p, d) for p in world.prefill_names for d in world.decode_names]
    ends += [(GATEWAY, name) for name in world.names]
    return [f"{a}>{b}" for one, other in ends for a, b in ((one, other), (other, one))]


# The life of nodes, and the clock


def crash(world: HandoffState, name: str) -> bool:
    """A node loses its memory."""
    node = world.nodes.get(name)
    if node is None:
        return False
    if isinstance(node.model, PrefillModel):
        for transfer in world.transfers:
            if transfer.peer == name:
                transfer.crashed_source = _source(world, transfer)
    else:  # its memory is no longer registered
        world.transfers = [each for each in world.transfers if each.node != name]
    world.nodes[name] = None
    return True


def restart(world: HandoffState, name: str) -> bool:
    """A crashed node comes back."""
    if world.nodes.get(name, ...) is not None or name in world.left:
        return False
    world.nodes[name] = node = world.new_node(name)
    send_status(world, node)
    return True


def reboot(world: HandoffState, name: str) -> bool:
    """A node crashes and comes back at once."""
    return crash(world, name) and restart(world, name)


def leave(world: HandoffState, name: str) -> bool:
    """A node crashes for ever; others of its role must remain."""
    if name not in _dispensable(world) or not crash(world, name):
        return False
    world.left.add(name)
    return True


def _dispensable(world: HandoffState) -> list[str]:
    """Names of live nodes without which every role still has one."""
    return [
        node.name
        for node in world.live()
        for names in (world.prefill_names, world.decode_names)
        if node.name in names and len({*names} - world.left) > 1
    ]


def evict(world: HandoffState, name: str, num_blocks: int) -> bool:
    """A node evicts blocks."""
    node = world.nodes.get(name)
    if node is not None:
        node.target.evict(num_blocks)
    return node is not None


def reset(world: HandoffState, name: str) -> bool:
    """A node gives hand-offs up, and resets its cache as soon as none is open."""
    node = world.nodes.get(name)
    if node is not None:
        node.target.drain()
        node.is_draining = True
    return node is not None


def tick(world: HandoffState, ticks: int) -> bool:
    """Time passes."""
    world.now += ticks
    world.in_tick = True
    for link, connects_at in list(world.severed.items()):
        if connects_at is not None and connects_at <= world.now:
            del world.severed[link]
    world.gateway.tick(world.now)
    for node in world.live():
        node.target.tick(world.now)
        send_status(world, node)
        if node.is_draining:
            _try_reset(world, node)
    return True


def _try_reset(world: HandoffState, node: LiveNode) -> None:
    """Reset the cache of a node if it can; steps in flight end before."""
    if node.flights:
        is_kept = not node.target.reset()
        require(is_kept, X14, "{} resets with {} steps in flight", node.name, len(node.flights))
        while complete(world, node.name):
            pass
    if not node.flights and node.target.reset():
        node.is_draining = False
        node.model.reset(node.target.num_evicted())
        node.num_faults += 1
        world.situations["reset"] += 1


# Transfers


def copy(world: HandoffState, name: str, ok: bool) -> bool:
    """A copy between tiers ends; if ok, its destinations are written.

    A lookup or a fetch that is ok finds what storage has when it ends.
    """
    node = next((each for each in world.live() if name in each.copies), None)
    if node is None:
        return False
    copy, content = node.copies[name].copy, node.copies.pop(name).content
    if isinstance(copy, StorageOperation):
        flags = _end_storage(world, node, copy, content, ok)
        world.situations[f"{copy.kind} in storage"] += any(flags)
    else:
        flags = [ok] * len(copy.sources)
        memory = node.model.host if copy.is_down else node.model.device
        memory.content.update(content if ok else {})
        world.situations["copied"] += 1
    node.num_faults += not ok
    node.target.copied(copy.id, flags)
    return True


def _end_storage(
    world: HandoffState,
    node: LiveNode,
    operation: StorageOperation,
    content: Mapping[Place, Tokens],
    ok: bool,
) -> list[bool]:
    """Do an operation on storage if it is ok; return which values were stored or found."""
    groups = range(world.num_groups)
    if ok and operation.kind == "store":
        for key, block in zip(operation.keys, operation.blocks, strict=True):
            world.storage[key] = [content[block, group] for group in groups]
    found = [ok and key in world.storage for key in operation.keys]
    if operation.kind == "fetch":
        for key, block, is_found in zip(operation.keys, operation.blocks, found, strict=True):
            for group in groups if is_found else ():
                node.model.host.content[block, group] = world.storage[key][group]
    return found


def spoil(world: HandoffState, name: str) -> bool:
    """Storage loses a value."""
    if world.storage.pop(name, None) is None:
        return False
    world.num_lost += 1
    return True


def pull_write(world: HandoffState, name: str, piece: int = 0) -> bool:
    """A piece of a pull is written; 0: all of them."""
    transfer = _find(world.transfers, name)
    content = None if transfer is None else _source(world, transfer)
    if transfer is None or content is None or world.is_severed(transfer.node, transfer.peer):
        return False
    if piece > transfer.num_pieces:
        return False
    device = _puller(world, transfer).model.device
    sizes = world.block_size, transfer.num_skipped, device.block_size
    joined = cut_and_join(content, *sizes)
    world.situations["part cut or joined"] += device.block_size != world.block_size
    if piece:
        place = transfer.blocks, transfer.group
        device.put_piece(*place, joined, piece - 1, transfer.num_pieces)
        world.situations["late piece"] += transfer.may_fence
        world.situations["repeated piece"] += piece - 1 in transfer.arrived
    else:
        device.put(transfer.blocks, transfer.group, joined)
    world.situations["late write"] += transfer.may_fence
    transfer.arrived |= {piece - 1} if piece else set(range(transfer.num_pieces))
    return True


def pull_end(world: HandoffState, name: str, ok: bool, fenced: bool) -> bool:
    """A pull ends; one that is not fenced may still write."""
    transfer = _find(world.transfers, name)
    if transfer is None or transfer.ended or transfer.hangs or (ok and not transfer.is_whole):
        return False
    if ok or fenced:
        world.transfers.remove(transfer)
    transfer.ended = transfer.may_fence = True
    puller = _puller(world, transfer)
    if ok:
        puller.decode_model.pulled(transfer.part.key)
        puller.decode.pulled(transfer.part)
        return True
    world.situations["piece failed"] += transfer.is_torn
    if fenced:
        _fence(world, transfer)
    puller.decode.pull_failed(transfer.part, fenced)
    return True


def _fence(world: HandoffState, transfer: Transfer) -> None:
    """A pull writes no more."""
    world.situations["piece never came"] += transfer.is_torn
    _puller(world, transfer).decode_model.fenced(transfer.part.key)


def hang(world: HandoffState, name: str) -> bool:
    """A pull does not end by itself."""
    transfer = _find(world.transfers, name)
    if transfer is None or transfer.ended or transfer.hangs:
        return False
    transfer.hangs = True
    return True


def pull_fence(world: HandoffState, name: str) -> bool:
    """A pull that has ended or was cancelled writes no more."""
    transfer = _find(world.transfers, name)
    if transfer is None or not transfer.may_fence:
        return False
    world.transfers.remove(transfer)
    _fence(world, transfer)
    _puller(world, transfer).decode.pull_fenced(transfer.part)
    return True


def offer_fence(world: HandoffState, attempt: str) -> bool:
    """P serves the offers of a withdrawn attempt no more."""
    node = next((each for each in world.live() if attempt in each.withdrawn), None)
    if node is None:
        return False
    assert isinstance(node.model, PrefillModel), f"{node.name} withdraws offers"
    node.withdrawn.remove(attempt)
    node.model.fenced(attempt)
    node.prefill.fenced(attempt)
    return True


def _puller(world: HandoffState, transfer: Transfer) -> LiveNode:
    node = world.nodes[transfer.node]
    assert node is not None, "a pull of a node that has crashed"
    return node


def _source(world: HandoffState, transfer: Transfer) -> list[Tokens] | None:
    """Return the contents of P's blocks for a pull; None if P does not serve them."""
    node = world.nodes[transfer.peer]
    if node is None or transfer.crashed_source is not None:
        return transfer.crashed_source
    assert isinstance(node.model, PrefillModel), f"{node.name} serves"
    return node.model.served(transfer.part.key)


# The end


def flood(world: HandoffState, name: str, prompt: Sequence[int], max_new_tokens: int) -> bool:
    """Clients submit new requests until all current ones have ended."""
    old = world.model.open()
    is_valid = f"{name}-1" not in world.requests and prompt and max_new_tokens > 0
    if not old or not is_valid:
        return False
    run_flood(world, old, name, prompt, max_new_tokens)
    return True


def partition(
    world: HandoffState,
    name: str,
    request: str,
    prompt: Sequence[int],
    max_new_tokens: int,
    cut: Sequence[int],
) -> bool:
    """Links other than those of a pair are severed until all requests have ended, and a new one."""
    if name not in _pairs(world) or not _fits(world, request, prompt, max_new_tokens):
        return False
    ends = (GATEWAY, *name.split("+"))
    kept = {f"{one}>{other}" for one in ends for other in ends}
    for link in kept & set(world.severed):
        world.apply(["mend", link, 0])
    others = [link for link in links(world) if link not in kept]
    for link in sorted({others[place % len(others)] for place in cut if others}):
        world.apply(["sever", link])
    world.apply(["submit", request, prompt, max_new_tokens, 0, 0])
    run_partition(world)
    return True


def _pairs(world: HandoffState) -> list[str]:
    """Names of the pairs of a prefill and a decode node that have not left."""
    return [
        f"{prefill}+{decode}"
        for prefill in world.prefill_names
        for decode in world.decode_names
        if not {prefill, decode} & world.left
    ]


def probe(
    world: HandoffState, name: str, prompt: Sequence[int], max_new_tokens: int, lost: int
) -> bool:
    """All ends; then a client's request loses one of its messages."""
    if not _fits(world, name, prompt, max_new_tokens):
        return False
    run_probe(world, name, prompt, max_new_tokens, lost)
    return True


def interrupt(
    world: HandoffState,
    name: str,
    prompt: Sequence[int],
    max_new_tokens: int,
    seed: int,
    num_told: int,
) -> bool:
    """All ends; then a client that has got some tokens loses its decode node."""
    if not _fits(world, name, prompt, max_new_tokens):
        return False
    run_interrupt(world, name, prompt, max_new_tokens, seed, num_told)
    return True


def crowd(
    world: HandoffState, name: str, prompt: Sequence[int], max_new_tokens: int, seed: int, num: int
) -> bool:
    """All ends; then several requests come at once."""
    if f"{name}-1" in world.requests or not _fits(world, name, [*prompt, num], max_new_tokens):
        return False
    run_crowd(world, name, prompt, max_new_tokens, seed, num)
    return True


def _fits(world: HandoffState, name: str, prompt: Sequence[int], max_new_tokens: int) -> bool:
    """Whether a new request is valid, and each node has enough blocks for it."""
    is_valid = name not in world.requests and prompt and max_new_tokens > 0
    return bool(is_valid) and len(prompt) + max_new_tokens <= _num_tokens(world)


def _num_tokens(world: HandoffState) -> int:
    """Return how many tokens of a request each node can hold."""
    on_prefill = world.block_size * world.config["prefill_blocks"]
    on_decode = world.decode_block_size * world.config["decode_blocks"]
    return int(min(on_prefill, on_decode))


def drain_all(world: HandoffState) -> bool:
    """The faults stop; everything ends, and the nodes are emptied."""
    drain(world)
    return True


def _find(things: Iterable[Thing], name: str) -> Thing | None:
    return next((each for each in things if each.name == name), None)


# The table

MAX_FLOODED: Final = 3
"""Most requests that may overtake another one in a flood, so that it ends soon."""


def _often_first(names: list[str]) -> list[str]:
    """Names of which the first is drawn in two of three cases."""
    return [*names[:1] * (2 * len(names)), *names]


def _with_work(world: HandoffState, names: Sequence[str]) -> list[str]:
    live = [node for name in names if (node := world.nodes[name]) is not None]
    return [node.name for node in live if node.flights or node.system.has_work()]


def _is_ahead(node: LiveNode | None) -> bool:
    return node is not None and bool(node.flights)


def _refused(world: HandoffState) -> list[str]:
    """Names of open requests that a decode node has refused."""
    models = [node.model for node in world.live()]
    waiting = [name for each in models if isinstance(each, DecodeModel) for name in each.waiting]
    names = {request_of(name) for name in waiting}
    return [name for name in world.model.open() if name in names]


def _is_ask(envelope: Envelope) -> bool:
    """Whether a late copy of a message may begin an attempt again."""
    return envelope.message.kind == "Ask"


def groups(world: HandoffState) -> Groups:
    """Return the names that operations apply to now."""
    live, transfers = world.live(), world.transfers
    messages = _often_first([each.name for each in world.network if not each.is_held])
    ending = [each for each in reversed(transfers) if not each.ended and not each.hangs]
    open_pulls = _often_first([each.name for each in ending])
    return {
        ALWAYS: [""],
        "requests": world.model.open(),
        "refused": _refused(world) if world.config["max_overtaken"] <= MAX_FLOODED else [],
        "messages": messages,
        "worth a copy": messages + [each.name for each in world.network if _is_ask(each)] * 8,
        "held": [each.name for each in world.network if each.is_held],
        "nodes": world.names,
        "live": [node.name for node in live],
        "links": links(world),
        "severed": list(world.severed),
        "pairs": _pairs(world),
        "dispensable": _dispensable(world),
        "down": world.down(),
        "prefill work": _with_work(world, world.prefill_names),
        "decode work": _with_work(world, world.decode_names),
        "decode steps": [name for name in world.decode_names if _is_ahead(world.nodes[name])],
        "pulls": [each.name for each in transfers],
        "open pulls": open_pulls,
        "fenceable pulls": [each.name for each in transfers if each.may_fence],
        "withdrawn": [attempt for node in live for attempt in node.withdrawn],
        "copies": _often_first([name for node in live for name in node.copies]),
        "values": list(world.storage),
        "unequal": world.decode_names[1:] if world.config.get("more_blocks") else [],
    }


# How arguments are drawn


def new_name(world: HandoffState, name: str, below: Below) -> str:
    """The name of the next request."""
    return f"r{len(world.requests) + 1}"


def flood_name(world: HandoffState, name: str, below: Below) -> str:
    """The name of the next requests of a flood."""
    return f"f{len(world.requests) + 1}"


def short_prompt(world: HandoffState, name: str, below: Below) -> list[int]:
    """A prompt of a few tokens."""
    return prompt(world, name, below)[-3:]


def prompt(world: HandoffState, name: str, below: Below) -> list[int]:
    """A prompt that often shares a prefix with others."""
    tokens = [(1, 1, 1, 2)[below(4)]] * (1 + below(4))
    return tokens + [1 + below(2) for _ in range(below(5))]


def limit(world: HandoffState, name: str, below: Below) -> int:
    """A small limit of the output, or sometimes a larger one."""
    return 1 + below((3, 8, 16, 16)[below(4)])


def namespace(world: HandoffState, name: str, below: Below) -> int:
    """The first namespace, or sometimes the other."""
    return below(2) if below(3) == 0 else 0


def stop(world: HandoffState, name: str, below: Below) -> list[int]:
    """No tokens that end a request, or sometimes some of the vocabulary."""
    return [below(VOCABULARY) for _ in range(8)] if below(6) == 0 else []


def several_links(world: HandoffState, name: str, below: Below) -> list[int]:
    """Numbers of links."""
    return [below(16) for _ in range(below(8))]


def piece(world: HandoffState, name: str, below: Below) -> int:
    """All pieces of a pull, or the number of one of them."""
    return below(world.num_shards + 1) if world.num_shards > 1 else 0


def often(bound: int) -> Callable[[HandoffState, str, Below], bool]:
    """True, but for one in `bound` cases."""
    return lambda world, name, below: below(bound) != bound - 1


def ends_well(world: HandoffState, name: str, below: Below) -> bool:
    """True, but for one in ten cases, or one in two if only some pieces have arrived."""
    transfer = _find(world.transfers, name)
    is_torn = transfer is not None and transfer.is_torn
    return often(2 if is_torn else 10)(world, name, below)


def ticks(world: HandoffState, name: str, below: Below) -> int:
    """One unit of time, or sometimes four."""
    return (1, 1, 1, 1, 4)[below(5)]


_NAME: Final = {"name": name_drawn}

HANDOFF_TABLE: Final[Table[HandoffState]] = Table(groups, [
    Operation("submit", submit, 6, arguments={
        "name": new_name, "prompt": prompt, "max_new_tokens": limit, "seed": number(4),
        "namespace": namespace, "stop": stop}),
    Operation("deliver", deliver, 120, "messages", _NAME),
    Operation("duplicate", duplicate, 10, "messages", _NAME),
    Operation("drop", drop, 8, "messages", _NAME),
    Operation("hold", hold, 24, "worth a copy", _NAME),
    Operation("release", release, 10, "held", _NAME),
    Operation("cut", cut, 1, "nodes", _NAME),
    Operation("sever", sever, 1, "links", _NAME),
    Operation("mend", mend, 3, "severed", {"name": name_drawn, "ticks": number(8)}),
    Operation("compute", compute, 40, "prefill work", _NAME),
    Operation("decode", decode, 36, "decode work", _NAME),
    Operation("complete", complete, 6, "decode steps", _NAME),
    Operation("pull_write", pull_write, 44, "pulls", {"name": name_drawn, "piece": piece}),
    Operation("pull_end", pull_end, 40, "open pulls",
              {"name": name_drawn, "ok": ends_well, "fenced": often(2)}),
    Operation("pull_fence", pull_fence, 6, "fenceable pulls", _NAME),
    Operation("hang", hang, 2, "open pulls", _NAME),
    Operation("offer_fence", offer_fence, 4, "withdrawn", _NAME),
    Operation("copy", copy, 16, "copies", {"name": name_drawn, "ok": often(10)}),
    Operation("spoil", spoil, 1, "values", _NAME),
    Operation("tick", tick, 6, arguments={"ticks": ticks}),
    Operation("evict", evict, 2, "live", {"name": name_drawn, "num_blocks": number(4, 1)}),
    Operation("cancel", cancel, 1, "requests", _NAME),
    Operation("crash", crash, 1, "live", _NAME),
    Operation("restart", restart, 16, "down", _NAME),
    Operation("reboot", reboot, 2, "live", _NAME),
    Operation("leave", leave, 8, "dispensable", _NAME),
    Operation("reset", reset, 1, "live", _NAME),
    Operation("new_gateway", new_gateway, 4),
    Operation("flood", flood, 24, "refused", {
        "name": flood_name, "prompt": short_prompt, "max_new_tokens": number(3, 1)}),
    Operation("partition", partition, 1, "pairs", {
        "name": name_drawn, "request": new_name, "prompt": prompt, "max_new_tokens": number(3, 1),
        "cut": several_links}),
    Operation("probe", probe, 1, arguments={
        "name": new_name, "prompt": prompt, "max_new_tokens": number(3, 1), "lost": number(20)}),
    Operation("interrupt", interrupt, 1, arguments={
        "name": new_name, "prompt": prompt, "max_new_tokens": number(16, 1), "seed": number(4),
        "num_told": number(6, 1)}),
    Operation("crowd", crowd, 3, "unequal", {
        "name": new_name, "prompt": short_prompt, "max_new_tokens": number(8, 8),
        "seed": number(4), "num": number(6, 3)}),
    Operation("drain", drain_all, 0),
])  # fmt: skip
