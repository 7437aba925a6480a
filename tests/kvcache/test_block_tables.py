"""Block tables: rows are allocated, freed and grown, in memory that follows what they hold."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from radixkv.kvcache import BlockTables, CacheManager
from radixkv.kvcache.prefix import block_tables

from .helpers import start


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@pytest.fixture
def tiny(monkeypatch):
    """Thresholds at which a few blocks grow, move and pack the tables."""
    for name, value in (("ROWS", 1), ("IDS", 1)):
        monkeypatch.setattr(block_tables, f"_FIRST_{name}", value)
    monkeypatch.setattr(block_tables, "_KEPT_IDS", 2)
    monkeypatch.setattr(block_tables, "_LEAST_ROOM", 1)


def test_a_row_is_live_from_take_to_give():
    tables = BlockTables()
    row = tables.take_row()
    assert tables.live[row]
    assert tables.rows_are_live(int32(row))
    tables.check()
    tables.give_row(row)
    assert not tables.live.any()
    assert not tables.rows_are_live(int32(row))
    tables.check()


def test_rows_are_distinct_and_the_columns_grow_with_them():
    tables = BlockTables()
    rows = [tables.take_row() for _ in range(200)]
    assert len(set(rows)) == 200
    assert len(tables.num_blocks) == len(tables.num_tokens) == len(tables.live) >= 200
    tables.check()


def test_growing_keeps_what_is_there():
    tables = BlockTables()
    row = tables.take_row()
    tables.grow(row, 3)[:] = [7, 8, 9]
    tables.num_tokens[row] = 5
    tables.grow(row, 1000)[3:] = 1
    for _ in range(100):
        other = tables.take_row()
        tables.grow(other, 1000)[:] = 2
    assert tables.row(row).tolist() == [7, 8, 9] + [1] * 997
    assert (tables.num_blocks[row], tables.num_tokens[row]) == (1000, 5)
    tables.check()


def test_a_row_with_room_stays_where_it_is():
    tables = BlockTables()
    row = tables.take_row()
    before = tables.grow(row, 17)
    before[:] = 1
    after = tables.grow(row, 31)
    after[17:] = 2
    assert np.shares_memory(before, after) and before.tolist() == [1] * 17
    moved = tables.grow(row, 33)
    moved[31:] = 3
    assert not np.shares_memory(after, moved)
    assert tables.row(row).tolist() == [1] * 17 + [2] * 14 + [3, 3]
    tables.check()


def test_a_given_row_is_emptied():
    tables = BlockTables()
    row = tables.take_row()
    table = tables.grow(row, 2)
    table[:] = [3, 4]
    tables.num_tokens[row] = 4
    tables.give_row(row)
    tables.check()
    assert table.tolist() == [0, 0], "the padding sink"
    assert not tables.num_blocks.any() and not tables.num_tokens.any()


def test_rows_out_of_range_are_not_live():
    tables = BlockTables()
    row = tables.take_row()
    size = len(tables.live)
    assert tables.rows_are_live(int32())
    assert not tables.rows_are_live(int32(row, -1))
    assert not tables.rows_are_live(int32(row, size))


def test_ids_of_a_batch_are_read_and_appended_at_once():
    tables = BlockTables()
    first, second = tables.take_row(), tables.take_row()
    tables.grow(first, 16)[:] = range(1, 17)
    tables.grow(second, 2)[:] = [21, 22]
    tables.append(int32(second, first), int32(23, 17))
    assert tables.row(first).tolist() == list(range(1, 18))
    assert tables.row(second).tolist() == [21, 22, 23]
    ids = tables.at(int32(first, second, first), int32(16, 0, 3))
    assert ids.dtype == np.int32 and ids.tolist() == [17, 21, 4]
    tables.append(int32(), int32())
    tables.check()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_use_of_the_rows_leaves_each_as_it_was_written(tiny, data):
    tables = BlockTables()
    model: dict[int, list[int]] = {}
    for clock in range(1, data.draw(st.integers(2, 60))):
        action = data.draw(st.sampled_from(["take", "give", "grow", "append"]))
        if action == "take" or not model:
            model[tables.take_row()] = []
        elif action == "give":
            row = data.draw(st.sampled_from(sorted(model)))
            del model[row]
            tables.give_row(row)
        elif action == "grow":
            row = data.draw(st.sampled_from(sorted(model)))
            held = len(model[row])
            more = data.draw(st.integers(0, 40))
            tables.grow(row, held + more)[held:] = clock
            model[row] += [clock] * more
        else:
            rows = data.draw(st.lists(st.sampled_from(sorted(model)), unique=True))
            ids = [clock + place for place in range(len(rows))]
            tables.append(int32(*rows), int32(*ids))
            for row, block in zip(rows, ids, strict=True):
                model[row].append(block)
        tables.check()
        assert set(np.flatnonzero(tables.live).tolist()) == set(model)
        for row, table in model.items():
            assert tables.row(row).tolist() == table
    for row in model:
        tables.give_row(row)
    tables.check()
    assert tables._ids.nbytes <= 8, "nothing is held, so nothing is kept"


class CountingTables(BlockTables):
    """Counts the ids that callers wrote, and those that were copied to pack the rows."""

    def __init__(self):
        super().__init__()
        self.written = self.packed = 0

    def write(self, row, num_blocks):
        """Write a row to its new length."""
        held = self.num_blocks.item(row)
        self.grow(row, num_blocks)[held:] = 1
        self.written += num_blocks - held

    def _pack(self, room):
        self.packed += self.num_held
        super()._pack(room)


def admissions(tables):
    """Rows that stay."""
    for _ in range(800):
        tables.write(tables.take_row(), 30)


def one_at_a_time(tables):
    """Rows of which each grows by a block at a time."""
    rows = [tables.take_row() for _ in range(100)]
    for _ in range(200):
        tables.append(int32(*rows), int32(*[1] * 100))
        tables.written += 100


def longer_and_longer(tables):
    """Rows that take the places of others, and are longer than those."""
    rows = [tables.take_row() for _ in range(50)]
    for num_blocks in range(20, 500, 10):
        for place, row in enumerate(rows):
            tables.give_row(row)
            rows[place] = tables.take_row()
            tables.write(rows[place], num_blocks)


def many_and_few(tables):
    """Many rows, then none, in an array that is large enough to shrink."""
    for _ in range(4):
        rows = [tables.take_row() for _ in range(400)]
        for row in rows:
            tables.write(row, 400)
        for row in rows:
            tables.give_row(row)


@pytest.mark.parametrize("use", [admissions, one_at_a_time, longer_and_longer, many_and_few])
def test_packing_copies_no_more_than_was_written(use):
    """The array grows and shrinks by factors, so each id is copied a few times at most."""
    tables = CountingTables()
    use(tables)
    tables.check()
    assert 0 < tables.packed <= 2 * tables.written


def test_memory_follows_what_is_held_and_not_the_longest_row():
    tables = BlockTables()
    for _ in range(1000):
        tables.grow(tables.take_row(), 4)[:] = 1
    assert tables._ids.nbytes <= 4 * 16 * 4 * 1000
    long = tables.take_row()
    tracemalloc.start()
    tables.grow(long, 65_536)[:] = 1
    current, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    least = 4 * (1000 * 16 + 65_536)
    assert current <= peak <= 4 * least + 10_000
    tables.check()
    for _ in range(4000):
        tables.grow(tables.take_row(), 4)[:] = 1
    tables.check()
    longer = tables.grow(long, 2**20)
    longer[65_536:] = 1
    del longer
    assert tables._ids.nbytes > 2**22
    tables.give_row(long)
    assert tables._ids.nbytes <= 2**20, "as before"
    tables.check()


def test_the_tables_show_all_leases():
    manager = CacheManager(500, 1)
    leases = [start(manager, [i, i]) for i in range(100)]
    wide = start(manager, list(range(200)))
    for lease in [*leases, wide]:
        row = manager.tables.row(lease.row)
        assert row.dtype == np.int32
        assert row.tolist() == lease.block_table.tolist()
    manager.check()


def test_a_lease_shows_its_table_but_does_not_lend_it():
    manager = CacheManager(8, 2)
    lease = start(manager, [1, 2, 3])
    table = lease.block_table
    assert table.dtype == np.int32 and not table.flags.writeable
    assert manager.tables.row(lease.row).flags.writeable


def test_a_released_lease_shows_no_blocks_even_where_all_rows_are_used():
    manager = CacheManager(200, 1)
    leases = [start(manager, [i]) for i in range(len(manager.tables.live))]
    manager.release(leases[0])
    assert (leases[0].num_blocks, leases[0].num_tokens) == (0, 0)
    assert leases[0].block_table.tolist() == []
