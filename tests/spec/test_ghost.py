"""Ghost memory: tags stand for prefixes, and a block holds the tags that were written last."""

from __future__ import annotations

import pytest

from radixkv.spec.model.ghost import POISON, UNWRITTEN, GhostMemory, first_tag, prefix_tags
from radixkv.spec.rules.cache import C1, C2
from radixkv.spec.rules.rule import Violation

TAGS = prefix_tags(b"", range(7))


def test_every_token_of_int32_makes_another_prefix() -> None:
    ends = [*range(-(1 << 31), 3 - (1 << 31)), *range(-3, 3), *range((1 << 31) - 3, 1 << 31)]
    tags = {prefix_tags(b"", [token])[0] for token in ends}
    assert len(tags | {first_tag(b""), UNWRITTEN, POISON}) == len(ends) + 3


def test_a_prefix_depends_on_all_before_and_on_its_namespace() -> None:
    assert len(TAGS) == len(set(TAGS)) == 7
    assert prefix_tags(b"", range(4)) == TAGS[:4]
    assert not {*prefix_tags(b"x", range(7))} & {*TAGS}
    assert not {*prefix_tags(b"", [9, 1, 2, 3])} & {*TAGS}


@pytest.mark.parametrize("block_size", [1, 2, 3, 4])
def test_what_was_written_is_read(block_size: int) -> None:
    for start in range(8):
        ghost = GhostMemory(block_size)
        table = [9, 4, 7, 1, 3, 2, 8]
        ghost.write_sequence(table, TAGS, start)
        written = [ghost.content(table[at // block_size])[at % block_size] for at in range(7)]
        assert written == [UNWRITTEN] * start + TAGS[start:]
        if start == 0:
            for end in range(8):
                ghost.read_sequence(table, TAGS[:end])
        assert ghost.content(5) == [UNWRITTEN] * block_size


@pytest.mark.parametrize("block_size", [1, 2, 3])
def test_an_appended_token_ends_its_block(block_size: int) -> None:
    for position in range(6):
        ghost = GhostMemory(block_size)
        table = [4, 2, 6, 1, 3, 5]
        ghost.write_sequence(table, TAGS[:6])
        index, offset = divmod(position, block_size)
        first = index * block_size
        others = {block: ghost.content(block) for block in table if block != table[index]}
        ghost.append(table, position, 77)
        behind = [UNWRITTEN] * (block_size - offset - 1)
        assert ghost.content(table[index]) == [*TAGS[first:position], 77, *behind]
        assert {block: ghost.content(block) for block in others} == others


@pytest.mark.parametrize(
    ("tag", "text"),
    [
        (UNWRITTEN, "was never written"),
        (POISON, "holds what a failed step left"),
        (77, "holds another prefix"),
    ],
)
def test_the_first_wrong_token_is_told(tag: int, text: str) -> None:
    for position in range(6):
        ghost = GhostMemory(2)
        ghost.write_sequence([4, 2, 6], TAGS[:6])
        for wrong in (5, position):
            ghost.write([4, 2, 6][wrong // 2], wrong % 2, tag)
        with pytest.raises(Violation) as caught:
            ghost.read_sequence([4, 2, 6], TAGS[:6], "r1", C2)
        assert caught.value.rule is C2
        block = [4, 2, 6][position // 2]
        assert caught.value.why == f"r1 reads token {position} in block {block}, which {text}"
        ghost.read_sequence([4, 2, 6], TAGS[:position])
    with pytest.raises(Violation) as caught:
        GhostMemory(2).read_sequence([4], TAGS[:1])
    assert caught.value.rule is C1
