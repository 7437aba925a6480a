"""The rules of block pools bite: each wrong pool of a few lines breaks one of them."""

from __future__ import annotations

import pytest

from radixkv.spec.harness.engine import replay
from radixkv.spec.harness.pool_world import PoolSubject
from radixkv.spec.harness.random_engine import run


class Right:
    """Free ids in a set, and nothing else."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.reset()

    def reset(self) -> None:
        self.free = set(range(1, self.num_blocks + 1))

    def free_ids(self) -> list[int]:
        return list(self.free)

    def allocate(self, num_blocks: int) -> list[int] | None:
        if num_blocks > len(self.free):
            return None
        return [self.free.pop() for _ in range(num_blocks)]

    def recycle(self, ids: list[int]) -> list[int]:
        return [block for block in ids if not self.takes(block)]

    def takes(self, block: int) -> bool:
        is_wrong = block in self.free or not 1 <= block <= self.num_blocks
        if not is_wrong:
            self.free.add(block)
        return not is_wrong


class RefusesTheLast(Right):
    """Of the two pools of a world, the first one."""

    num_made = 0

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        RefusesTheLast.num_made += 1
        self.is_first = RefusesTheLast.num_made % 2 == 1

    def allocate(self, num_blocks: int) -> list[int] | None:
        is_refused = self.is_first and num_blocks == len(self.free)
        return None if is_refused else super().allocate(num_blocks)


class RefusesAll(Right):
    """Of the two pools of a world, the second one is asked for all that is free."""

    def allocate(self, num_blocks: int) -> list[int] | None:
        return None if num_blocks == self.num_blocks > 1 else super().allocate(num_blocks)


class RefusesTheFirst(Right):
    """It refuses one block of several, and never all of them."""

    def allocate(self, num_blocks: int) -> list[int] | None:
        return None if num_blocks == 1 < len(self.free) else super().allocate(num_blocks)


class GivesTooMany(Right):
    def allocate(self, num_blocks: int) -> list[int] | None:
        return super().allocate(min(num_blocks, len(self.free)))


class GivesTwice(Right):
    def allocate(self, num_blocks: int) -> list[int] | None:
        ids = super().allocate(num_blocks)
        return [*ids, ids[0]] if ids else ids


class GivesWhatIsTaken(Right):
    def allocate(self, num_blocks: int) -> list[int] | None:
        taken = sorted(set(range(1, self.num_blocks + 1)) - self.free)
        ids = super().allocate(num_blocks)
        return [taken[0], *ids[1:]] if taken and ids and self.free else ids


class KeepsTheOrder(Right):
    def recycle(self, ids: list[int]) -> list[int]:
        refused = super().recycle(ids)
        ids.sort()
        return refused


class TellsNothing(Right):
    def recycle(self, ids: list[int]) -> list[int]:
        super().recycle(ids)
        return []


class TellsAll(Right):
    def recycle(self, ids: list[int]) -> list[int]:
        super().recycle(ids)
        return ids


class TakesTheLast(Right):
    """It refuses the id before the first one, and not the one after the last one."""

    def takes(self, block: int) -> bool:
        return super().takes(block) or block == self.num_blocks + 1


class LosesOneOfMany(Right):
    def recycle(self, ids: list[int]) -> list[int]:
        refused = super().recycle(ids)
        if len(ids) > 8:
            self.free.discard(ids[0])
        return refused


class LosesOneAlone(Right):
    def recycle(self, ids: list[int]) -> list[int]:
        refused = super().recycle(ids)
        if len(ids) == 1 and self.num_blocks > 9:
            self.free -= {9}
        return refused


class RefusesAlone(Right):
    def recycle(self, ids: list[int]) -> list[int]:
        return super().recycle(ids) or (ids if len(ids) == 1 and self.num_blocks == 4 else [])


class ResetsNotAll(Right):
    def reset(self) -> None:
        self.free = set(range(1, self.num_blocks + 1)) - ({2} if hasattr(self, "free") else set())


class Raises(Right):
    def recycle(self, ids: list[int]) -> list[int]:
        assert ids, "nothing to recycle"
        return super().recycle(ids)


class Exits(Right):
    def reset(self) -> None:
        if hasattr(self, "free"):
            raise SystemExit
        super().reset()


class ChecksItself(Right):
    def check(self) -> None:
        assert len(self.free) != 1


RULE_OF = {
    RefusesTheLast: "F5", RefusesTheFirst: "F5", RefusesAll: "F5",
    GivesTooMany: "F5", GivesTwice: "F5", GivesWhatIsTaken: "F5",
    KeepsTheOrder: "C3", TellsNothing: "F3", TellsAll: "F3", TakesTheLast: "F3",
    LosesOneOfMany: "W1", LosesOneAlone: "F4", ResetsNotAll: "W1", Raises: "S4", Exits: "S4",
    ChecksItself: "W6",
}  # fmt: skip


def test_a_right_pool_is_clean() -> None:
    assert run(PoolSubject(Right), 0, 3_000).finding is None


@pytest.mark.parametrize("wrong", RULE_OF, ids=lambda wrong: wrong.__name__)
def test_a_wrong_pool_breaks_its_rule(wrong: type[Right]) -> None:
    for seed in range(3):
        finding = run(PoolSubject(wrong), seed, 20_000).finding
        assert finding is not None and finding.rule.split()[0] == RULE_OF[wrong], finding


def test_all_blocks_are_allocated_at_the_end() -> None:
    violation = replay(PoolSubject(RefusesAll), {"num_blocks": 3}, [["drain"]])
    assert violation is not None and violation.rule.code == "F5"


def test_a_picture_shows_every_block() -> None:
    world = PoolSubject(Right).world({"num_blocks": 4})
    world.pool.allocate = lambda num_blocks: [1, 4]  # type: ignore[method-assign]
    world.allocate(2)
    assert world.picture() == "blocks |x..x|  . free  x allocated"
