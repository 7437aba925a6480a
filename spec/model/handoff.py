"""The model of a hand-off: what requests, attempts, messages and memories may do.

It knows nothing of queues, timeouts or states of a protocol. It keeps the little that the rules
speak of: which attempts have begun and started, what was acknowledged, what each client is owed,
the prefix whose KV each block holds, and which prefixes a node has published. Each method is an
event, and asserts the rules about it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final, NamedTuple, TypeAlias

from ..rules import handoff as rules
from ..rules.rule import require

Tokens: TypeAlias = tuple[int, ...]
Place: TypeAlias = tuple[int, int]
"""A block and a group of layers."""

VOCABULARY: Final = 50


# Clients


def next_token(seed: int, tokens: Tokens) -> int:
    """The language model: a token that depends on the seed, the position and all tokens before."""
    return (seed * 31 + len(tokens) * 7 + sum(tokens)) % VOCABULARY


def tagged(namespace: int, tokens: Tokens) -> Tokens:
    """Return tokens that stand for their KV, which differs from that in other namespaces."""
    return tuple([namespace * VOCABULARY + token for token in tokens])


def untagged(tokens: Tokens) -> tuple[int, Tokens]:
    """Return the namespace and the tokens that were `tagged`."""
    namespace = max(tokens, default=0) // VOCABULARY
    return namespace, tuple([token % VOCABULARY for token in tokens])


@dataclass
class Request:
    """A client's request.

    Attributes:
        namespace: requests share KV only within a namespace.
        stop: tokens that end it.
        deadline: time until which it must be answered.
        attempts: its attempts by the present gateway.
        failed: those that a node has given up, as the gateway has heard.
        is_hopeless: whether no attempt can succeed.
        prompts: tokens that P computes, by attempt.
        moved: attempts that the gateway has heard to be preempted, and may have ended for that.
        num_reported: most output tokens that the gateway has heard of a preempted attempt.
        preempted: the attempt that said so last.
    """

    prompt: Tokens
    max_new_tokens: int
    seed: int
    namespace: int = 0
    stop: Tokens = ()
    deadline: int = 0
    attempts: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    is_hopeless: bool = False
    prompts: dict[str, Tokens] = field(default_factory=dict)
    moved: set[str] = field(default_factory=set)
    num_reported: int = 0
    preempted: str = ""

    @property
    def kv(self) -> Tokens:
        """The KV of the prompt; see `tagged`."""
        return tagged(self.namespace, self.prompt)

    def prompt_of(self, attempt: str) -> Tokens:
        """Return the tokens that P computes in an attempt."""
        return self.prompts.get(attempt, self.prompt)

    def kv_of(self, attempt: str) -> Tokens:
        """Return the KV of these tokens."""
        return tagged(self.namespace, self.prompt_of(attempt))

    def output(self) -> Tokens:
        """Return the tokens that one node alone generates."""
        tokens = self.prompt
        for _ in range(self.max_new_tokens):
            tokens += (next_token(self.seed, tokens),)
            if tokens[-1] in self.stop:
                break
        return tokens[len(self.prompt) :]


class Outcome(NamedTuple):
    """What a client got: tokens, or the reason of a failure."""

    tokens: Tokens | None
    reason: str


class Requests:
    """The requests, their attempts and answers, and the messages that must not be repeated.

    Attributes:
        requests: by name; answers: those that have ended.
        hits: prompt tokens that P had cached, by computed attempt.
    """

    def __init__(self, max_attempts: int) -> None:
        self.requests: dict[str, Request] = {}
        self.answers: dict[str, Outcome] = {}
        self.hits: dict[str, int] = {}
        self._max_attempts = max_attempts
        self._begun: dict[str, str] = {}
        self._started: set[str] = set()
        self._offered: set[Hashable] = set()
        self._has_arrived: dict[Hashable, bool] = {}  # of messages, as their senders know
        self._followed: set[str] = set()
        self._cancelled: set[str] = set()
        self._told: dict[str, Tokens] = {}

    def open(self) -> list[str]:
        """Return the names of the requests without an answer."""
        return [name for name in self.requests if name not in self.answers]

    def submitted(self, name: str, deadline: int, is_hopeless: bool) -> None:
        """A gateway that does not know a request takes it: its attempts count from here on."""
        request = self.requests[name]
        request.deadline, request.is_hopeless = deadline, is_hopeless
        request.attempts, request.failed = set(), set()
        request.moved, request.num_reported, request.preempted = set(), 0, ""
        self._told.pop(name, None)

    def runs(self, name: str, attempt: str, prompt: Tokens) -> None:
        """The gateway asks P to begin an attempt, perhaps again."""
        request = self.requests[name]
        due = request.prompt + request.output()[: request.num_reported]
        num_kept = len(prompt) - len(request.prompt)
        is_right = num_kept >= 0 and prompt == due[: len(prompt)]
        require(is_right, rules.X30, "{} computes {} of {}", attempt, prompt, due)
        last = request.preempted
        is_left = len(prompt) <= len(request.prompt_of(last)) or last in self._cancelled
        require(is_left, rules.X31, "{} begins, and {} goes on", attempt, last)
        request.attempts.add(attempt)
        request.prompts[attempt] = prompt

    def preempted(self, name: str, attempt: str, tokens: Tokens) -> None:
        """The gateway hears that an attempt waits for blocks, and which tokens it has."""
        request = self.requests[name]
        if attempt in request.attempts:
            num_kept = len(request.prompt_of(attempt)) - len(request.prompt)
            request.num_reported = max(request.num_reported, num_kept + len(tokens))
            request.moved.add(attempt)
            request.preempted = attempt

    def cancelled(self, attempt: str) -> None:
        """The gateway tells a node to end an attempt."""
        self._cancelled.add(attempt)

    def begun(self, node: str, attempt: str) -> None:
        """P begins an attempt."""
        first = self._begun.get(attempt)
        self._begun[attempt] = node
        require(first is None, rules.X1, "{} begins {}, as {} did", node, attempt, first)

    def started(self, attempt: str) -> None:
        """D starts to decode an attempt."""
        require(attempt not in self._started, rules.X12, "{} starts twice", attempt)
        self._started.add(attempt)

    def sent(self, sender: str, attempt: str, kind: str) -> None:
        """A node, or the gateway, sends a message that it repeats until it is acknowledged."""
        known = self._has_arrived.setdefault((sender, attempt, kind), False)
        require(not known, rules.X2, "{} knows that {} of {} has arrived", sender, kind, attempt)

    def acknowledged(self, sender: str, attempt: str, kind: str) -> None:
        """The sender of a message hears that it has arrived."""
        if (sender, attempt, kind) in self._has_arrived:
            self._has_arrived[sender, attempt, kind] = True

    def offered(self, part: Hashable) -> None:
        """P offers a part to one epoch of D."""
        self._offered.add(part)

    def pulled(self, node: str, part: Hashable) -> None:
        """D begins to pull a part."""
        require(part in self._offered, rules.X10, "{} pulls {}", node, part)

    def followed(self, attempt: str) -> None:
        """The gateway asks D for the tokens of an attempt before its end."""
        self._followed.add(attempt)

    def reported(self, node: str, attempt: str) -> None:
        """D reports tokens of an attempt before its end."""
        require(attempt in self._followed, rules.X27, "{} reports tokens of {}", node, attempt)

    def told(self, name: str, tokens: Tokens) -> None:
        """A client is told all tokens so far, before its answer."""
        before, output = self._told.get(name, ()), self.requests[name].output()
        is_longer = before == tokens[: len(before)] and tokens == output[: len(tokens)]
        require(is_longer, rules.X26, "{} is told {}, {} before", name, tokens, before)
        self._told[name] = tokens

    def num_told(self, name: str) -> int:
        """Return how many tokens a client was told that waits for more."""
        return 0 if name in self.answers else len(self._told.get(name, ()))

    def answered(self, name: str, tokens: Tokens | None, hits: int, reason: str, now: int) -> None:
        """A client gets its answer: tokens, or the reason of a failure."""
        request = self.requests[name]
        require(name not in self.answers, rules.X17, "{} has two answers", name)
        self.answers[name] = Outcome(tokens, reason)
        if tokens is None:
            failed = len(request.failed)
            is_over = request.is_hopeless or now >= request.deadline or failed >= self._max_attempts
            require(is_over, rules.X18, "{} fails after {} attempts: {}", name, failed, reason)
            return
        require(tokens == request.output(), rules.X16, "{} gets {}", name, tokens)
        found = {self.hits.get(each) for each in self._started & request.attempts}
        require(hits in found, rules.X6, "{} has {} hits, its attempts {}", name, hits, found)


# Memories


def prefixes(tokens: Tokens, block_size: int) -> list[Tokens]:
    """Return the prefixes that end with each block, also with a last one that is not whole."""
    ends = range(block_size, len(tokens) + block_size, block_size)
    return [tokens[:end] for end in ends]


def cut_and_join(
    sent: Sequence[Tokens], sent_size: int, num_skipped: int, block_size: int
) -> list[Tokens]:
    """Return the contents of blocks that get the tokens of others, of another size.

    A block that gets tokens of different prefixes holds ().

    Args:
        sent: contents of consecutive blocks of sent_size tokens.
        sent_size: tokens in a block that is sent.
        num_skipped: leading tokens that are not written.
        block_size: tokens in a block that is written.
    """
    if sent_size == block_size and not num_skipped:
        return list(sent)
    num_tokens = (len(sent) - 1) * sent_size + (len(sent[-1]) - 1) % sent_size + 1
    content = []
    for first in range(num_skipped, num_tokens, block_size):
        stop = min(first + block_size, num_tokens)
        end = -(-stop // sent_size)
        *before, last = sent[first // sent_size : end]
        is_one = all(each and last[: len(each)] == each for each in before)
        num_behind = min(end * sent_size, num_tokens) - stop
        content.append(last[: len(last) - num_behind] if is_one else ())
    return content


class Torn(tuple[int, ...]):
    """The content of a block whose shards differ: as many tokens as all of them agree on.

    Attributes:
        shards: the content of each shard, that is of some of the heads.
    """

    shards: tuple[Tokens, ...]


def join_shards(shards: Sequence[Tokens]) -> Tokens:
    """Return the content of a block from that of each of its shards."""
    first, *others = set(shards)
    if not others:
        return first
    columns = zip(*shards, strict=False)
    torn = Torn(each[0] for each in takewhile(lambda each: len(set(each)) == 1, columns))
    torn.shards = tuple(shards)
    return torn


def _pairs(blocks: Sequence[int], content: Sequence[Tokens]) -> Iterator[tuple[int, Tokens]]:
    """Yield the blocks that are written, each with its new content."""
    is_equal = len(blocks) == len(content)
    require(is_equal, rules.X8, "{} blocks are sent into {}", len(content), len(blocks))
    yield from zip(blocks, content, strict=True)


class Memory:
    """The prefix whose KV each block of a tier holds, in each group of layers."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.content: dict[Place, Tokens] = {}

    def at(self, blocks: Sequence[int], group: int) -> list[Tokens]:
        """Return the contents of some blocks; () for one that was never written."""
        return [self.content.get((block, group), ()) for block in blocks]

    def put(self, blocks: Sequence[int], group: int, content: Sequence[Tokens]) -> None:
        """Overwrite some blocks."""
        for block, each in _pairs(blocks, content):
            self.content[block, group] = each

    def put_piece(
        self,
        blocks: Sequence[int],
        group: int,
        content: Sequence[Tokens],
        shard: int,
        num_shards: int,
    ) -> None:
        """Overwrite one of the shards of some blocks."""
        for block, each in _pairs(blocks, content):
            before = self.content.get((block, group), ())
            shards = [*before.shards] if isinstance(before, Torn) else [before] * num_shards
            shards[shard] = each
            self.content[block, group] = join_shards(shards)

    def write(
        self, table: Sequence[int], num_shared: int, tokens: Tokens, start: int, group: int
    ) -> None:
        """Compute the KV of the tokens from start on; shared blocks are not written."""
        first = max(start // self.block_size, num_shared)
        for block, prefix in self._blocks(table, tokens)[first:]:
            self.content[block, group] = prefix

    def read(self, table: Sequence[int], tokens: Tokens, group: int, reader: str) -> None:
        """Read the KV of some tokens."""
        for block, prefix in self._blocks(table, tokens):
            found = self.content.get((block, group), ())
            is_own = found[: len(prefix)] == prefix
            require(is_own, rules.X8, "{} reads {} instead of {}", reader, found, prefix)

    def _blocks(self, table: Sequence[int], tokens: Tokens) -> list[tuple[int, Tokens]]:
        has_blocks = len(table) * self.block_size >= len(tokens)
        require(has_blocks, rules.X8, "{} tokens are in {} blocks", len(tokens), len(table))
        return list(zip(table, prefixes(tokens, self.block_size), strict=False))


class Published:
    """The prefixes that a node has published on its device and not evicted.

    A node tells only how many blocks it has evicted, not which. A prefix may be missing if, and
    only if, no more prefixes are missing than blocks were evicted.
    """

    def __init__(self, block_size: int, evicted: int = 0) -> None:
        self._size = block_size
        self._prefixes: set[Tokens] = set()
        self._evicted = evicted

    def _path(self, tokens: Tokens) -> list[Tokens]:
        return prefixes(tokens, self._size)[: len(tokens) // self._size]

    def add(self, tokens: Tokens, num_cached: int) -> None:
        """A node publishes the full blocks of tokens whose KV it has, and finds num_cached."""
        path = self._path(tokens)
        full = len(path) * self._size
        require(num_cached >= full, rules.X5, "{} of {} are found: {}", num_cached, full, tokens)
        self._prefixes.update(path)

    def settle(self, evicted: int, num_cached: Callable[[Tokens], int]) -> bool:
        """Forget what is evicted: at most as many prefixes as the node says, since the last time.

        Args:
            evicted: number of blocks that the node has evicted in all.
            num_cached: how many leading tokens the node finds.

        Returns:
            Whether anything was evicted.
        """
        if evicted == self._evicted:
            return False
        gone = {each for each in self._prefixes if num_cached(each) < len(each)}
        num_evicted, self._evicted = evicted - self._evicted, evicted
        why = "{} published prefixes are gone, {} blocks were evicted"
        require(len(gone) <= num_evicted, rules.X5, why, len(gone), num_evicted)
        self._prefixes -= gone
        return True

    def hit(self, tokens: Tokens, num_hit: int, reader: str) -> None:
        """A request is admitted with a hit."""
        due = self._size * len([*takewhile(self._prefixes.__contains__, self._path(tokens))])
        require(num_hit >= due, rules.X5, "{} hits {} of {} published tokens", reader, num_hit, due)


# Nodes


@dataclass(eq=False)
class NodeModel:
    """What one life of a node has computed, offered, granted and published.

    Attributes:
        device, host: its memories.
        published: prefixes that can be hit on the device.
        flights: of each step in flight, in order, the blocks that each attempt reads or writes.
    """

    name: str
    num_groups: int
    block_size: int

    def __post_init__(self) -> None:
        self.device, self.host = Memory(self.block_size), Memory(self.block_size)
        self.flights: deque[dict[str, Sequence[int]]] = deque()
        self.reset(0)

    # Steps in flight

    def launched(self, tables: dict[str, Sequence[int]]) -> None:
        """A step is planned: by attempt, the blocks that it reads or writes."""
        self.flights.append(tables)

    def completed(self) -> None:
        """The first step in flight has ended."""
        self.flights.popleft()

    def _in_flight(self) -> set[int]:
        return {block for tables in self.flights for table in tables.values() for block in table}

    def kept(self, num_blocks: int) -> None:
        """The node has so many blocks that it cannot give to others."""
        named, why = self._in_flight(), "{} has {} blocks in steps in flight, and keeps {}"
        require(len(named) <= num_blocks, rules.X14, why, self.name, len(named), num_blocks)

    def filled(self, blocks: Sequence[int], source: str) -> None:
        """A transfer or a copy from the host will write some blocks."""
        named = sorted(self._in_flight().intersection(blocks))
        require(not named, rules.X14, "{} fills {}, which steps in flight use", source, named)

    def reset(self, evicted: int) -> None:
        """All KV is dropped; the node has evicted so many blocks until now."""
        self.device.content.clear()
        self.host.content.clear()
        self.published = Published(self.block_size, evicted)


@dataclass(eq=False)
class PrefillModel(NodeModel):
    """P: it computes prompts, offers their blocks, and counts its hits.

    Attributes:
        computed: number of computed tokens by attempt.
        offers: attempt, blocks, group and contents of each part that it serves.
    """

    computed: Counter[str] = field(default_factory=Counter)
    offers: dict[Hashable, tuple[str, list[int], int, list[Tokens]]] = field(default_factory=dict)
    _hits: dict[str, int] = field(default_factory=dict)  # at most, of admitted attempts
    _on_device: dict[str, int] = field(default_factory=dict)  # tokens of the blocks that they hit
    _is_granted: dict[str, bool] = field(default_factory=dict)  # of those that asked
    _begun: dict[str, int] = field(default_factory=dict)  # hits by attempt with a first chunk

    def admitted(self, attempt: str, tokens: Tokens, on_device: int) -> None:
        """An attempt gets its blocks; it may hit all but its last token, in all tiers together."""
        self._hits[attempt], self._on_device[attempt] = len(tokens) - 1, on_device

    def answered(self, attempt: str, is_grant: bool) -> None:
        """D answers an attempt that asked it."""
        self._is_granted[attempt] = is_grant or self._is_granted.get(attempt, False)

    def computes(self, attempt: str, start: int) -> None:
        """An attempt computes a chunk; its first one starts after its hits."""
        self._begun.setdefault(attempt, start)

    def counted(self, hits: int, on_device: int) -> None:
        """P says how many hits it has counted, and how many its cache has.

        An attempt without a chunk may have been counted if D has granted, or P did not ask.
        """
        may = [
            each
            for each in self._hits
            if each not in self._begun and self._is_granted.get(each, True)
        ]
        for counted, least, of_others in (
            (hits, sum(self._begun.values()), self._hits),
            (on_device, sum(self._on_device[each] for each in self._begun), self._on_device),
        ):
            most = least + sum(of_others[each] for each in may)
            is_right, why = least <= counted <= most, "{} counts {} hits of {} to {}"
            require(is_right, rules.X7, why, self.name, counted, least, most)

    def committed(self, attempt: str, position: int, hits: int) -> None:
        """P has the first token of a prompt."""
        computed = self.computed[attempt]
        is_right, why = hits + computed == position, "{} has {} hits, {} computed, of {}"
        require(is_right, rules.X6, why, attempt, hits, computed, position)

    def offered(self, key: Hashable, attempt: str, blocks: Sequence[int], group: int) -> None:
        """P serves a part from now on."""
        content = self.device.at(blocks, group)
        self.offers[key] = attempt, list(blocks), group, content

    def served(self, key: Hashable) -> list[Tokens] | None:
        """Return the contents of a part that somebody reads; None if it is not served."""
        if key not in self.offers:
            return None
        attempt, blocks, group, offered = self.offers[key]
        content = self.device.at(blocks, group)
        require(content == offered, rules.X11, "blocks {} of {} hold {}", blocks, attempt, content)
        return content

    def fenced(self, attempt: str) -> None:
        """P serves an attempt no more."""
        for key in [key for key, offer in self.offers.items() if offer[0] == attempt]:
            del self.offers[key]


class _Grant(NamedTuple):
    number: int
    first_block: int
    prompt: Tokens


class _Pull(NamedTuple):
    attempt: str
    group: int
    blocks: frozenset[int]


class Asked(NamedTuple):
    """A request that asks for the first time.

    Attributes:
        num_stored: leading full blocks of its prompt that storage holds.
        faults: of storage and caches until then.
        at: the time.
    """

    num_stored: int
    faults: int
    at: int


@dataclass
class Refused:
    """A refused request.

    Attributes:
        num_blocks: blocks of its prompt.
        asked_at: when it asked last.
        patience: how long after that it may ask again without losing its turn.
    """

    num_blocks: int
    asked_at: int
    patience: int
    num_overtaken: int = 0


@dataclass(eq=False)
class DecodeModel(NodeModel):
    """D: it grants blocks, receives prompts, and admits in a fair order.

    Attributes:
        max_overtaken: largest number of later requests admitted before a refused one.
        patience: shortest time for which a refused request is awaited.
        memory: time for which a granted attempt is known.
        waiting: refused requests, in order of the first refusal.
    """

    max_overtaken: int
    patience: int
    memory: int
    waiting: dict[str, Refused] = field(default_factory=dict)
    _grants: dict[str, _Grant] = field(default_factory=dict)
    _newest: dict[str, tuple[int, int]] = field(default_factory=dict)  # attempt and when
    _decoding: set[str] = field(default_factory=set)
    _asked: dict[str, Asked] = field(default_factory=dict)
    _pulls: dict[Hashable, _Pull] = field(default_factory=dict)  # those that may write
    _lacking: dict[str, set[Hashable]] = field(default_factory=dict)  # parts, by attempt

    # Pulls

    def pulls(self, key: Hashable, attempt: str, blocks: Sequence[int], group: int) -> None:
        """D begins to pull a part into some blocks, in one group of layers."""
        why = "{} is pulled into blocks {}, as {} is"
        for each in self._pulls.values():
            both = sorted(each.blocks.intersection(blocks))
            is_other = (each.attempt, each.group) != (attempt, group)
            may_share = not both or (each.attempt == attempt and is_other)
            require(may_share, rules.X33, why, attempt, both, each.attempt)
        super().filled(blocks, attempt)
        self._pulls[key] = _Pull(attempt, group, frozenset(blocks))
        self._lacking.setdefault(attempt, set()).add(key)

    def pulled(self, key: Hashable) -> None:
        """A pull has ended well: all pieces have arrived, and it writes no more."""
        self._lacking.get(self._pulls.pop(key).attempt, set()).discard(key)

    def fenced(self, key: Hashable) -> None:
        """A pull that has failed or was cancelled writes no more."""
        self._pulls.pop(key, None)

    def filled(self, blocks: Sequence[int], source: str) -> None:
        """See `NodeModel.filled`."""
        self._check_writers(source, blocks)
        super().filled(blocks, source)

    def launched(self, tables: dict[str, Sequence[int]]) -> None:
        """See `NodeModel.launched`."""
        for attempt, table in tables.items():
            self._check_writers(attempt, table)
        super().launched(tables)

    def _check_writers(self, user: str, blocks: Sequence[int]) -> None:
        for each in self._pulls.values():
            both = sorted(each.blocks.intersection(blocks))
            require(not both, rules.X33, "{} uses blocks {} of a pull of {}", user, both, each[0])

    def asked(self, attempt: str, num_stored: int, faults: int, now: int) -> None:
        """P asks for an attempt, perhaps again."""
        self._asked.setdefault(attempt, Asked(num_stored, faults, now))

    def declined(self, attempt: str) -> None:
        """D refuses an attempt or gives it up: what it asks next is new."""
        self._asked.pop(attempt, None)

    def grants_the_rest(self, attempt: str, first_block: int, faults: int, now: int) -> bool:
        """D grants the blocks from first_block on; return whether storage had to have a share.

        Args:
            attempt: an attempt that is granted for the first time.
            first_block: first block that P sends.
            faults: losses and failures so far of storage and of D's tiers, which excuse D.
            now: the time.
        """
        asked = self._asked.pop(attempt, None)
        if asked is None or asked.faults != faults or now - asked.at >= self.patience:
            return False
        why = "{} is granted from block {}, storage holds {}"
        is_right = first_block >= asked.num_stored
        require(is_right, rules.X29, why, attempt, first_block, asked.num_stored)
        return asked.num_stored > 0

    def is_granted(self, attempt: str, number: int) -> bool:
        """Whether a grant is a copy of an earlier one."""
        grant = self._grants.get(attempt)
        return grant is not None and grant.number == number

    def granted(
        self, attempt: str, number: int, first_block: int, prompt: Tokens, now: int
    ) -> None:
        """D reserves blocks for a prompt, and has those before first_block."""
        self._check_newest(attempt, now)
        size = self.block_size
        for other, grant in self._grants.items():
            half = -(-max(len(prompt), len(grant.prompt)) // (2 * size))
            first = max(first_block, grant.first_block)
            stop = size * max(first + 1, half)
            is_same = len(prompt) >= stop and prompt[:stop] == grant.prompt[:stop]
            why = "block {} is sent for {} and {}"
            require(other == attempt or not is_same, rules.X9, why, first, other, attempt)
        self._grants[attempt] = _Grant(number, first_block, prompt)

    def _check_newest(self, attempt: str, now: int) -> None:
        request, _, text = attempt.rpartition(".")
        number, (newest, granted_at) = int(text), self._newest.get(request, (0, now))
        in_order = newest <= number or now - granted_at >= self.memory
        require(in_order, rules.X4, "{} is granted after {}", attempt, newest)
        older = f"{request}.{newest}"
        is_open = older in self._grants and older != attempt
        require(not is_open, rules.X4, "{} is granted beside {}", attempt, older)
        self._newest[request] = number, now

    def gave_up(self, attempt: str, number: int) -> None:
        """D gives a grant up."""
        if self.is_granted(attempt, number):
            del self._grants[attempt]
            self._lacking.pop(attempt, None)

    def started(self, attempt: str) -> None:
        """D has received all of a prompt."""
        lacking = len(self._lacking.pop(attempt, ()))
        require(not lacking, rules.X32, "{} starts, and lacks {} parts", attempt, lacking)
        self._grants.pop(attempt, None)
        self._decoding.add(attempt)

    def ended(self, attempt: str) -> None:
        """D reports the end of an attempt."""
        require(attempt in self._decoding, rules.X15, "{} ends, and does not decode", attempt)
        self._decoding.remove(attempt)
        steps = sum(attempt in tables for tables in self.flights)
        require(not steps, rules.X15, "{} ends, and {} steps in flight compute it", attempt, steps)

    # Fairness

    def refused(self, name: str, prompt: Tokens, now: int) -> None:
        """D has no room for a request, which may ask again."""
        num_blocks = -(-len(prompt) // self.block_size)
        each = self.waiting.setdefault(name, Refused(num_blocks, now, self.patience))
        each.patience = max(each.patience, 2 * (now - each.asked_at))
        each.asked_at = now

    def admitted(self, name: str, room: int, now: int) -> None:
        """D admits a request, before those that it refused earlier, and has room for others."""
        for other, each in self.waiting.items():
            if other == name:
                break
            if now - each.asked_at >= each.patience:
                continue
            each.num_overtaken += 1
            can_wait = each.num_overtaken <= self.max_overtaken or room >= each.num_blocks
            why = "{} is the {}. admitted before {}, and leaves {} blocks"
            require(can_wait, rules.X19, why, name, each.num_overtaken, other, room)
        self.waiting.pop(name, None)
