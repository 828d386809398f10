"""Arrival processes: exact orders and times, and gaps that pass z-tests against their theory."""

import math

import numpy as np
import pytest

from spanlab.core.request import Request
from spanlab_sim.arrivals import (
    ARRIVALS,
    AsGiven,
    ClosedLoop,
    Deterministic,
    Gamma,
    InterleavedLegacy,
    Poisson,
    PoissonPerGroup,
    Saturating,
    resample,
)

#: 99.9 % of a standard normal lies within.
Z = 3.29


def make_requests(groups: list[int], arrived_at: list[int] | None = None) -> tuple[Request, ...]:
    times = arrived_at or [0] * len(groups)
    return tuple(
        Request(id=i, group_id=group, spans=(), arrived_at=time)
        for i, (group, time) in enumerate(zip(groups, times, strict=True))
    )


def rng(seed: int = 7) -> np.random.Generator:
    return np.random.default_rng(seed)


def ids(requests: list[Request]) -> list[int]:
    return [request.id for request in requests]


def times(requests: list[Request]) -> list[int]:
    return [request.arrived_at for request in requests]


def gaps_s(requests: list[Request]) -> np.ndarray:
    return np.diff(times(requests), prepend=0) / 1e9


def check_moments(gaps: np.ndarray, mean: float, cv2: float, fourth: float) -> None:
    """z-tests of mean and variance; `fourth` is the fourth central moment in units of variance²."""
    n, variance = len(gaps), cv2 * mean**2
    assert abs(gaps.mean() - mean) < Z * math.sqrt(variance / n)
    # Around the true mean the sample variance has mean σ² and variance (μ4 − σ⁴) / n.
    assert abs(((gaps - mean) ** 2).mean() - variance) < Z * variance * math.sqrt((fourth - 1) / n)


MANY = make_requests([i % 50 for i in range(40_000)])
FEW = MANY[:1_000]


def test_poisson_gaps_are_exponential():
    gaps = gaps_s(Poisson(rate_rps=4.0).arrive(MANY, rng()))
    check_moments(gaps, 0.25, 1.0, 9.0)
    for factor in (0.1, 1.0, 3.0, 6.0):
        tail = math.exp(-factor)
        longer = (gaps > factor * 0.25).mean()
        assert abs(longer - tail) < Z * math.sqrt(tail * (1 - tail) / len(gaps))
    assert gaps.max() > 7 * 0.25, "a truncated exponential would stop earlier"


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_gaps_have_the_stated_burstiness_and_no_fixed_total(burstiness):
    gaps = gaps_s(Gamma(rate_rps=2.0, burstiness=burstiness).arrive(MANY, rng()))
    check_moments(gaps, 0.5, 1 / burstiness, 3 + 6 / burstiness)
    assert gaps.sum() != pytest.approx(len(MANY) / 2.0, rel=1e-6)


def test_deterministic_gaps_are_equal():
    arriving = Deterministic(rate_rps=4.0, order="as_given").arrive(make_requests([0, 0, 1]), rng())
    assert times(arriving) == [250_000_000, 500_000_000, 750_000_000]
    assert ids(arriving) == [0, 1, 2]


@pytest.mark.parametrize("kind", [Poisson, PoissonPerGroup])
def test_another_rate_stretches_the_same_path(kind):
    requests = make_requests([0, 1, 0, 2, 1, 0])
    slow, fast = (kind(rate_rps=rate).arrive(requests, rng()) for rate in (0.5, 8.0))
    assert ids(slow) == ids(fast)
    assert times(slow) == pytest.approx([16 * time for time in times(fast)], abs=16)


def test_both_orders_see_the_same_arrival_times():
    shuffled = Poisson(rate_rps=1.0).arrive(FEW, rng())
    unshuffled = Poisson(rate_rps=1.0, order="as_given").arrive(FEW, rng())
    assert times(shuffled) == times(unshuffled)
    assert ids(unshuffled) == ids(list(FEW))
    assert ids(shuffled) != ids(unshuffled)
    assert sorted(ids(shuffled)) == ids(unshuffled)


@pytest.mark.parametrize("kind", ["poisson", "poisson_per_group", "gamma", "deterministic"])
def test_every_kind_is_sorted_repeatable_and_loses_nothing(kind):
    options = {"rate_rps": 3.0} | ({"burstiness": 0.5} if kind == "gamma" else {})
    first, again = (ARRIVALS[kind](**options).arrive(FEW, rng(11)) for _ in range(2))
    assert times(first) == sorted(times(first))
    assert (ids(first), times(first)) == (ids(again), times(again))
    assert sorted(ids(first)) == ids(list(FEW))
    assert all(type(time) is int for time in times(first))
    assert ids(ARRIVALS[kind](**options).arrive(FEW, rng(12))) != ids(first) or kind == "deterministic"


def test_each_group_is_poisson_and_keeps_its_order():
    requests = make_requests([i % 4 for i in range(8_000)])
    arriving = PoissonPerGroup(rate_rps=0.5).arrive(requests, rng())
    for group in range(4):
        members = [request for request in arriving if request.group_id == group]
        assert ids(members) == sorted(ids(members))
        check_moments(gaps_s(members), 2.0, 1.0, 9.0)


def test_a_longer_group_leaves_the_others_alone():
    short = PoissonPerGroup(rate_rps=1.0).arrive(make_requests([0, 1, 1]), rng())
    long = PoissonPerGroup(rate_rps=1.0).arrive(make_requests([0, 1, 1, 0, 0]), rng())
    times_of = {request.id: request.arrived_at for request in long}
    assert all(times_of[request.id] == request.arrived_at for request in short)


