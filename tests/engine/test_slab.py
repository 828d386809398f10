"""States that run lie side by side, however many there are; stored ones do not lie among them."""

from __future__ import annotations

from spanlab.engine.slab import NOBODY

from .test_recurrence import KINDS, begin, pool_of


def test_states_that_run_stay_what_they_are_when_there_are_more():
    pool = pool_of(KINDS[0])
    slots, rows = [], []
    for number in range(5):
        slots.append(begin(pool, number))
        rows.append(pool.slab.rows)
    assert rows == [2, 3, 5, 5, 9]  # that of nobody, and a power of two
    at = pool.rows(slots)
    assert len(set(at)) == 5 and NOBODY not in at
    fresh = pool_of(KINDS[0])
    for number, slot in enumerate(slots):
        own = begin(fresh, number)
        assert pool.recurrent(1, slot).equal(fresh.recurrent(1, own))
        assert pool.slab.part("conv", 1)[at[number]].equal(fresh.conv(1, own))
    assert not any(part.any() for part in pool.slab.row(NOBODY).values())


def test_stored_states_take_no_row_of_those_that_run():
    pool = pool_of(KINDS[0])
    running, stored = pool.take_running(), pool.take()
    assert pool.used == 2
    pool.give([stored, running])
    assert pool.used == 0
    assert (pool.take_running(), pool.take()) == (running, stored)
    assert pool.slab.rows == 2
