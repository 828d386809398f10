"""Positions of states: every rule by hand, the learned placement against a naive one."""

from itertools import combinations

import numpy as np
import pytest

from spanlab.core.placement import (
    Union,
    balanced,
    boundary,
    branch,
    every_n,
    last,
    no_states,
    powers_of_two,
    square_root,
    tail,
)
from spanlab.core.placement.dynamic_program import place, published_bins, solve_as_published
from spanlab.model_spec import in_tokens, tokens

from .factories import at, make_dp, make_facts, make_info


def admit(placer, prefill) -> list[int]:
    """Return positions for one admitted request."""
    placer.observe(prefill)
    return list(placer.place(prefill))


@pytest.mark.parametrize(
    ("rule", "prompt", "positions"),
    [
        (no_states(), 100, []),
        (every_n(4), 3, []),
        (every_n(4), 4, [4]),
        (every_n(4), 11, [4, 8]),
        (balanced(3), 8, [2, 4, 6]),
        (balanced(3), 11, [2, 4, 6]),
        (balanced(3), 12, [3, 6, 9]),
        (balanced(1), 9, [4]),
        (balanced(5), 3, [1, 2, 3]),
        (balanced(300), 2, [1, 2]),
        (square_root(), 1, [1]),
        (square_root(), 10, [3, 6, 9]),
        (square_root(), 16, [4, 8, 12, 16]),
        (powers_of_two(), 1023, []),
        (powers_of_two(), 1024, [1024]),
        (powers_of_two(), 4095, [1024, 2048]),
        (powers_of_two(), 5000, [1024, 2048, 4096]),
        (powers_of_two(4), 20, [4, 8, 16]),
        (powers_of_two(5), 20, [8, 16]),
        (last(), 17, [17]),
        (tail(1, 4, facts=make_facts(8)), 17, [13]),
        (tail(3, facts=make_facts(4)), 40, [24, 32, 36]),
        (tail(3, facts=make_facts(4)), 16, [8, 12]),
        (tail(2, 4, facts=make_facts(8)), 4, []),
    ],
)
def test_a_rule_places_exactly_there(rule, prompt, positions):
    assert admit(rule, make_info(prompt)) == positions


def test_boundary_places_where_the_workload_promises():
    assert admit(boundary(), make_info(20, boundaries=(5, 12))) == [5, 12]


def test_branch_places_where_the_prompt_left_what_is_stored():
    assert admit(branch(), make_info(20, matched=9, resume=4)) == [9]


def test_branch_places_nothing_where_a_state_stands_already():
    assert admit(branch(), make_info(20, matched=9, resume=9)) == []
    assert admit(branch(), make_info(20)) == []


def test_together_is_the_union_in_order():
    both = Union((every_n(4), at(6, 8), last()))
    assert admit(both, make_info(10)) == [4, 6, 8, 10]


def test_together_lets_every_placement_observe():
    learned = [make_dp(warmup=1), make_dp(warmup=1)]
    both = Union(tuple(learned))
    both.observe(make_info(40, seen=20))
    # one observation of 20 is warm-up; the second prefill solves with it
    assert admit(both, make_info(40)) == [20]


# -- learned ----------------------------------------------------------------------------------------------------------


