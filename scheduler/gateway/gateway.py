"""The gateway: assigns attempts to nodes, and answers each request once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import inf

from ...kvcache import RequestTooLargeError
from ..errors import RequestError, RoutingError
from ..handoff.gateway_messages import MAX_NEW_TOKENS, CacheUpdate
from ..handoff.messages import AttemptKey, Hits, NodeId
from ..handoff.records import max_tokens
from ..request import MAX_STOP_TOKEN_IDS, Request, RequestStatus, TokenLogprob
from .retries import Answer, Begin, Cancel, RequestRetrier
from .router import CacheSize, Route, Router


@dataclass(frozen=True, slots=True)
class RunAttempt:
    """Let a prefill node begin an attempt, and hand it over to a decode node.

    Attributes:
        request: a copy of the client's request, named as the key.
    """

    key: AttemptKey
    request: Request
    route: Route


class Gateway:
    """Assigns requests to nodes, retries failed attempts, and collects the answers.

    It takes requests and the nodes' reports, and does no I/O: carry out `take_actions` after every
    call.

    Attributes:
        failures: reasons of failed requests, by id. These requests have the status ABORTED. A new
            request with the same id removes the entry.
        num_moved: number of times that a preempted request has moved to another decode node.
    """

    def __init__(
        self,
        *,
        max_attempts: int = 3,
        backoff_s: float = 0.05,
        request_s: float = inf,
        lost_s: float = 600.0,
        epoch: int = 0,
    ) -> None:
        """Create a gateway without nodes.

        Args:
            max_attempts, backoff_s, request_s, lost_s: see `RequestRetrier`; no time limit of
                requests by default.
            epoch: a different number in each run of a gateway whose nodes outlive it, so that it
                ignores reports on attempts of an earlier run.
        """
        self.failures: dict[str, str] = {}
        self.num_moved = 0
        self._retrier = RequestRetrier(
            max_attempts=max_attempts, backoff_s=backoff_s, request_s=request_s, lost_s=lost_s
        )
        self._router = Router()
        self._epoch = epoch
        self._serials = count()
        self._requests: dict[str, Request] = {}  # by a name that is never reused
        self._names: dict[str, str] = {}  # those names, by request id
        self._routes: dict[AttemptKey, Route] = {}
        self._avoided: dict[str, frozenset[NodeId]] = {}  # nodes without room, by name
        self._kept: dict[str, int] = {}  # output tokens in the prompts of the next attempts
        self._lost_on: dict[str, set[Route]] = {}  # pairs that lost an attempt, by name
        self._unheard: dict[NodeId, frozenset[NodeId]] = {}
        self._num_heard: dict[AttemptKey, int] = {}  # tokens of the attempts in progress
        self._num_kept: dict[AttemptKey, int] = {}  # output tokens in their prompts
        self._advanced: list[Request] = []
        self._actions: list[RunAttempt | Cancel] = []
        self._ended: list[Request] = []

    @property
    def num_open(self) -> int:
        """Number of requests that have not ended, or that `take_ended` has not returned."""
        return len(self._requests) + len(self._ended)

    @property
    def loads(self) -> dict[NodeId, int]:
        """Estimated number of blocks in progress on each node; see `Router`."""
        return self._router.loads()

    def take_actions(self) -> list[RunAttempt | Cancel]:
        """Return the actions for nodes since the last call, in order."""
        self._follow()
        actions, self._actions = self._actions, []
        return actions

    def take_ended(self) -> list[Request]:
        """Return the requests that have ended since the last call, except aborted ones."""
        self._follow()
        ended, self._ended = self._ended, []
        return ended

    def take_advanced(self) -> list[Request]:
        """Return the requests that got tokens since the last call, before their ends."""
        advanced, self._advanced = self._advanced, []
        return advanced

    def num_heard(self, key: AttemptKey) -> int | None:
        """Return how many tokens of an attempt are known; None if it is not in progress."""
        return self._num_heard.get(key)

    # Calls of clients

    def add_request(self, request: Request, now: float) -> None:
        """Add a request.

        Raises:
            RequestError: if it was added before, its id is live, or it asks for what nodes do not
                do: a guide, log probabilities of the prompt, or those of too many tokens, or for
                too many tokens or stop tokens.
        """
        if request.guide is not None:
            raise RequestError(f"request {request.request_id!r}: nodes do not guide outputs")
        if request.prompt_logprobs is not None:
            raise RequestError(
                f"request {request.request_id!r}: nodes send no log probabilities of prompts, got "
                f"prompt_logprobs {request.prompt_logprobs}"
            )
        num_top = request.logprobs
        if num_top is not None and request.max_new_tokens > (most := max_tokens(num_top)):
            raise RequestError(
                f"request {request.request_id!r}: nodes send the log probabilities of at most "
                f"{most} tokens with logprobs {num_top}, got max_new_tokens "
                f"{request.max_new_tokens}"
            )
        request_id = request.request_id
        for what, number, limit in (
            ("new tokens", request.max_new_tokens, MAX_NEW_TOKENS),
            ("stop tokens", len(request.stop_token_ids), MAX_STOP_TOKEN_IDS),
        ):
            if number > limit:
                raise RequestError(
                    f"request {request_id!r}: nodes take at most {limit} {what}, got {number}"
                )
        if request_id in self._names:
            raise RequestError(f"request {request_id!r} is already active")
        if request.status is not RequestStatus.WAITING or request.output_tokens:
            raise RequestError(f"request {request_id!r} was added before")
        name = self._names[request_id] = f"{request_id} #{self._epoch:x}.{next(self._serials)}"
        self._requests[name] = request
        self.failures.pop(request_id, None)
        self._retrier.tick(now)
        self._retrier.submit(name)

    def abort(self, request_id: str) -> bool:
        """End a request in any state; return False if no live request has this id."""
        name = self._names.get(request_id)
        if name is None:
            return False
        request = self._requests[name]
        self._retrier.cancel(name, "aborted")
        self._follow()
        self._ended.remove(request)  # the caller knows
        del self.failures[request_id]
        return True

    # Nodes

    def add_prefill(self, peer: NodeId, size: CacheSize) -> None:
        """Add a prefill node; see `Router.add_prefill`."""
        self._router.add_prefill(peer, size)

    def add_decode(self, peer: NodeId, size: CacheSize) -> None:
        """Add a decode node; see `Router.add_decode`."""
        self._router.add_decode(peer, size)

    def remove_node(self, peer: NodeId) -> None:
        """Remove a node that is gone, and retry its attempts on others.

        Raises:
            RoutingError: if there is no such node.
        """
        self._router.remove(peer)
        self._unheard.pop(peer, None)
        for key, route in list(self._routes.items()):
            if route.prefill == peer:
                self._retrier.prefill_lost(key)
            elif route.decode == peer:
                self._retrier.decode_lost(key)
        self._follow()

    def drain(self, peer: NodeId) -> None:
        """Give a node no more attempts; see `Router.drain`."""
        self._router.drain(peer)

    def num_attempts(self, peer: NodeId) -> int:
        """Return the number of attempts in progress on a node; see `Router.num_attempts`."""
        return self._router.num_attempts(peer)

    @property
    def num_lost(self) -> int:
        """Number of attempts that were lost with a node or a connection."""
        return self._retrier.num_lost

    def set_unheard(self, peer: NodeId, others: Collection[NodeId]) -> None:
        """Note which nodes a node does not hear; until it does, they get no attempt together."""
        if others:
            self._unheard[peer] = frozenset(others)
        else:
            self._unheard.pop(peer, None)

    def set_free(self, peer: NodeId, num_blocks: int) -> None:
        """Note how many blocks a decode node has for new requests; see `preempted`."""
        self._router.set_free(peer, num_blocks)

    def update_cache(self, peer: NodeId, update: CacheUpdate) -> bool:
        """Note what a node has cached; see `Router.update_cache`."""
        return self._router.update_cache(peer, update)

    def next_update(self, peer: NodeId) -> int:
        """Return the number of a node's next update of its cache."""
        return self._router.next_update(peer)

    def forget_cached(self, keep: Collection[bytes]) -> None:
        """Note that all nodes have reset their caches, except for the namespaces in keep."""
        self._router.forget_cached(keep)

    # Reports of nodes, and the clock

    def started(self, key: AttemptKey) -> None:
        """Note that D decodes an attempt."""
        self._router.computed(key)
        self._retrier.started(key)

    def progressed(
        self, key: AttemptKey, tokens: Sequence[int], records: Sequence[TokenLogprob] = ()
    ) -> None:
        """Note the next tokens of an attempt in progress, after the `num_heard` ones before.

        The request gets those that it does not have of an earlier attempt. If the two differ, which
        a client was perhaps told, the request has failed.

        Args:
            key: the attempt.
            tokens: the tokens.
            records: their log probabilities; without those that a request asks for, the attempt has
                failed.
        """
        request, start = self._requests[key.request_id], self._num_heard[key]
        start += self._num_kept[key]
        known = request.output_tokens[start : start + len(tokens)]
        if self._contradicts(key, known, tokens, start) or self._lacks(key, tokens, records):
            return
        self._num_heard[key] += len(tokens)
        for token in tokens[len(known) :]:
            request.append(token)
        self._take_records(request, records[len(known) :])
        if len(tokens) > len(known):
            self._advanced.append(request)

    def _lacks(
        self, key: AttemptKey, tokens: Sequence[int], records: Sequence[TokenLogprob]
    ) -> bool:
        """Retry an attempt whose tokens come without the log probabilities that were asked for."""
        is_wanted = self._requests[key.request_id].logprobs is not None
        if not is_wanted or len(records) == len(tokens):
            return False
        reason = f"log probabilities of {len(records)} of {len(tokens)} tokens came"
        self._retrier.decode_failed(key, reason)
        self._follow()
        return True

    def _take_records(self, request: Request, records: Sequence[TokenLogprob]) -> None:
        if request.logprobs is not None:
            request.output_logprobs += records

    def _take_counts(self, request: Request, hits: Hits, num_preemptions: int) -> None:
        """Take the counts of an attempt: the hits of the first one that has generated tokens."""
        if request.num_preemptions == 0:  # otherwise it has moved
            request.num_hit_tokens = hits.device
            request.num_host_hit_tokens = hits.host
            request.num_storage_hit_tokens = hits.storage
        request.num_preemptions += num_preemptions

    def _contradicts(
        self, key: AttemptKey, known: Sequence[int], tokens: Sequence[int], start: int = 0
    ) -> bool:
        """Fail a request if tokens of an attempt do not begin with those that it has."""
        if list(tokens[: len(known)]) == list(known):
            return False
        differs = [a != b for a, b in zip(known, tokens, strict=False)]
        place = differs.index(True) if True in differs else len(tokens)
        other = tokens[place] if place < len(tokens) else "the end"
        self._retrier.cancel(
            key.request_id,
            f"attempt {key.attempt} has {other} as output token {start + place}, and an earlier "
            f"attempt, whose tokens were told, had {known[place]}",
        )
        self._follow()
        return True

    def finished(
        self,
        key: AttemptKey,
        tokens: Sequence[int],
        hits: Hits,
        num_preemptions: int,
        records: Sequence[TokenLogprob] = (),
    ) -> None:
        """Note that D has generated all tokens of an attempt; the request gets the counts.

        For ``records``, see `progressed`.
        """
        request = self._requests.get(key.request_id)
        if request is not None and key in self._num_heard:
            kept = self._num_kept[key]
            known = request.output_tokens[kept:]
            if self._contradicts(key, known, tokens, kept) or self._lacks(key, tokens, records):
                return
            self._take_records(request, records[len(request.output_logprobs) - kept :])
            tokens = [*request.output_tokens[:kept], *tokens]
            self._take_counts(request, hits, num_preemptions)
        if request is not None:
            written = [*request.prompt.tolist(), *tokens[:-1]]
            self._router.finished(key, written, request.namespace)
        self._retrier.finished(key, tuple(tokens))
        self._end(key)

    def preempted(
        self,
        key: AttemptKey,
        tokens: Sequence[int],
        hits: Hits,
        num_preemptions: int,
        records: Sequence[TokenLogprob] = (),
    ) -> None:
        """Note that an attempt waits for blocks on D, with its KV in storage.

        If another decode node has said that it has room for all of the request, the attempt ends,
        which does not count, and the next one begins there. Its prompt includes these tokens, so
        that storage has most of its KV, but not what an earlier attempt has told besides: that may
        be the end. Otherwise nothing changes. For the arguments, see `finished`.
        """
        self.started(key)
        if key not in self._num_heard:
            return
        name, num_heard = key.request_id, self._num_heard[key]
        request = self._requests[name]
        limit = request.num_prompt_tokens + request.max_new_tokens
        crowded = self._router.without_room(limit, self._routes[key].decode)
        if crowded is None:
            return
        self.progressed(key, tokens[num_heard:], records[num_heard:])
        if key not in self._num_heard:  # they differ from those that were told
            return
        self._take_counts(request, hits, num_preemptions)
        self._avoided[name] = crowded
        self._kept[name] = self._num_kept[key] + len(tokens)
        self.num_moved += 1
        self._retrier.moved(key)
        self._follow()

    def prefill_failed(
        self,
        key: AttemptKey,
        reason: str,
        *,
        is_final: bool = False,
        is_busy: bool = False,
        is_lost: bool = False,
    ) -> None:
        """Note that P has given an attempt up.

        The next one avoids a decode node that is busy, and a pair that lost an attempt.
        """
        if key in self._routes:
            if is_final and self._kept.pop(key.request_id, 0):
                is_final, is_busy = False, True  # without the tokens so far it may fit
            if is_busy:
                self._avoided[key.request_id] = frozenset((self._routes[key].decode,))
            if is_lost:
                self._add_lost(key.request_id, self._routes[key])
        self._retrier.prefill_failed(
            key, reason, is_final=is_final, is_busy=is_busy, is_lost=is_lost
        )

    def unsent(self, key: AttemptKey, reason: str) -> None:
        """Note that P takes no more messages, which does not count; the next attempt avoids it."""
        if key in self._routes:
            avoided = self._avoided.get(key.request_id, frozenset())
            self._avoided[key.request_id] = avoided | {self._routes[key].prefill}
        self._retrier.prefill_failed(key, reason, is_busy=True)

    def decode_failed(self, key: AttemptKey, reason: str) -> None:
        """Note that D has stopped an attempt that it had started."""
        self._retrier.decode_failed(key, reason)

    def tick(self, now: float) -> None:
        """Advance the clock."""
        self._retrier.tick(now)

    # Actions of the retrier

    def _follow(self) -> None:
        while actions := self._retrier.take_actions():
            for action in actions:
                match action:
                    case Begin(key):
                        self._begin(key)
                    case Cancel(key):
                        self._end(key)
                        self._actions.append(action)
                    case Answer(name, tokens, reason):
                        self._answer(name, tokens, reason)

    def _begin(self, key: AttemptKey) -> None:
        original, kept = self._requests[key.request_id], self._kept.get(key.request_id, 0)
        sampling = original.sampling
        request = Request(
            key.request_id,
            original.tokens[: original.num_prompt_tokens + kept],
            original.max_new_tokens - kept,
            priority=original.priority,
            sampling=replace(sampling, num_continued=sampling.num_continued + kept),
            stop_token_ids=tuple(original.stop_token_ids),
            namespace=original.namespace,
            logprobs=original.logprobs,
        )
        try:
            busy = self._avoided.get(key.request_id, ())
            broken = self._broken_pairs(key.request_id)
            route = self._router.route(key, request.prompt, request.namespace, busy, broken)
        except RequestTooLargeError as large:
            self.prefill_failed(key, str(large), is_final=True)
        except RoutingError as no_node:  # one may join later
            self._retrier.put_off(key, str(no_node))
        else:
            self._routes[key] = route
            self._num_heard[key], self._num_kept[key] = 0, kept
            self._actions.append(RunAttempt(key, request, route))

    def _add_lost(self, name: str, route: Route) -> None:
        """Note a pair that lost an attempt; when all pairs have, begin anew with the last one.

        One pair would not be enough: two that are broken would take turns, for ever.
        """
        lost = self._lost_on.setdefault(name, set())
        lost.add(route)
        if not self._router.has_pair(lost):
            self._lost_on[name] = {route}

    def _broken_pairs(self, name: str) -> set[Route]:
        """Return the pairs that do not hear each other, or lost an attempt of a request."""
        lost = self._lost_on.get(name, set())
        pairs = set(lost)
        for peer, others in self._unheard.items():
            for other in others:
                pairs |= {Route(peer, other), Route(other, peer)}
        # What nodes say of each other may be old: then what the request has met counts.
        return pairs if self._router.has_pair(pairs) else lost

    def _end(self, key: AttemptKey) -> None:
        self._num_heard.pop(key, None)
        self._num_kept.pop(key, None)
        self._routes.pop(key, None)
        self._router.finished(key)

    def _answer(self, name: str, tokens: Sequence[int] | None, reason: str) -> None:
        """End a request, whose last attempt has ended, as an engine does."""
        self._avoided.pop(name, None)
        self._kept.pop(name, None)
        self._lost_on.pop(name, None)
        request = self._requests.pop(name)
        del self._names[request.request_id]
        if tokens is None:
            # Reasons from nodes contain the gateway's name for the request.
            self.failures[request.request_id] = reason.replace(name, request.request_id)
            request.status, request.finish_reason = RequestStatus.ABORTED, "abort"
        else:
            request.status = RequestStatus.FINISHED
            for token in tokens[len(request.output_tokens) :]:
                request.append(token)
            request.finish_reason = (
                "stop" if tokens and tokens[-1] in request.stop_token_ids else "length"
            )
        self._ended.append(request)
