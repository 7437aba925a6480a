"""Copies between the tiers below a scheduler under test, on the virtual executor."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from ...adapters.scheduler_target import SchedulerTarget
from ...model.scheduler import Request, SchedulerModel, Step
from ...rules.rule import require
from ...rules.scheduler import Q35, Q38
from ...rules.tiers import T10
from ..tiers.executor import Executor, Flight, leading

LATE: Final = 4
"""Steps per copy that ends, when copies are late."""

ROUNDS: Final = 100
"""Rounds after the last request in which all copies end."""


class Copies:
    """The copies of a scheduler's cache, and what they are to its requests.

    Attributes:
        executor: ghost memory of host and storage, and the copies in flight.
        arrived: number of tokens that are there after the load of a request, by name.
        unasked: waiting requests with blocks that neither device nor host holds, and for which
            storage was not asked.
    """

    def __init__(self, target: SchedulerTarget, model: SchedulerModel, has_storage: bool) -> None:
        self.target = target
        self.model = model
        self.has_storage = has_storage
        self.executor = Executor(model.device)
        self.arrived: dict[str, int] = {}
        self.unasked: set[str] = set()
        self._age = 0
        self._namespaces: dict[str, bytes] = {}
        self._keys: dict[str, dict[bytes, None]] = {}

    # Requests

    def track(self, request: Request, namespace: bytes) -> None:
        """Note the storage keys of a request that is queued, and whether storage must be asked."""
        self._namespaces[request.name] = namespace
        self._keys.pop(request.name, None)
        self.unasked.discard(request.name)
        if self.has_storage and request.phase == "waiting":
            self.unasked.add(request.name)
            self.note_asked(self.executor.flights)

    def note_asked(self, flights: Sequence[Flight] = ()) -> None:
        """Note for which requests storage is asked, or need not be: all of theirs is cached."""
        size = self.model.limits.block_size
        for name in self.unasked & self.model.live.keys():
            if self.target.num_cached(name) == len(self.model.live[name].tokens) // size:
                self.unasked.remove(name)
        self.unasked &= self.model.live.keys()
        for flight in flights:
            if flight.copy.kind in ("lookup", "fetch") and not flight.cancelled:
                keys = set(flight.copy.keys)
                self.unasked -= {name for name in self.unasked if keys & self._keys_of(name).keys()}

    def store(self, request: Request, num_blocks: int) -> None:
        """Another process computes a request and stores its first blocks."""
        size = self.model.limits.block_size
        for index, key in enumerate([*self._keys_of(request.name)][:num_blocks]):
            self.executor.storage[key] = request.tags[index * size : (index + 1) * size]

    # In a step

    def dispatch(self, tables: Mapping[str, Sequence[int]]) -> None:
        """Begin the copies that the cache has asked for; `tables` are those of running requests."""
        self._hear_of_cancelled()
        flights = self.executor.begin(self.target.take())
        for flight in flights:
            if flight.copy.kind == "in":
                block = flight.copy.destinations[0]
                users = [name for name, table in tables.items() if block in table]
                flight.owner = next((name for name in users if name in self.model.live), "")
        self.note_asked(flights)

    def _hear_of_cancelled(self) -> None:
        cancelled = set(self.target.take_cancelled())
        for flight in self.executor.flights:
            flight.cancelled |= flight.copy.id in cancelled

    def take_unasked(self, step: Step) -> Collection[str]:
        """Return the requests admitted with blocks to compute for which storage was not asked."""
        loads = {flight.owner: flight.copy.num_blocks for flight in self.executor.flights}
        found, size = set(), self.model.limits.block_size
        for request in step.admitted:
            there = step.hits[request.name] // size + loads.get(request.name, 0)
            if request.name in self.unasked and there < len(request.tokens) // size:
                found.add(request.name)
            self.unasked.discard(request.name)
        return found

    def awaited(self, preempt: str) -> Collection[str]:
        """Names of the live requests that some copy in flight concerns."""
        found: set[str] = set()
        for flight in self.executor.flights:
            if not flight.cancelled:
                found |= self._concerned(flight, preempt)
        return found

    def _concerned(self, flight: Flight, preempt: str) -> set[str]:
        """Names of the live requests whose blocks or KV a copy fills, saves or looks for."""
        kind, live = flight.copy.kind, self.model.live
        if kind == "in":
            return {flight.owner} & live.keys()
        suspended = {name for name, request in live.items() if request.phase == "preempted"}
        if kind == "out":  # the KV of a parked request is saved
            read = {tag for content in flight.read for tag in content}
            return {name for name in suspended if read.intersection(live[name].tags)}
        if kind not in ("lookup", "fetch"):
            return set()
        keys = set(flight.copy.keys)
        found = {name for name in live if keys & self._keys_of(name).keys()}
        # KV that was parked in storage is fetched again for one request at a time.
        return found | suspended if preempt == "storage" else found

    def _keys_of(self, name: str) -> dict[bytes, None]:
        """Storage keys of the whole blocks of a live request."""
        request = self.model.live[name]
        num_blocks = len(request.tokens) // self.model.limits.block_size
        if name not in self._keys or len(self._keys[name]) != num_blocks:
            keys = self.target.keys(request.tokens, self._namespaces[name])
            self._keys[name] = dict.fromkeys(keys)
        return self._keys[name]

    def count_race(self, event: str, request: Request) -> None:
        """Count an event of a request with each copy that concerns it, and the copy's state."""
        for flight in self.executor.flights:
            if not flight.cancelled and request.name in self._concerned(flight, ""):
                state = "ended" if flight.has_result else "begun"
                self.model.situations[f"{event}: {flight.copy.kind} {state}"] += 1
        if request.is_loading and request.name not in {f.owner for f in self.executor.flights}:
            self.model.situations[f"{event}: in queued"] += 1

    # Between two steps

    def end(self, flight: Flight, bad: Collection[int], fenced: bool) -> None:
        """End a copy except for some blocks, or fence it if it was cancelled."""
        self._hear_of_cancelled()
        if flight.cancelled or flight.has_result:
            self.fence(flight)
            return
        if flight.copy.kind == "store":
            now = [self.executor.content("host", block) for block in flight.copy.sources]
            require(now == flight.read, T10, "{} reads blocks that were written since", flight.op)
        ok = self.executor.end(flight, list(bad))
        answer = self.target.complete(flight.copy.id, ok, fenced)
        require(answer, Q35, "the result of {} is not believed", flight.op)
        request = self._loaded_by(flight)
        if request is not None:
            read = [tag for content in flight.read[: leading(ok)] for tag in content]
            wanted = request.tags[request.hit : len(request.tokens)]
            # The last block may hold fewer tokens than fit: the end of what was parked.
            num_loaded = leading([found == tag for found, tag in zip(read, wanted, strict=False)])
            self.arrived[request.name] = request.hit + num_loaded
        if fenced:
            self.executor.fenced(flight)

    def _loaded_by(self, flight: Flight) -> Request | None:
        """Return the request that waits for a copy into its blocks.

        A copy may go on into blocks that its request had before, when it was preempted meanwhile.
        """
        request = self.model.live.get(flight.owner)
        if request is None or not request.is_loading:
            return None
        table = self.model.tables[request.name]
        return request if flight.copy.destinations[0] in table else None

    def fence(self, flight: Flight) -> None:
        """Fence a copy that was cancelled or has its result."""
        self._hear_of_cancelled()
        self.executor.finish_late_writes(flight)
        answer = self.target.fence(flight.copy.id)
        require(answer, Q35, "the fence of {} is not believed", flight.op)
        self.executor.fenced(flight)

    def advance(self, step: Step, late: bool) -> None:
        """End the oldest copy; if copies are late, only now and then, or if nothing is computed."""
        self._age += 1
        if self.executor.flights and (not late or not step.chunks or self._age % LATE == 0):
            self.end(self.executor.flights[0], [], True)

    def finish(self) -> None:
        """End all copies, when no request is left; then nothing below the device is held."""
        for _ in range(ROUNDS):
            self.dispatch({})
            for flight in list(self.executor.flights):
                self.end(flight, [], True)
            if not self.target.num_copies():
                break
        target = self.target
        num_copies, parked, pinned = target.num_copies(), target.num_parked(), target.num_pinned()
        require(
            not (num_copies or parked or pinned),
            Q38, "all have ended, {} copies go on, {} are parked, {} host blocks cannot be dropped",
            num_copies, parked, pinned,
        )  # fmt: skip

    def reset(self) -> None:
        """Forget what earlier copies were for."""
        self.arrived.clear()
        self.unasked.clear()
