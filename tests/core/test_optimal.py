"""Optimal placement against brute force and against the plain quadratic recurrence."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spanlab.core.placement import dynamic_program
from spanlab.core.placement.dynamic_program import place


def expected_work(depths, mass, chosen, work=None) -> float:
    """The objective, as defined in the docstring."""
    weigh = (lambda depth: depth) if work is None else dict(zip(depths, work, strict=True)).__getitem__
    total = 0.0
    for depth, p in zip(depths, mass, strict=True):
        below = [s for s in chosen if s <= depth]
        total += p * (weigh(depth) - (weigh(max(below)) if below else 0))
    return total


def brute_force(depths, mass, count, work=None) -> float:
    """The least objective over every choice of at most `count` depths."""
    sets = (chosen for size in range(count + 1) for chosen in combinations(depths, size))
    return min(expected_work(depths, mass, chosen, work) for chosen in sets)


def recurrence(mass, work, count) -> list[float]:
    """Optimal cost with 0 … count checkpoints in O(K²·M): the last checkpoint is at s, the others before it."""
    K = len(work)
    mass_to, work_to = np.concatenate([[0], np.cumsum(mass)]), np.concatenate([[0], np.cumsum(mass * work)])
    cost = work_to.copy()
    totals = [float(cost[-1])]
    for _ in range(count):
        better = cost.copy()
        for j in range(1, K + 1):
            s = np.arange(1, j + 1)
            ending = cost[s - 1] + (work_to[j] - work_to[s - 1]) - work[s - 1] * (mass_to[j] - mass_to[s - 1])
            better[j] = min(cost[j], float(ending.min()))
        cost = better
        totals.append(float(cost[-1]))
    return totals


def solve(depths, mass, count, work=None):
    return place(np.array(depths, np.int64), np.array(mass, float), count, None if work is None else np.array(work))


small = st.lists(
    st.tuples(st.integers(1, 30), st.sampled_from([0, 0, 1, 1, 2, 3, 10, 1000])),
    min_size=1,
    max_size=10,
    unique_by=lambda pair: pair[0],
).map(sorted)


@settings(deadline=None, max_examples=120)
@given(small, st.integers(0, 11))
def test_cost_equals_brute_force_with_gaps_ties_and_zero_mass(pairs, count):
    depths, mass = zip(*pairs, strict=True)
    solution = solve(depths, mass, count)
    best = brute_force(depths, mass, min(count, len(depths)))
    # masses and depths are integers: the arithmetic is exact
    assert expected_work(depths, mass, solution.positions()) == best
    assert solution.cost[-1] == best


@settings(deadline=None, max_examples=100)
@given(small, st.integers(0, 5))
def test_positions_lie_in_the_support_increasing_and_beyond_zero(pairs, count):
    depths, mass = zip(*pairs, strict=True)
    positions = solve(depths, mass, count).positions()
    support = [depth for depth, p in pairs if p]
    assert positions == sorted(set(positions))
    assert set(positions) <= set(support)
    assert len(positions) <= count


@settings(deadline=None, max_examples=100)
@given(small, st.integers(0, 6))
def test_cost_never_rises_and_gains_never_rise_with_the_count(pairs, count):
    depths, mass = zip(*pairs, strict=True)
    cost = solve(depths, mass, count).cost
    gains = -np.diff(cost)
    assert (gains >= 0).all()
    assert (np.diff(gains) <= 0).all()


def clipped(depths, mass, limit) -> tuple[list[int], list[int]]:
    """The grid within the limit, and its mass; deeper matches count at the limit's grid depth."""
    inside = [depth for depth in depths if depth <= limit]
    weights = list(mass[: len(inside)])
    if inside:
        weights[-1] += sum(mass[len(inside) :])
    return inside, weights


@settings(deadline=None, max_examples=150)
@given(small, st.integers(0, 5), st.integers(0, 35))
def test_mass_beyond_a_limit_counts_at_the_limit(pairs, count, limit):
    depths, mass = zip(*pairs, strict=True)
    inside, weights = clipped(depths, mass, limit)
    positions = solve(depths, mass, count).positions_within(limit)
    assert positions == sorted(set(positions))
    assert set(positions) <= set(inside)
    assert len(positions) <= count
    if inside:
        assert expected_work(inside, weights, positions) == brute_force(inside, weights, count)


@settings(deadline=None, max_examples=100)
@given(small, st.integers(0, 5), st.integers(0, 35), st.lists(st.integers(1, 50), min_size=10, max_size=10))
def test_a_limit_clips_mass_for_any_increasing_work(pairs, count, limit, increments):
    depths, mass = zip(*pairs, strict=True)
    work = np.cumsum(increments)[: len(depths)].tolist()
    inside, weights = clipped(depths, mass, limit)
    positions = solve(depths, mass, count, work).positions_within(limit)
    if inside:
        within = work[: len(inside)]
        assert expected_work(inside, weights, positions, within) == brute_force(inside, weights, count, within)


def masses(rng, K):
    """Histograms of very different shapes, the exponentials of growing weights among them."""
    flat = rng.random(K)
    yield flat
    yield rng.integers(0, 4, K).astype(float)
    yield np.exp(-np.arange(K) / rng.uniform(2, 60))
    yield np.exp(np.arange(K) / rng.uniform(2, 60))
    yield flat * 0.99 ** rng.permutation(K * 8)[:K]
    yield rng.pareto(1.1, K)


