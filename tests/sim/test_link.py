"""Links share their bandwidth: brute force in fluid time, closed forms of a processor-sharing queue, Little's law."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spanlab.core.tiers import Link
from spanlab.stats import t_interval

GB = 1e9


def fluid_ends(begins: list[tuple[int, int]], bytes_per_ns: Fraction, latency: int) -> list[Fraction]:
    """Exact end of each transfer (time, bytes), moving all that share at equal rates from event to event."""
    joins = [Fraction(at + latency) for at, _ in begins]
    remaining = {number: Fraction(size) for number, (_, size) in enumerate(begins)}
    ends: dict[int, Fraction] = {}
    now = Fraction(0)
    while remaining:
        moving = [number for number in remaining if joins[number] <= now]
        later = [joins[number] for number in remaining if joins[number] > now]
        if moving:
            rate = bytes_per_ns / len(moving)
            later.append(now + min(remaining[number] for number in moving) / rate)
        step = min(later) - now
        for number in moving:
            remaining[number] -= step * rate
            if remaining[number] == 0:
                ends[number] = now + step
                del remaining[number]
        now += step
    return [ends[number] for number in range(len(begins))]


transfers = st.lists(st.tuples(st.integers(0, 3_000), st.integers(1, 5_000)), min_size=1, max_size=12)


@settings(max_examples=80, deadline=None)
@given(begins=transfers, latency=st.sampled_from([0, 7, 400]), rate=st.sampled_from([1, 3, Fraction(1, 4)]))
def test_transfers_end_as_in_fluid_time(begins, latency, rate):
    link = Link(float(rate) * GB, latency / GB)
    begins = sorted(begins, key=lambda begin: begin[0])
    begun = [link.begin(size, time) for time, size in begins]
    link.advance(10**9)
    for transfer, end in zip(begun, fluid_ends(begins, Fraction(rate), latency), strict=True):
        assert transfer.ends_at - 1 <= end <= transfer.ends_at + Fraction(1, 1000)


@given(begins=transfers, pauses=st.lists(st.integers(0, 40_000), max_size=20))
@settings(max_examples=60, deadline=None)
def test_ends_do_not_depend_on_being_asked(begins, pauses):
    queried, quiet = Link(GB, 5 / GB), Link(GB, 5 / GB)
    times = sorted([(time, 1, size) for time, size in begins] + [(time, 0, 0) for time in pauses])
    ends, expected, ended = [], [], []
    for time, begins_one, size in times:
        if begins_one:
            ends.append(queried.begin(size, time))
            expected.append(quiet.begin(size, time))
            queried.ends_at(ends[0])
        else:
            ended += queried.advance(time)
            assert all(one.ends_at <= time for one in ended)
    ended += queried.advance(10**9)
    quiet.advance(10**9)
    assert [one.ends_at for one in ends] == [one.ends_at for one in expected]
    assert set(ended) == set(ends), "every transfer is returned once"
    assert len(ended) == len(ends)


def test_a_forecast_holds_until_another_transfer_begins():
    link = Link(GB)
    first = link.begin(1000, 0)
    assert link.ends_at(first) == 1000
    link.begin(1000, 500)
    assert link.ends_at(first) == 1500
    assert link.advance(1499) == []
    assert link.advance(1500) == [first]


def test_latency_takes_no_bandwidth():
    link = Link(GB, 100 / GB)
    first, second = link.begin(50, 0), link.begin(50, 100)
    assert (link.ends_at(first), link.ends_at(second)) == (150, 250)


def test_delay_is_that_at_the_present_share():
    link = Link(GB, 10 / GB)
    assert link.delay(1000) == 1010
    link.begin(5000, 0)
    link.begin(5000, 0)
    assert link.delay(1000) == 3010


def test_infinite_bandwidth_moves_at_once():
    link = Link(math.inf)
    transfer = link.begin(1 << 40, 77)
    assert link.advance(77) == [transfer]
    assert transfer.ends_at == 77


def poisson_run(rng: np.random.Generator, load: float, count: int, sizes) -> list:
    """Transfers that begin at random on a link of one byte a nanosecond."""
    link, now, begun = Link(GB), 0.0, []
    size = sizes(rng, count)
    for number, gap in enumerate(rng.standard_exponential(count) * size.mean() / load):
        now += gap
        begun.append(link.begin(int(size[number]), round(now)))
    link.advance(1 << 60)
    return begun


def exponential(rng, count):
    return np.maximum(1, np.rint(rng.standard_exponential(count) * 10_000)).astype(int)


def two_sizes(rng, count):
    """Nine of ten small, one of ten large: a squared coefficient of variation of 4.5."""
    return np.where(rng.random(count) < 0.9, 2_000, 50_000)


@pytest.mark.parametrize("sizes", [exponential, two_sizes])
@pytest.mark.parametrize("load", [0.3, 0.7])
def test_mean_times_are_those_of_shared_processors(sizes, load):
    """E[T | x] = x / (1 - rho), whatever the distribution: slowdowns of small and large transfers alike."""
    slowdowns = {"small": [], "large": []}
    for rng in (np.random.default_rng(child) for child in np.random.SeedSequence(7).spawn(20)):
        begun = poisson_run(rng, load, 3_000, sizes)[300:]
        bytes_of = np.array([transfer.num_bytes for transfer in begun])
        times = np.array([transfer.ends_at - transfer.begun_at for transfer in begun])
        median = np.median(bytes_of)
        for name, chosen in (("small", bytes_of <= median), ("large", bytes_of > median)):
            slowdowns[name].append(float((times[chosen].sum()) / bytes_of[chosen].sum()))
    for means in slowdowns.values():
        interval = t_interval(means, 0.999)
        assert interval.low <= 1 / (1 - load) <= interval.high


def test_transfers_in_flight_obey_little():
    begun = poisson_run(np.random.default_rng(3), 0.8, 2_000, exponential)
    link = Link(GB)
    for transfer in begun:
        link.begin(transfer.num_bytes, transfer.begun_at)
    ended = link.advance(1 << 60)
    end = max(transfer.ends_at for transfer in ended)
    rate, time = len(begun) / end, np.mean([transfer.ends_at - transfer.begun_at for transfer in ended])
    assert link.mean_in_flight(end) == pytest.approx(rate * time, rel=1e-4)  # ends are whole nanoseconds
