"""Where a prompt is cut into parts, if the blocks of P and D may differ in size."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import NamedTuple

from .messages import MAX_PART_BLOCKS


class Destination(NamedTuple):
    """The blocks of D that a part fills.

    Attributes:
        first, stop: positions in D's block table.
        num_skipped_tokens: leading tokens of the part that D has already.
    """

    first: int
    stop: int
    num_skipped_tokens: int


@dataclass(frozen=True, slots=True)
class PartCut:
    """Cuts a prompt into parts that fill whole blocks of D.

    A part has whole blocks of P. All parts but the last end where a block of each node ends. D has
    the first ``num_cached_tokens`` tokens, and skips them in the first part::

        P, blocks of 4   | 0  1  2  3 | 4  5  6  7 | 8  9 10 11 |12 13 14 15 |16 17
        D, blocks of 6   | 0  1  2  3  4  5 | 6  7  8  9 10 11 |12 13 14 15 16 17
        D has            ------------------
        parts                         [4                     11][12            17]

    Attributes:
        sent_block_size, block_size: tokens in a block of P, and of D.
        num_tokens: tokens of the prompt.
        num_cached_tokens: leading tokens that D has, in whole blocks.
    """

    sent_block_size: int
    block_size: int
    num_tokens: int
    num_cached_tokens: int

    @property
    def _common(self) -> int:
        """Tokens after which a block of each node ends."""
        return lcm(self.sent_block_size, self.block_size)

    @property
    def _most(self) -> int:
        """Most tokens of a part."""
        return MAX_PART_BLOCKS * min(self.sent_block_size, self.block_size)

    @property
    def is_possible(self) -> bool:
        """Whether a part of at most `MAX_PART_BLOCKS` blocks, of P and of D, can end with both."""
        return self._common <= self._most

    @property
    def num_blocks(self) -> int:
        """Number of P's blocks that hold the prompt."""
        return -(-self.num_tokens // self.sent_block_size)

    @property
    def first_block(self) -> int:
        """The first block that P sends: the one with the first token that D lacks."""
        if self.num_cached_tokens >= self.num_tokens:
            return self.num_blocks
        return self.num_cached_tokens // self.sent_block_size

    def part_end(self, first: int, num_tokens: int) -> int:
        """Return where the part that begins with block first ends; first if it must wait.

        Args:
            first: end of the last part.
            num_tokens: number of leading tokens that P has computed.
        """
        start = first * self.sent_block_size
        stop = min(num_tokens, start + self._most)
        if stop == self.num_tokens:
            return self.num_blocks
        return max(first, stop // self._common * self._common // self.sent_block_size)

    def is_part(self, first: int, stop: int) -> bool:
        """Whether a part may have P's blocks ``first .. stop - 1``."""
        is_start = first == self.first_block or self._is_common(first)
        is_end = stop == self.num_blocks or self._is_common(stop)
        is_small = (stop - first - 1) * self.sent_block_size < self._most
        return self.first_block <= first < stop <= self.num_blocks and (
            is_start and is_end and is_small
        )

    def _is_common(self, block: int) -> bool:
        return block * self.sent_block_size % self._common == 0

    def destination(self, first: int, stop: int) -> Destination:
        """Return the blocks of D that the part of P's blocks ``first .. stop - 1`` fills."""
        start = max(first * self.sent_block_size, self.num_cached_tokens)
        end = min(stop * self.sent_block_size, self.num_tokens)
        return Destination(
            start // self.block_size,
            -(-end // self.block_size),
            start - first * self.sent_block_size,
        )
