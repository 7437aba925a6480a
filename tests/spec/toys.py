"""Cache managers of a few lines, right and wrong, that know nothing of prefixes."""

from __future__ import annotations

from collections.abc import Sequence


class Plain:
    """Blocks for each request, and nothing cached."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.free = list(range(num_blocks))
        self.block_size = block_size
        self.tables: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}

    def admit(self, name: str, tokens: Sequence[int], namespace: bytes) -> int | None:
        self.tables[name], self.lengths[name] = [], 0
        if self.append(name, tokens):
            return 0
        del self.tables[name], self.lengths[name]
        return None

    def append(self, name: str, tokens: Sequence[int]) -> bool:
        length = self.lengths[name] + len(tokens)
        missing = -(-length // self.block_size) - len(self.tables[name])
        if missing > len(self.free):
            return False
        self.tables[name] += [self.free.pop() for _ in range(missing)]
        self.lengths[name] = length
        return True

    def publish(self, name: str, tokens: Sequence[int]) -> None:
        pass

    def release(self, name: str) -> None:
        self.free += self.tables.pop(name)

    def block_table(self, name: str) -> list[int]:
        return self.tables[name]

    def available(self) -> int:
        return len(self.free)


class Leaky(Plain):
    """The release forgets the third block and those after it."""

    def release(self, name: str) -> None:
        self.free += self.tables.pop(name)[:2]


NUMBER = 3


def needs_three(one: int, two: int, three: int) -> None:
    pass


class Silent:
    """Has no method at all."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        pass