@pytest.mark.parametrize("seed", range(5))
def test_cost_equals_the_quadratic_recurrence_on_large_random_instances(seed):
    rng = np.random.default_rng(seed)
    K, count = int(rng.integers(50, 401)), int(rng.integers(1, 33))
    depths = np.cumsum(rng.integers(1, 5, K)) * 64
    flops = depths * 1e6 + depths * (depths + 1) / 2 * 3e3
    for mass in masses(rng, K):
        for work in (None, flops):
            w = depths.astype(float) if work is None else work
            want = np.array(recurrence(mass, w, count))
            solution = place(depths, mass, count, work)
            np.testing.assert_allclose(solution.cost, want[: len(solution.cost)], rtol=1e-9, atol=1e-9 * want[0])
            assert (want[len(solution.cost) :] <= 1e-9 * want[0]).all()
            got = expected_work(depths.tolist(), mass, solution.positions(), w)
            np.testing.assert_allclose(got, want[-1], rtol=1e-9, atol=1e-9 * want[0])


@pytest.mark.parametrize("seed", range(6))
def test_every_limit_of_a_large_instance_is_solved_at_once(seed):
    rng = np.random.default_rng(seed)
    depths = np.arange(1, 201) * 64
    mass = rng.integers(0, 50, 200).astype(float)
    solution = place(depths, mass, 8)
    for last in range(1, 200, 17):
        inside, weights = clipped(depths.tolist(), mass.tolist(), 64 * last + 63)
        want = recurrence(np.array(weights), np.array(inside, float), 8)[-1]
        assert expected_work(inside, weights, solution.positions_within(64 * last + 63)) == want


def test_hand_worked_example():
    # without any: 1·10 + 8·20 + 1·30 = 200; one at 20: 10 + 0 + 10; two at 10 and 20: 10
    solution = solve([10, 20, 30], [1, 8, 1], 2)
    assert solution.cost.tolist() == [200, 20, 10]
    assert solve([10, 20, 30], [1, 8, 1], 1).positions() == [20]


def test_the_smaller_depth_wins_a_tie():
    # one checkpoint, on either depth, leaves 10
    assert expected_work([10, 20], [1, 1], [10]) == expected_work([10, 20], [1, 1], [20]) == 10
    assert solve([10, 20], [1, 1], 1).positions() == [10]


@pytest.mark.parametrize("mass", [[], [0, 0, 0]])
def test_no_mass_needs_no_checkpoint(mass):
    solution = solve(list(range(1, len(mass) + 1)), mass, 3)
    assert solution.positions() == []
    assert solution.cost.tolist() == [0]


def test_the_scan_takes_over_where_pruning_does_not_settle_the_hull(monkeypatch):
    sizes = []

    def spy(points, x, y):
        sizes.append(len(points))
        return scan(points, x, y)

    scan = dynamic_program._scan
    monkeypatch.setattr(dynamic_program, "_scan", spy)
    rng = np.random.default_rng(0)
    for rate in (0.01, 0.02, 0.05):
        # ever steeper, then one flat step far away: it pops the convex run before it one point a round
        depths = np.concatenate([np.arange(1, 300), [30_000]])
        mass = np.exp(rate * np.minimum(depths, 300)) * rng.uniform(0.99, 1.01, 300)
        mass[-1] = 1e-3
        want = recurrence(mass, depths.astype(float), 12)
        np.testing.assert_allclose(place(depths, mass, 12).cost, want, rtol=1e-9, atol=1e-9 * want[0])
    assert sizes, "no instance needed the scan"
    assert max(sizes) > 3


def lower_hull_by_definition(x, y) -> list[int]:
    """Points that lie strictly below every segment between an earlier and a later point."""
    return [
        i
        for i in range(len(x))
        if all(
            (y[i] - y[a]) * (x[b] - x[a]) < (y[b] - y[a]) * (x[i] - x[a])
            for a in range(i)
            for b in range(i + 1, len(x))
        )
    ]


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(-40, 40)), min_size=1, max_size=24), st.integers(0, 12))
def test_pruning_and_scan_find_the_hull_however_the_work_is_split(points, rounds):
    x = np.cumsum([step for step, _ in points]).astype(float)
    y = np.array([height for _, height in points], float)
    want = lower_hull_by_definition(x, y)
    original = dynamic_program._PRUNING_ROUNDS
    try:
        dynamic_program._PRUNING_ROUNDS = rounds
        assert dynamic_program._lower_hull(x, y).tolist() == want
    finally:
        dynamic_program._PRUNING_ROUNDS = original


@pytest.mark.parametrize("seed", range(8))
def test_bins_of_the_grid_lose_nothing_against_tokens_on_the_grid(seed):
    """The optimum over depths floored to the grid is the token-level optimum among grid positions."""
    rng = np.random.default_rng(seed)
    grid, count = 4, 3
    tokens = rng.integers(1, 60, 40)
    depths, weight = np.unique(tokens, return_counts=True)

    candidates = range(grid, 61, grid)
    best = min(
        expected_work(depths.tolist(), weight, chosen)
        for size in range(count + 1)
        for chosen in combinations(candidates, size)
    )

    bins, mass = np.unique(tokens // grid * grid, return_counts=True)
    binned = place(bins[bins > 0], mass[bins > 0].astype(float), count).positions()
    assert all(position % grid == 0 for position in binned)
    assert expected_work(depths.tolist(), weight, binned) == best
