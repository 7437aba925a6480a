"""Test harnesses: a world with chosen faults, and two sides without a network."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from types import ModuleType
from typing import Any, Final

from radixkv.kvcache import CacheManager
from radixkv.scheduler import Request, SamplingParams
from radixkv.scheduler.handoff import AttemptKey
from radixkv.spec.harness.handoff.drain import fair_round, is_drained
from radixkv.spec.harness.handoff.world import HandoffWorld

from .worlds import world_of

PROMPT: Final = [5, 6, 7, 8, 9, 4, 3]
KEY: Final = AttemptKey("r1", 1)
P: Final = "p0"
D: Final = "d0"
ORDERS: Final = ("early", "prefill_complete")
MANY: Final = 60
VOCABULARY: Final = 50


def lossy(
    h: ModuleType,
    lost: Collection[int] = (),
    doubled: Collection[int] = (),
    postponed: Collection[int] = (),
    fault: tuple[int, Sequence[Sequence[Any]]] = (-1, ()),
    order: str = "early",
) -> tuple[HandoffWorld, int]:
    """Run one request to its end. Messages are numbered in order, without signs of life.

    Args:
        h: the handoff package, or a copy of it.
        lost, doubled, postponed: numbers of messages that are lost, arrive twice, or at the end.
        fault: number of a message, and the operations to apply before it. A node that crashes
            restarts when the other messages have arrived.
        order: of the prefill node.

    Returns:
        The world, and the number of messages.
    """
    world = world_of(h, budget=3, max_running=3, order=order)
    world.apply(["submit", "r1", PROMPT, 3, 1])
    number, later = 0, []
    for _ in range(MANY):
        while world.network:
            first = world.network[0]
            if first.is_status:
                world.apply(["deliver", first.name])
                continue
            if number == fault[0]:
                fault = -1, fault[1]
                for operation in fault[1]:
                    world.apply(list(operation))
                continue
            if number in doubled:
                world.apply(["duplicate", first.name])
            if number in postponed:
                later.append(first)
            dropped = number in lost or number in postponed
            world.apply(["drop" if dropped else "deliver", first.name])
            number += 1
        if is_drained(world) and not postponed:
            break
        for operation in fair_round(world):
            world.apply(operation)
    assert number >= len(later)
    world.network += later
    world.apply(["drain"])
    return world, number


class Pair:
    """Both sides without a network; the test passes the messages on."""

    def __init__(self, h: ModuleType, *, num_groups: int = 1, decode_epoch: int = 1) -> None:
        self.h, self.num_groups = h, num_groups
        self.p_manager, self.d_manager = CacheManager(8, 2), CacheManager(8, 2)
        timing = h.Timing()
        self.p = h.PrefillSide(self.p_manager, epoch=1, timing=timing, num_groups=num_groups)
        self.d = h.DecodeSide(
            self.d_manager, epoch=decode_epoch, timing=timing, vocab_size=VOCABULARY
        )

    def begin(self, attempt: int = 1) -> Any:
        request = Request("r1", PROMPT, 4, sampling=SamplingParams(seed=3))
        self.p.begin(AttemptKey("r1", attempt), D, request)
        # An ASK of an attempt that ended since the last call may stand before it.
        *_, ask = (each for each in self.posted(self.p) if isinstance(each, self.h.Ask))
        return ask

    def posted(self, side: Any) -> list[Any]:
        return [each.message for each in side.take_actions() if isinstance(each, self.h.Post)]

    def actions(self, side: Any, kind: str) -> list[Any]:
        return [each for each in side.take_actions() if isinstance(each, getattr(self.h, kind))]

    def granted(self) -> Any:
        """Run up to GRANT, and return it."""
        self.d.receive(P, self.begin())
        [grant] = self.posted(self.d)
        self.p.receive(D, grant)
        return grant

    def committed(self) -> tuple[list[Any], Any]:
        """Run up to COMMIT; return all SENDs, and COMMIT."""
        self.granted()
        self.p.computed(KEY, len(PROMPT))
        self.p.sampled(KEY, 1, self.h.Hits())
        *sends, commit = self.posted(self.p)
        return sends, commit

    def start(self) -> Any:
        """Run until D decodes; return its `Start`."""
        sends, commit = self.committed()
        for message in (*sends, commit):
            self.d.receive(P, message)
        for pull in self.actions(self.d, "Pull"):
            self.d.pulled(pull.part_id)
        [start] = self.actions(self.d, "Start")
        return start

    def are_empty(self) -> bool:
        managers = (self.p_manager, self.d_manager)
        return all(manager.stats().live_leases == 0 for manager in managers)
