"""Block tables: rows are allocated, freed and grown; unused entries stay 0."""

import numpy as np

from radixkv.kvcache import BlockTables, CacheManager

from .helpers import start


def test_a_row_is_live_from_take_to_give():
    tables = BlockTables()
    row = tables.take_row()
    assert tables.live[row]
    assert tables.rows_are_live(np.array([row], np.int32))
    tables.check()
    tables.give_row(row)
    assert not tables.live.any()
    assert not tables.rows_are_live(np.array([row], np.int32))
    tables.check()


def test_rows_are_distinct_and_the_matrix_grows_with_them():
    tables = BlockTables()
    rows = [tables.take_row() for _ in range(200)]
    assert len(set(rows)) == 200
    assert len(tables.ids) == len(tables.num_blocks) == len(tables.num_tokens) == len(tables.live)
    assert len(tables.ids) >= 200
    tables.check()


def test_growing_keeps_what_is_there():
    tables = BlockTables()
    row = tables.take_row()
    tables.ids[row, :3] = [7, 8, 9]
    tables.num_blocks[row], tables.num_tokens[row] = 3, 5
    tables.widen(1000)
    assert tables.ids.shape[1] >= 1000
    for _ in range(100):
        tables.take_row()
    assert tables.ids[row, :4].tolist() == [7, 8, 9, 0]
    assert (tables.num_blocks[row], tables.num_tokens[row]) == (3, 5)
    tables.check()


def test_a_matrix_that_is_wide_enough_stays():
    tables = BlockTables()
    ids = tables.ids
    tables.widen(ids.shape[1])
    tables.widen(0)
    assert tables.ids is ids


def test_a_given_row_is_emptied():
    tables = BlockTables()
    row = tables.take_row()
    tables.ids[row, :2] = [3, 4]
    tables.num_blocks[row], tables.num_tokens[row] = 2, 4
    tables.give_row(row)
    tables.check()
    assert not tables.ids.any() and not tables.num_blocks.any() and not tables.num_tokens.any()


def test_rows_out_of_range_are_not_live():
    tables = BlockTables()
    row = tables.take_row()
    size = len(tables.live)
    assert tables.rows_are_live(np.array([], np.int32))
    assert not tables.rows_are_live(np.array([row, -1], np.int32))
    assert not tables.rows_are_live(np.array([row, size], np.int32))


def test_the_matrix_shows_the_tables_of_all_leases():
    manager = CacheManager(500, 1)
    leases = [start(manager, [i, i]) for i in range(100)]
    wide = start(manager, list(range(200)))
    for lease in [*leases, wide]:
        row = manager.tables.ids[lease.row]
        assert row[: lease.num_blocks].tolist() == lease.block_table.tolist()
        assert not row[lease.num_blocks :].any()
    assert manager.tables.ids.dtype == np.int32
    manager.check()


def test_a_lease_shows_its_table_but_does_not_lend_it():
    manager = CacheManager(8, 2)
    lease = start(manager, [1, 2, 3])
    table = lease.block_table
    assert table.dtype == np.int32 and not table.flags.writeable
    assert manager.tables.ids.flags.writeable


def test_a_released_lease_shows_no_blocks_even_where_all_rows_are_used():
    manager = CacheManager(200, 1)
    leases = [start(manager, [i]) for i in range(len(manager.tables.live))]
    manager.release(leases[0])
    assert (leases[0].num_blocks, leases[0].num_tokens) == (0, 0)
    assert leases[0].block_table.tolist() == []
