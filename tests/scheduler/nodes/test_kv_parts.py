"""KVParts: what one node reads of its blocks is what another one has in its own."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from radixkv.scheduler.engine.programs import layers_of
from radixkv.scheduler.handoff import Sent
from radixkv.scheduler.nodes import kv_parts
from radixkv.scheduler.nodes.kv_parts import KVParts, cut_and_join
from radixkv.scheduler.nodes.transport import describe

NUM_LAYERS, HEADS, HEAD_DIM = 3, 2, 2
EVERY = [1, 2, 3, 4, 5, 6]


@dataclass
class Namespace:
    """What both nodes must agree on."""

    model: str
    weights_revision: str
    block_size: int

    def digest(self) -> bytes:
        return str(self).encode()


@pytest.fixture(autouse=True)
def plain_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_parts, "make_storage_namespace", Namespace)


class Node:
    """The pools of a node, and its copies."""

    def __init__(
        self, kind: Literal["gather", "scatter"], block_size: int, num_blocks: int, groups: int = 1
    ) -> None:
        shape = num_blocks + 1, HEADS, block_size, HEAD_DIM
        draw = np.random.default_rng(num_blocks)
        pools = [jnp.asarray(draw.normal(size=shape), jnp.bfloat16) for _ in range(2 * NUM_LAYERS)]
        self.arrays = SimpleNamespace(keys=(*pools[::2],), values=(*pools[1::2],))
        runner: Any = SimpleNamespace(
            arrays=self.arrays,
            model="m",
            warming_up=nullcontext,
            counting_compilations=nullcontext,
        )
        self.kv = KVParts(runner, kind, "first", groups)

    def tokens(self, pool: int, blocks: list[int]) -> npt.NDArray[Any]:
        """The KV of tokens: `[num_tokens, kv_heads, head_dim]`."""
        arrays = self.arrays.values if pool % 2 else self.arrays.keys
        found = np.asarray(arrays[pool // 2])[blocks].transpose(0, 2, 1, 3)
        return found.reshape(-1, HEADS, HEAD_DIM)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    ("sent", "own", "num_skipped"), [(4, 4, 0), (2, 4, 0), (2, 4, 2), (4, 6, 2), (6, 4, 4)]
)
def test_blocks_arrive_as_they_are_sent_and_no_others_change(
    sent: int, own: int, num_skipped: int, groups: int
) -> None:
    """Also if the sender has pieces of more blocks than the receiver has in all."""
    p, d = Node("gather", sent, 30, groups), Node("scatter", own, 6, groups)
    num_tokens = 5 * own if sent == own else 4 * own
    source = [*range(30, 30 - -(-(num_tokens + num_skipped) // sent), -1)]
    to = [6, 1, 3, 2, 4][: -(-num_tokens // own)]
    others = [block for block in range(1, 7) if block not in to]
    before = [d.tokens(pool, EVERY) for pool in range(2 * NUM_LAYERS)]
    for group in reversed(range(groups)):
        arrays = p.kv.read(source, group, groups)
        expected = p.kv.describe(len(source), group, groups)
        assert expected == d.kv.describe(len(source), group, groups, sent)
        assert describe(arrays, num_blocks=len(source)).arrays == expected.arrays
        layers = layers_of(NUM_LAYERS, group, groups)
        d.kv.write(to, arrays, group, groups, Sent(len(source), sent, num_skipped))
        for pool in range(2 * NUM_LAYERS):
            is_written = pool // 2 >= layers.start
            all_tokens = p.tokens(pool, source)[num_skipped : num_skipped + num_tokens]
            now = d.tokens(pool, to) if is_written else d.tokens(pool, EVERY)
            assert np.array_equal(now, all_tokens if is_written else before[pool]), pool
    for pool in range(2 * NUM_LAYERS):
        kept = before[pool].reshape(6, -1)[np.array(others) - 1]
        assert np.array_equal(d.tokens(pool, others).reshape(len(others), -1), kept)


def test_only_parts_of_the_same_weights_and_groups_are_expected() -> None:
    """Whatever the sizes of blocks are: the shapes tell them apart."""
    p, d = Node("gather", 4, 6), Node("scatter", 6, 6)
    assert p.kv.describe(3) == d.kv.describe(3, block_size=4) != d.kv.describe(3)
    assert p.kv.weights_revision == "first"
    p.kv.set_revision("second")
    assert p.kv.weights_revision == "second"
    assert p.kv.describe(3) != d.kv.describe(3, block_size=4)
    d.kv.set_revision("second")
    assert p.kv.describe(3) == d.kv.describe(3, block_size=4)


@pytest.mark.parametrize("busy", range(2 * NUM_LAYERS))
def test_copies_have_ended_when_all_pools_are_computed(busy: int) -> None:
    node, is_done = Node("scatter", 4, 2), [True] * 2 * NUM_LAYERS
    waiting = [SimpleNamespace(is_ready=lambda each=each: is_done[each]) for each in range(6)]
    node.arrays.keys, node.arrays.values = (*waiting[::2],), (*waiting[1::2],)
    assert node.kv.is_idle()
    is_done[busy] = False
    assert not node.kv.is_idle()


def test_the_rest_of_the_last_block_is_0() -> None:
    """Whatever was in it: what is masked may be multiplied by 0, and must be a number."""
    sent = np.full((3, HEADS, 4, HEAD_DIM), 7.0)
    blocks = cut_and_join(sent, 2, 2, 6).transpose(0, 2, 1, 3).reshape(12, -1)
    assert (blocks[:10] == 7.0).all() and (blocks[10:] == 0.0).all()
