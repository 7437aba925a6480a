"""Ghost memory: a reader sees its own prefix, or an error that names the position."""

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.spec import GhostMemory, Violation, prefix_tags
from radixkv.spec.model import ghost

TOKENS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=8)


def test_the_examples_of_the_module():
    assert doctest.testmod(ghost).failed == 0
    assert doctest.testmod(ghost).attempted > 0


@given(st.binary(max_size=3), TOKENS, st.binary(max_size=3), TOKENS)
def test_tags_are_equal_where_namespace_and_prefix_are_equal_and_only_there(
    ns, tokens, other_ns, others
):
    tags, other_tags = prefix_tags(ns, tokens), prefix_tags(other_ns, others)
    assert len(tags) == len(tokens)
    for end in range(min(len(tokens), len(others))):
        same = ns == other_ns and tokens[: end + 1] == others[: end + 1]
        assert (tags[end] == other_tags[end]) == same


def test_a_sequence_reads_what_it_wrote_through_its_table():
    ghost_memory = GhostMemory(block_size=3)
    tags = prefix_tags(b"", range(7))
    ghost_memory.write_sequence([5, 2, 9], tags)
    ghost_memory.read_sequence([5, 2, 9], tags)
    ghost_memory.read_sequence([5, 2, 9], tags[:4])
    ghost_memory.read_sequence([], [])


def test_writing_from_a_position_leaves_what_is_before():
    ghost_memory = GhostMemory(block_size=2)
    mine, others = prefix_tags(b"", [1, 2, 3, 4]), prefix_tags(b"", [1, 2, 5, 6])
    ghost_memory.write_sequence([1, 2], mine)
    ghost_memory.write_sequence([1, 3], others, start=2)
    ghost_memory.read_sequence([1, 2], mine)
    ghost_memory.read_sequence([1, 3], others)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            [4, 3],
            "[C1 read-own-prefix] a request reads token 2 in block 3, which was never written",
        ),
        (
            [4, 4],
            "[C1 read-own-prefix] a request reads token 2 in block 4, which holds another prefix",
        ),
    ],
)
def test_a_foreign_read_names_block_and_position(table, message):
    ghost_memory = GhostMemory(block_size=2)
    tags = prefix_tags(b"", [1, 2, 3])
    ghost_memory.write_sequence([4, 7], tags)
    with pytest.raises(Violation) as caught:
        ghost_memory.read_sequence(table, tags)
    assert str(caught.value) == message
    assert isinstance(caught.value, AssertionError)


def test_a_block_remembers_the_last_write():
    ghost_memory = GhostMemory(block_size=1)
    ghost_memory.write(3, 0, 1)
    ghost_memory.write(3, 0, 2)
    ghost_memory.read_sequence([3], [2])
    with pytest.raises(Violation, match="holds another prefix"):
        ghost_memory.read_sequence([3], [1])


def test_an_offset_outside_the_block_is_a_bug_of_the_test():
    with pytest.raises(AssertionError, match="offset 2 in a block of 2"):
        GhostMemory(block_size=2).write(1, 2, 0)


def test_an_appended_token_ends_its_block():
    ghost_memory = GhostMemory(block_size=3)
    mine, others = prefix_tags(b"", [1, 2, 3]), prefix_tags(b"", [1, 4])
    ghost_memory.write_sequence([5], mine)
    ghost_memory.append([5], 1, others[1])
    ghost_memory.read_sequence([5], others)
    with pytest.raises(Violation, match="reads token 2 in block 5, which was never written"):
        ghost_memory.read_sequence([5], [*others, mine[2]])
    assert ghost_memory.content(6) == [0, 0, 0]