def test_as_given_sorts_and_keeps_ties_in_order():
    arriving = AsGiven().arrive(make_requests([0, 1, 2, 3], [5, 2, 5, 0]), rng())
    assert ids(arriving) == [3, 1, 0, 2]
    assert times(arriving) == [0, 2, 5, 5]


def legacy_oracle(groups: list[int], seed: int) -> list[tuple[int, float]]:
    """The published study's order as its description says it, by repeated search for the least arrival."""
    random = np.random.RandomState(seed)
    order = list(dict.fromkeys(groups))
    random.shuffle(order)
    remaining = {group: [row for row, owner in enumerate(groups) if owner == group] for group in order}
    arrival = {group: random.exponential(1.0) for group in order}
    out = []
    while arrival:
        group = min(arrival, key=lambda g: (arrival[g], order.index(g)))
        out.append((remaining[group].pop(0), arrival[group]))
        if remaining[group]:
            arrival[group] += random.exponential(1.0)
        else:
            del arrival[group]
    return out


@pytest.mark.parametrize("seed", [42, 0, 1])
@pytest.mark.parametrize("shape", [[3], [1, 1], [5, 1, 9, 2, 7], [20] * 30])
def test_interleaved_legacy_is_the_published_order(shape, seed):
    groups = [100 - g for g, size in enumerate(shape) for _ in range(size)]
    np.random.default_rng(seed).shuffle(groups)
    arriving = InterleavedLegacy(seed=seed).arrive(make_requests(groups), rng())
    expected = legacy_oracle(groups, seed)
    assert ids(arriving) == [row for row, _ in expected]
    assert times(arriving) == [round(time * 1e9) for _, time in expected]


def test_interleaved_legacy_defaults_to_the_published_seed():
    requests = make_requests([0, 1, 2] * 4)
    assert ids(InterleavedLegacy().arrive(requests, rng())) == ids(InterleavedLegacy(seed=42).arrive(requests, rng()))


def test_resampled_popularity_is_zipf_over_groups_and_uniform_within():
    requests = make_requests([0] * 4 + [1] * 2 + [2])
    n = 30_000
    drawn = resample(requests, n, 1.0, rng())
    assert ids(drawn) == list(range(n))
    shares = np.sort(np.bincount([request.group_id for request in drawn]))[::-1] / n
    for rank, share in enumerate(shares, start=1):
        p = (1 / rank) / (1 + 1 / 2 + 1 / 3)
        assert abs(share - p) < Z * math.sqrt(p * (1 - p) / n)


def test_resampling_is_uniform_within_a_group():
    marked = tuple(Request(id=i, group_id=0, spans=(), output_len=i) for i in range(5))
    n = 10_000
    counts = np.bincount([request.output_len for request in resample(marked, n, 1.0, rng())])
    assert (abs(counts - n / 5) < Z * math.sqrt(n * 0.2 * 0.8)).all()


def test_exponent_zero_makes_groups_alike_and_seeds_shuffle_the_ranks():
    requests = make_requests([0, 1, 2, 3])
    even = np.bincount([request.group_id for request in resample(requests, 8_000, 0.0, rng())])
    assert (abs(even - 2_000) < Z * math.sqrt(8_000 * 0.25 * 0.75)).all()
    favourites = set()
    for seed in range(8):
        drawn = resample(requests, 400, 2.0, rng(seed))
        favourites.add(int(np.bincount([request.group_id for request in drawn]).argmax()))
    assert len(favourites) > 1


def test_nothing_arrives_from_nothing():
    assert Poisson(rate_rps=1.0).arrive((), rng()) == []
    assert PoissonPerGroup(rate_rps=1.0).arrive((), rng()) == []
    assert InterleavedLegacy().arrive((), rng()) == []
    assert AsGiven().arrive((), rng()) == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda r: Poisson(rate_rps=0.0).arrive(r, rng()), "arrivals.rate_rps=0.0: expected a number above zero"),
        (lambda r: PoissonPerGroup(rate_rps=-1.0).arrive(r, rng()), "arrivals.rate_rps=-1.0"),
        (lambda r: Gamma(rate_rps=1.0, burstiness=0.0).arrive(r, rng()), "arrivals.burstiness=0.0"),
        (
            lambda r: Poisson(rate_rps=1.0, order="random").arrive(r, rng()),
            "arrivals.order=random: expected one of shuffled, as_given",
        ),
        (lambda r: AsGiven().arrive(r + r, rng()), "requests.id repeats 0, expected every id once"),
        (lambda r: Poisson(rate_rps=1.0).arrive(r + r, rng()), "requests.id repeats"),
        (lambda r: resample(r, 0, 1.0, rng()), "popularity.n is 0"),
        (lambda r: resample(r, 5, -1.0, rng()), "popularity.zipf_exponent is -1.0"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call(make_requests([0, 1]))


def test_a_closed_loop_keeps_groups_together_or_shuffles():
    requests = make_requests([0, 1, 0, 2, 1, 2, 0])
    grouped = ClosedLoop(clients=2).arrive(requests, rng())
    members = {0: [0, 2, 6], 1: [1, 4], 2: [3, 5]}
    first = list(dict.fromkeys(request.group_id for request in grouped))
    assert ids(grouped) == [member for group in first for member in members[group]]
    shuffled = ClosedLoop(clients=2, order="shuffled").arrive(requests, rng())
    assert ids(shuffled) == ids(Saturating().arrive(requests, rng()))
    assert ids(ClosedLoop(clients=2, order="as_given").arrive(requests, rng())) == list(range(7))
    assert set(times(grouped + shuffled)) == {0}


def test_an_open_loop_may_keep_groups_together():
    requests = make_requests([0, 1, 0, 2, 1, 2, 0])
    arriving = Saturating(order="by_group").arrive(requests, rng())
    assert ids(arriving) == ids(ClosedLoop(clients=1).arrive(requests, rng()))
