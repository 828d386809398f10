"""States that run lie side by side, however many there are; stored ones do not lie among them."""

from spanlab.engine.slots import PADDING_ROW

from .test_recurrence import KINDS, begin, pool_of


def test_running_states_survive_growth_of_the_slab():
    pool = pool_of(KINDS[0])
    slots, rows = [], []
    for number in range(5):
        slots.append(begin(pool, number))
        rows.append(pool.slab.rows)
    assert rows == [2, 3, 5, 5, 9]  # the unused slot, and a power of two
    slab_rows = pool.rows(slots)
    assert len(set(slab_rows)) == 5 and PADDING_ROW not in slab_rows
    fresh = pool_of(KINDS[0])
    for number, slot in enumerate(slots):
        expected = begin(fresh, number)
        assert pool.recurrent(1, slot).equal(fresh.recurrent(1, expected))
        assert pool.slab.tensor("conv", 1)[slab_rows[number]].equal(fresh.conv(1, expected))
    assert not any(tensor.any() for tensor in pool.slab.row(PADDING_ROW).values())


def test_stored_states_take_no_row_of_those_that_run():
    pool = pool_of(KINDS[0])
    running, stored = pool.allocate_running(), pool.allocate()
    assert pool.used == 2
    pool.free([stored, running])
    assert pool.used == 0
    assert (pool.allocate_running(), pool.allocate()) == (running, stored)
    assert pool.slab.rows == 2