class NaiveLearned:
    """Decays every bin at every observation and tries every set of bins; `place` returns all optimal sets."""

    def __init__(self, count, grid, max_tokens, warmup=0, every=10, decay=1.0, smoothing=0.0, **options):
        self.count, self.bin, self.bins = count, grid, max_tokens // grid
        self.warmup, self.decay, self.smoothing = warmup, decay, smoothing
        self.every = 0 if options.get("update") == "frozen" else every
        self.per_length, self.censored = "backtrack" not in options, "observe" in options
        self.histogram = [0.0] * (self.bins + 1)
        self.observed, self.solved = 0, None

    def best(self, prefill) -> list[list[int]]:
        if self.observed == self.warmup:
            self.solved = list(self.histogram)
        depth = prefill.matched if self.censored else prefill.seen
        self.histogram = [mass * self.decay for mass in self.histogram]
        self.histogram[min(depth // self.bin, self.bins)] += 1
        self.observed += 1
        if self.observed > self.warmup and self.every and self.observed % self.every == 0:
            self.solved = list(self.histogram)
        return self.expected(prefill.prompt)

    def expected(self, prompt) -> list[list[int]]:
        knows = self.solved is not None and (any(self.solved[1:]) or self.smoothing > 0 or self.observed >= self.every)
        if not knows:
            step = max(1, prompt // (self.count + 1))
            return [[step * k for k in range(1, self.count + 1) if step * k <= prompt]]
        reach = min(self.bins, prompt // self.bin) if self.per_length else self.bins
        if reach == 0:
            return [[]]
        return [[self.bin * s for s in chosen if self.bin * s <= prompt] for chosen in self.optima(reach)]

    def optima(self, reach) -> list[tuple[int, ...]]:
        mass = {t: self.solved[t] + self.smoothing for t in range(1, reach + 1)}
        mass[reach] += sum(self.solved[t] + self.smoothing for t in range(reach + 1, self.bins + 1))
        mass = {t: p for t, p in mass.items() if p > 0}
        sets = [c for size in range(min(self.count, len(mass)) + 1) for c in combinations(mass, size)]
        costs = [sum(p * (t - max((s for s in c if s <= t), default=0)) for t, p in mass.items()) for c in sets]
        return [c for c, cost in zip(sets, costs, strict=True) if cost <= min(costs) * (1 + 1e-9) + 1e-12]


def visits(seed, number=60):
    rng = np.random.default_rng(seed)
    for _ in range(number):
        seen = int(rng.choice([0, 15, 37, 42, 66, 200, int(rng.integers(0, 90))]))
        yield make_info(int(rng.integers(1, 100)), seen=seen, matched=int(rng.integers(0, seen + 1)))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "options",
    [
        {"warmup": 7, "update": "frozen"},
        {"warmup": 7, "every": 5},
        {"every": 4},
        {"every": 3, "update": "decayed", "decay": 0.8},
        {"warmup": 12, "every": 10, "update": "decayed", "decay": 0.5},
        {"every": 6, "smoothing": 0.5},
        {"warmup": 5, "every": 4, "update": "decayed", "decay": 0.9, "smoothing": 0.1, "backtrack": "fixed"},
        {"warmup": 5, "every": 4, "backtrack": "fixed"},
        {"warmup": 5, "every": 4, "observe": "matched"},
        {"warmup": 20, "every": 7, "update": "decayed", "decay": 0.95, "observe": "matched", "backtrack": "fixed"},
    ],
    ids=lambda options: "-".join(f"{key}={value}" for key, value in options.items()),
)
@pytest.mark.parametrize("count", [1, 3])
def test_learned_places_one_of_the_naive_optima(count, options, seed):
    settings = {"count": count, "grid": 10, "max_tokens": 80, **options}
    learned, naive = make_dp(**settings), NaiveLearned(**settings)
    for prefill in visits(seed):
        assert admit(learned, prefill) in naive.best(prefill)


def test_learned_is_balanced_until_the_warm_up_is_over():
    learned = make_dp(count=3, warmup=2, update="frozen")
    assert admit(learned, make_info(40, seen=50)) == [10, 20, 30]
    assert admit(learned, make_info(80, seen=50)) == [20, 40, 60]
    assert admit(learned, make_info(80)) == [50]


def test_decay_forgets_what_periodic_remembers():
    depths = [30] * 12 + [70] * 4
    forgets, remembers = make_dp(update="decayed", every=1, decay=0.5), make_dp(every=1)
    for depth in depths:
        placed = [admit(placement, make_info(80, seen=depth)) for placement in (forgets, remembers)]
    # remembered: one state at 30 leaves 4·40, one at 70 leaves 12·30
    assert placed == [[70], [30]]


def test_published_solver_puts_a_spare_state_into_first_bin():
    def placed(count, depths):
        learned = make_dp(count=count, warmup=len(depths), update="frozen", backtrack="fixed", solver="published")
        for depth in depths:
            learned.observe(make_info(80, seen=depth))
        return admit(learned, make_info(80))

    assert placed(2, [40, 60]) == [40, 60]
    assert placed(3, [40, 60]) == [10, 40, 60]
    assert placed(5, [40, 60]) == [10, 40, 60]
    assert placed(3, [10, 60]) == [10, 60]
    assert placed(2, [0, 0]) == [10]


def test_depths_beyond_the_range_count_in_the_last_bin():
    learned = make_dp(warmup=1)
    learned.observe(make_info(500, seen=450))
    assert admit(learned, make_info(500)) == [80]


def squares(start, stop):
    """A cost that grows with depth."""
    return np.square(stop) - np.square(start)


def test_cost_decides_where_the_one_state_goes():
    # tokens: a state at 20 leaves 1·60, one at 80 leaves 4·20; squares: at 20 leaves 6000, at 80 leaves 1600
    depths = [20] * 4 + [80]
    for cost, position in ((in_tokens, 20), (lambda usual: squares, 80)):
        learned = make_dp(warmup=5, update="frozen", cost=cost)
        for depth in depths:
            learned.observe(make_info(80, seen=depth))
        assert admit(learned, make_info(80)) == [position]


# -- The published study: its rounding, first minima and restarts, against the recurrence in plain loops. ---


def plain_recurrence(histogram, count) -> list[int]:
    """Solve with Python float operations in the published order, with the first minimum in s."""
    last_bin = len(histogram) - 1
    share = histogram / histogram.sum()
    mass, moment = np.cumsum(share).tolist(), np.cumsum(share * np.arange(len(share))).tolist()
    cost, layers = moment, []
    for _ in range(min(count, last_bin)):
        best, split = [0.0], [0]
        for j in range(1, last_bin + 1):
            options = [cost[s - 1] + moment[j] - (moment[s - 1]) - s * (mass[j] - mass[s - 1]) for s in range(1, j + 1)]
            best.append(min(options))
            split.append(1 + options.index(min(options)))
        cost = best
        layers.append(split)
    chosen, j = set(), last_bin
    for split in reversed(layers):
        chosen.add(split[j])
        j = split[j] - 1  # -1 is the last bin again
    return sorted(chosen - {0})


def decayed_histogram(rng, bins, observations) -> np.ndarray:
    """Return a decayed histogram of depths; two thirds are on every third bin, so that bins without mass remain."""
    histogram = np.zeros(bins + 1)
    for _ in range(observations):
        histogram *= 0.99
        depth = int(rng.integers(0, bins + 1))
        histogram[depth if rng.random() < 0.3 else depth // 3 * 3] += 1
    return histogram


@pytest.mark.parametrize("seed", range(60))
def test_published_bins_equal_the_plain_recurrence(seed):
    rng = np.random.default_rng(seed)
    bins = int(rng.integers(1, 40))
    histogram = decayed_histogram(rng, bins, int(rng.integers(1, 80)))
    for count in (1, 2, 3, 8, bins // 2 + 1, bins, bins + 5):
        assert published_bins(histogram, count) == plain_recurrence(histogram, count)


def test_rounding_decides_between_placements_without_loss():
    """With a state for every depth all exact costs are zero; the published sums place states where no match ended."""
    histogram = decayed_histogram(np.random.default_rng(4), 30, 40)
    depths = np.flatnonzero(histogram[1:]) + 1
    published = published_bins(histogram, 30)
    exact = place(np.arange(1, 31), histogram[1:], 30).positions()
    assert exact == depths.tolist()
    assert set(published) - {1, *exact}
    assert published == plain_recurrence(histogram, 30)


def test_first_of_equal_splits_wins():
    assert published_bins(np.array([0.0, 1.0, 1.0]), 1) == [1]
    assert published_bins(np.array([4.0, 0.0, 0.0, 0.0]), 2) == [1]


def test_hand_worked_histogram_of_exact_sums():
    histogram = np.array([0.0, 0, 0, 4, 0, 3, 0, 0, 1])
    # one state at 3 loses 2 · 3 + 5, one at 5 loses 12 + 3
    assert published_bins(histogram, 1) == [3]
    assert published_bins(histogram, 2) == [3, 5]
    assert solve_as_published(histogram, 64, 2, tokens()).positions() == [192, 320]
    assert solve_as_published(histogram, 64, 2, tokens()).positions_within(200) == [192]
