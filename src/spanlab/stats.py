"""Confidence intervals, tests of several hypotheses, and percentiles."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spanlab.records import ttft

Values = Sequence[float] | NDArray[np.floating] | NDArray[np.integer]


class Interval(NamedTuple):
    """A mean and its confidence bounds; the bounds are None for a single value."""

    mean: float
    low: float | None
    high: float | None

    @property
    def ends(self) -> tuple[float, float] | None:
        """Both bounds; None where either is missing."""
        return None if self.low is None or self.high is None else (self.low, self.high)

    def clipped(self) -> Interval:
        """Return the interval of a share: its bounds clipped to 0 to 1."""
        ends = self.ends
        return Interval(self.mean, max(ends[0], 0.0), min(ends[1], 1.0)) if ends else self


def t_interval(values: Values, level: float = 0.95) -> Interval:
    """Mean and two-sided Student t interval: mean ± t(n − 1, (1 + level) / 2) · s / √n, s with n −
    1.

    Values must be independent, as one per seed is.
    """
    sample = _sample("values", values)
    if not 0 < level < 1:
        raise ValueError(f"stats.level is {level}, expected a probability between 0 and 1.")
    mean = float(sample.mean())
    if sample.size < 2:
        return Interval(mean, None, None)
    half = (
        t_quantile((1 + level) / 2, sample.size - 1)
        * float(sample.std(ddof=1))
        / math.sqrt(sample.size)
    )
    return Interval(mean, mean - half, mean + half)


def t_test(values: Values) -> float:
    """Two-sided p value of a mean of zero by Student's t; NaN for one value, equal values leave no
    doubt."""
    sample = _sample("values", values)
    if sample.size < 2:
        return math.nan
    error = float(sample.std(ddof=1)) / math.sqrt(sample.size)
    mean = float(sample.mean())
    if error <= 1e-12 * abs(mean):
        return 0.0 if mean else 1.0
    return two_sided_p(mean / error, sample.size - 1)


def two_sided_p(statistic: float, degrees: float) -> float:
    """Probability that Student's t with `degrees` degrees of freedom is as far from zero as
    `statistic`."""
    from scipy.special import stdtr  # as in `t_quantile`

    return 2 * float(stdtr(degrees, -abs(statistic)))


def holm(p_values: Sequence[float], level: float = 0.05) -> list[bool]:
    """Whether each hypothesis is rejected; the probability of any false rejection is at most
    `level` (Holm 1979).

    The i-th smallest of m values is compared with level / (m - i + 1), up to the first that is not
    below. NaN, as of a test without data, counts among the m and is never rejected.
    """
    order = sorted(
        range(len(p_values)), key=lambda index: (math.isnan(p_values[index]), p_values[index])
    )
    rejected = [False] * len(p_values)
    for rank, index in enumerate(order):
        if not p_values[index] < level / (len(order) - rank):
            break
        rejected[index] = True
    return rejected


def t_quantile(probability: float, degrees: float) -> float:
    """Quantile of Student's t distribution with `degrees` degrees of freedom."""
    # Here and not above: most users of this module never need SciPy, and scipy.stats would cost
    # half a second.
    from scipy.special import stdtrit

    return float(stdtrit(degrees, probability))


def paired_ratio_interval(numerators: Values, denominators: Values) -> Interval:
    """Geometric mean of the ratios numerators[i] / denominators[i], with the 95 % t interval of
    their logarithms.

    Pairs share their noise, which divides out. No end of the interval is negative.
    """
    above, below = _sample("numerators", numerators), _sample("denominators", denominators)
    if above.shape != below.shape:
        raise ValueError(
            f"stats.numerators has {above.size} values, expected {below.size} as denominators has."
        )
    for key, values in (("numerators", above), ("denominators", below)):
        if not (values > 0).all():
            raise ValueError(f"stats.{key} has {values.min()}, expected positive values.")
    mean, *ends = t_interval(np.log(above / below))
    low, high = (None if end is None else math.exp(end) for end in ends)
    return Interval(math.exp(mean), low, high)


def percentile(values: Values, percent: float) -> float:
    """Percentile by linear interpolation between order statistics, position (n − 1) · percent / 100
    counted from 0."""
    return float(np.percentile(_sample("values", values), percent, method="linear"))


def _sample(key: str, values: Values) -> NDArray[np.float64]:
    sample = np.asarray(values, dtype=np.float64)
    if sample.ndim != 1 or not sample.size:
        raise ValueError(
            f"stats.{key} has shape {sample.shape}, expected one row of at least one value."
        )
    return sample


# ------------------------------------------------------------------------------
# Stationarity of a simulated queue: a drift test of its length, and the length of its warm-up.
#
# A stable queue has a steady state, and its mean delay is a property of the system. The delays
# of an unstable queue grow with the length of the run, so that their mean says how long the run
# was.
# ------------------------------------------------------------------------------

Times = NDArray[np.float64]

STEADY, UNSETTLED, SATURATED, TOO_SHORT = "steady", "unsettled", "saturated", "too short"
CLOSED = "closed loop"

#: Blocks of equal time into which one run is cut for the drift test.
STEADY_BLOCKS = 20
#: Level of the drift test.
ALPHA = 0.01
#: Requests below which a warm-up cannot be told from noise: 20 batches of MSER-5.
SHORTEST = 100
_BATCH = 5


@dataclass(frozen=True)
class Run:
    """Arrivals and first tokens of the requests of one seed, seconds, shape (n,), in any order."""

    arrived_s: Times
    first_token_s: Times


@dataclass(frozen=True)
class Stationarity:
    """Whether a cell (an arm at a load, its seeds pooled) is stationary.

    verdict          `steady`; `unsettled`: the warm-up has no end in the first half of the run;
                     `saturated`: the queue grows, or the offered work exceeds the capacity; `too
                     short`: fewer than 100 arrivals per seed, and no drift that they could show;
                     `closed loop`: arrivals wait for finished requests, so that no queue can grow
    drift_p          p value of the drift test; None without two arrivals at different times
    drift_rps        growth of the queue, requests per second; None as above
    warmup_requests  arrivals that MSER-5 truncates; None where the run is too short
    """

    verdict: str
    drift_p: float | None
    drift_rps: float | None
    warmup_requests: int | None


@dataclass(frozen=True)
class Drift:
    """Growth of a queue in requests per second, and the p value of the test that it is above
    zero."""

    rate_rps: float
    p: float


def assess(runs: Sequence[Run], utilisation: float | None = None) -> Stationarity:
    """Stationarity of one cell; `runs` are its seeds, `utilisation` its offered work ÷ capacity."""
    drift = drift_test(runs)
    # MSER-5 of the TTFT of the k-th arrival, averaged over the seeds as in Welch's method
    shortest = min(len(run.arrived_s) for run in runs)
    if shortest < SHORTEST:
        warmup = None
    else:
        series = []
        for run in runs:
            order = np.argsort(run.arrived_s, kind="stable")[:shortest]
            series.append(ttft(run.arrived_s[order], run.first_token_s[order]))
        warmup = mser5(np.mean(series, axis=0))
    overloaded = utilisation is not None and utilisation >= 1
    growing = drift is not None and drift.p < ALPHA
    # several requests that come at one time, all of them: no rate, and no steady state
    at_once = any(len(run.arrived_s) > 1 and np.ptp(run.arrived_s) == 0 for run in runs)
    if overloaded or growing or at_once:
        verdict = SATURATED
    elif warmup is None:
        verdict = TOO_SHORT
    else:
        verdict = UNSETTLED if warmup >= _BATCH * (shortest // _BATCH // 2) else STEADY
    p, rate_rps = (drift.p, drift.rate_rps) if drift else (None, None)
    return Stationarity(verdict, p, rate_rps, warmup)


def drift_test(runs: Sequence[Run]) -> Drift | None:
    """One-sided t test that the number of requests waiting for their first token grows.

    Tested are the changes of that number over equal blocks of time, from the first arrival to the
    last, those of all seeds together. The number waiting is correlated over hundreds of requests.
    Its changes are not: it is a random walk that is reflected at zero (Lindley's recursion;
    Asmussen, Applied Probability and Queues, 2003, III.6). Below saturation the changes cancel
    out, and the test rejects far less often than its level says. At a load of exactly 1, where no
    steady state exists, each walk ends at |N(0, 1)| standard errors; above it, the sum of the
    changes grows with the length of the run. None where no seed has arrivals at two times.
    """
    from scipy.special import stdtr  # scipy.stats would cost half a second

    changes_by_run = [
        changes(run) for run in runs if len(run.arrived_s) > 1 and np.ptp(run.arrived_s) > 0
    ]
    if not changes_by_run:
        return None
    grown, counts = sum(values.sum() for values in changes_by_run), np.concatenate(changes_by_run)
    seconds = sum(np.ptp(run.arrived_s) for run in runs)
    # one-sided p value of Student's t test of a mean above zero; equal values leave no doubt
    mean, error = counts.mean(), counts.std(ddof=1) / np.sqrt(counts.size)
    p = float(mean <= 0) if error == 0 else float(stdtr(counts.size - 1, -mean / error))
    return Drift(float(grown / seconds), p)


def changes(run: Run) -> Times:
    """Changes of the number waiting over equal blocks of time: 20, or one per two arrivals."""
    arrived, served = np.sort(run.arrived_s), np.sort(run.first_token_s)
    blocks = max(2, min(STEADY_BLOCKS, len(arrived) // 2))
    ends = np.linspace(arrived[0], arrived[-1], blocks + 1)
    came = np.searchsorted(arrived, ends, side="right")
    waiting = came - np.searchsorted(served, ends, side="right")
    differences: Times = np.diff(waiting).astype(np.float64)
    return differences


def mser5(values: Times) -> int:
    """How many values of a series to truncate as its warm-up, a multiple of 5.

    MSER-5 (White, Cobb and Spratt, WSC 2000): of batch means over 5 values, leave out the first d
    such that the variance of the others ÷ their number is least, d up to half of the batches. A
    result of half says that the warm-up did not end.
    """
    batches = len(values) // _BATCH
    means = (
        np.asarray(values[: batches * _BATCH], dtype=np.float64).reshape(batches, _BATCH).mean(1)
    )
    # variance of means[d:] ÷ their number, for every d; by Welford's update from the end
    back, counts = means[::-1], np.arange(1, len(means) + 1)
    average = np.cumsum(back) / counts
    steps = back - np.concatenate([back[:1], average[:-1]])
    squares = np.cumsum(steps**2 * (counts - 1) / counts)
    scores = (squares / counts**2)[::-1][: batches // 2 + 1]
    equal = (1e-9 * np.abs(means).max(initial=0.0)) ** 2  # what rounding makes of equal means
    return _BATCH * int(np.argmax(scores <= scores.min() + equal))


# ------------------------------------------------------------------------------
# Intervals that cover workload and arrivals: cluster bootstrap over groups of requests and
# seeds.
# ------------------------------------------------------------------------------

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

DRAWS = 1000
MOST_DRAWN = 2048  #: clusters that are drawn one by one; of more, those with equal remainders are drawn together
SKEWED = 10  #: clusters from which their skewness can be estimated
LEAST_SEEDS = 4
LEAST_GROUPS = 10  #: fewer seeds or groups, but more than one, give intervals that are too narrow
_SEED = 20240229


@dataclass(frozen=True)
class Clusters:
    """Requests by seed and by group; a group has the requests of one document, in every seed.

    seed, group  indices from 0, shape (n,)
    seeds, groups  numbers of seeds and groups
    """

    seed: Ints
    group: Ints
    seeds: int
    groups: int

    @staticmethod
    def of(seeds: Ints, groups: Ints) -> Clusters:
        """Return clusters of requests with these seeds and group ids, both of shape (n,)."""
        seed_values, seed = np.unique(seeds, return_inverse=True)
        group_values, group = np.unique(groups, return_inverse=True)
        return Clusters(seed, group, len(seed_values), len(group_values))

    def sums(self, values: NDArray[np.floating] | Ints) -> Floats:
        """Return sums of `values`, shape (n,), by seed and group, shape (seeds, groups)."""
        cells = self.seed * self.groups + self.group
        flat = np.bincount(cells, values, self.seeds * self.groups)
        return flat.reshape(self.seeds, self.groups).astype(np.float64, copy=False)


@dataclass(frozen=True)
class Error:
    """Standard error of an estimate, its degrees of freedom, and the skewness of the clusters.

    `skewness`  third cumulant of the estimate ÷ size³
    `bend`      coefficient of T² in `_studentised`
    """

    size: float
    degrees: float
    skewness: float = 0.0
    bend: float = 0.0


@dataclass(frozen=True)
class _Level:
    """One level of clusters: what it adds to the variance and the third cumulant of an estimate.

    `covariance`  of the numerators' errors and the denominators, relative to the estimate and to
                  the mean denominator
    """

    variance: float
    degrees: int
    third: float = 0.0
    covariance: float = 0.0


def ratio_error(above: Floats, below: Floats) -> Error | None:
    """Return the standard error of sum(above) ÷ sum(below), both of shape (seeds, groups).

    Seeds redraw the arrivals of the same groups, so both levels are crossed: each is resampled
    separately with replacement and the variances are added. This counts their interaction twice and
    is therefore never too small on that account (Owen, Annals of Applied Statistics 2007). A
    bootstrap variance of k clusters is too small by (k - 1) / k (Hesterberg, American Statistician
    2015) and is multiplied by its inverse. Degrees of freedom are Satterthwaite's. A level of one
    cluster is left out; None where both have one. The effect of a document on the waiting of others
    is not resampled.
    """
    value = float(above.sum() / below.sum())
    sums = [(above.sum(1), below.sum(1)), (above.sum(0), below.sum(0))]
    levels = [_level(*level, value) for level in sums if len(level[0]) > 1]
    if not levels:
        return None
    variance = sum(level.variance for level in levels)
    if variance == 0:
        return Error(0.0, min(level.degrees for level in levels))
    fourth = sum(level.variance**2 / level.degrees for level in levels)
    size = math.sqrt(variance)
    skewness = sum(level.third for level in levels) / size**3
    bend = skewness / 3 - sum(level.covariance for level in levels) / size
    return Error(size, variance**2 / fourth, skewness, bend)


def _level(above: Floats, below: Floats, value: float) -> _Level:
    """Return the bootstrap variance of sum(above) ÷ sum(below) over k clusters, shape (k,), and its
    third cumulant.

    Time and memory of the draws grow with the number of clusters. Of very many, random groups are
    drawn instead: their sums give the same variance (Wolter, Introduction to Variance Estimation,
    2007, chapter 2).
    """
    count = len(above)
    drawn = min(count, MOST_DRAWN)
    weights, group = drawn_counts(drawn), np.arange(count) % drawn
    top, bottom = (weights @ np.bincount(group, values, drawn) for values in (above, below))
    ratios = top[bottom > 0] / bottom[bottom > 0]
    variance = float(ratios.var()) * drawn / (drawn - 1)
    influence = (above - value * below) / below.mean()
    squares = float((influence**2).mean())
    if count < SKEWED or squares == 0:
        return _Level(variance, drawn - 1)
    skewness = (
        float((influence**3).mean()) / squares**1.5 * math.sqrt(count * (count - 1)) / (count - 2)
    )
    covariance = float(influence @ (below / below.mean() - 1)) / (count * (count - 1))
    return _Level(variance, drawn - 1, skewness * variance**1.5 / math.sqrt(count), covariance)


@functools.cache
def drawn_counts(count: int) -> Floats:
    """Return how often each draw takes each of `count` clusters, shape (draws, count); fixed random
    seed."""
    rng = np.random.default_rng([_SEED, count])
    drawn = rng.multinomial(count, np.full(count, 1 / count), DRAWS)
    return drawn.astype(np.float64)


def positive_ratio(above: Floats, below: Floats) -> Interval:
    """Return the interval of sum(above) ÷ sum(below) for a positive quantity, such as a time or a
    speedup.

    On the log scale, by the delta method: estimate · exp(± t · error / estimate), so that no end is
    negative. The scale takes account of skewness.
    """
    value = float(above.sum() / below.sum())
    error = ratio_error(above, below)
    if error is None or value == 0:
        return Interval(value, None, None)
    factor = math.exp(min(_quantile(error) * error.size / value, 700.0))
    return Interval(value, value / factor, value * factor)


def positive_ratio_p(above: Floats, below: Floats, null: float) -> float:
    """Return the two-sided p value of a ratio of `null`, by the interval of `positive_ratio`; NaN
    where it has none."""
    value = float(above.sum() / below.sum())
    error = ratio_error(above, below)
    if error is None or value == 0:
        return math.nan
    if error.size == 0:
        return float(value == null)
    return two_sided_p(math.log(value / null) * value / error.size, error.degrees)


def ratio(above: Floats, below: Floats) -> Interval:
    """Return the interval of sum(above) ÷ sum(below) for a quantity of any sign: estimate - T ·
    error.

    T is the statistic whose transform is ± t, so that the interval reaches further to the side of
    the long tail.
    """
    value = float(above.sum() / below.sum())
    error = ratio_error(above, below)
    if error is None:
        return Interval(value, None, None)
    low, high = (
        value - error.size * _studentised(error, sign * _quantile(error)) for sign in (1, -1)
    )
    return Interval(value, low, high)


def share(above: Floats, below: Floats) -> Interval:
    """Return the interval of sum(above) ÷ sum(below) for a share: as `ratio`, clipped to 0 to 1."""
    return ratio(above, below).clipped()


def _studentised(error: Error, normal: float) -> float:
    """Return T = (estimate - truth) ÷ error whose transform T + b T² + b² T³ / 3 + a / 6 is
    `normal`.

    Of a mean of skewed values, T itself is skewed to the other side: it is the ratio of two
    correlated quantities. With a = skewness and b = a / 3 the transform is free of skewness to
    first order, and monotone (Hall, Journal of the Royal Statistical Society B 1992). Of a ratio,
    the error also moves with the estimate, by the covariance of its numerators' errors and its
    denominators. That adds to T's coefficient of T², and is subtracted from b.
    """
    shifted = normal - error.skewness / 6
    if abs(error.bend) < 1e-9:
        return shifted
    return (math.cbrt(1 + 3 * error.bend * shifted) - 1) / error.bend


def _quantile(error: Error) -> float:
    """Return the quantile of Student's t for a 95 % interval."""
    return t_quantile(0.975, error.degrees)


def describe_few(seeds: int, groups: int) -> str | None:
    """Return a caveat for intervals over too few seeds or groups; None where there are enough, or
    one, of both."""
    few = [f"{groups} groups (documents)"] * (1 < groups < LEAST_GROUPS)
    few += [f"{seeds} seeds (arrivals)"] * (1 < seeds < LEAST_SEEDS)
    if not few:
        return None
    return (
        f"95 % intervals over {' and '.join(few)} are too narrow: with fewer than {LEAST_GROUPS} groups or "
        f"{LEAST_SEEDS} seeds they contain the true value in as few as 87 % of studies"
    )


# ------------------------------------------------------------------------------
# Uncertainty of right answers over prompts: exact intervals of shares, and McNemar's test.
# ------------------------------------------------------------------------------


def share_interval(right: int, total: int, level: float = 0.95) -> Interval:
    """Return a share and its exact binomial interval (Clopper-Pearson 1934), which has a width even
    for 0 or 1."""
    from scipy.special import betaincinv  # slow to import, and rarely needed

    if not 0 <= right <= total or total < 1:
        raise ValueError(f"right={right}: expected 0 to {total}, out of at least one")
    if not 0 < level < 1:
        raise ValueError(f"level={level}: expected a probability between 0 and 1")
    tail = (1 - level) / 2
    low = float(betaincinv(right, total - right + 1, tail)) if right else 0.0
    high = float(betaincinv(right + 1, total - right, 1 - tail)) if right < total else 1.0
    return Interval(right / total, low, high)


@dataclass(frozen=True, slots=True)
class McNemar:
    """Prompts that only one of two arms got right, and the p value of this split for equally good
    arms."""

    only_first: int
    only_second: int
    p_value: float


def mcnemar(first: Sequence[bool], second: Sequence[bool]) -> McNemar:
    """Exact two-sided McNemar test of two arms on the same prompts: min(1, 2 · P(X ≤ min(b, c))), X
    ~ Bin(b + c, ½).

    Prompts that both got right, or both wrong, are ignored; without any others the p value is 1.
    """
    from scipy.special import bdtr

    if len(first) != len(second):
        raise ValueError(f"second has {len(second)} prompts, expected {len(first)} as first has")
    only_first = sum(a and not b for a, b in zip(first, second, strict=True))
    only_second = sum(b and not a for a, b in zip(first, second, strict=True))
    rarer, both = min(only_first, only_second), only_first + only_second
    return McNemar(only_first, only_second, min(1.0, 2 * float(bdtr(rarer, both, 0.5))))


# ------------------------------------------------------------------------------
# Intervals of paired ratios over questions that share documents.
# ------------------------------------------------------------------------------

Groups = NDArray[np.int64]
Kind = Callable[[Floats, Floats], Interval]

#: Interval functions by kind of quantity: of any sign, never negative, between 0 and 1.
SIGNED: Kind = ratio
POSITIVE: Kind = positive_ratio
SHARE: Kind = share


def mean_interval(values: Floats, groups: Groups, kind: Kind = SIGNED) -> Interval:
    """Return the mean of values, shape (questions,), with a 95 % interval; other parameters as in
    `ratio_interval`."""
    return interval_of_ratio(values, np.ones(len(values)), groups, kind)


def interval_of_ratio(
    above: Floats, below: Floats, groups: Groups, kind: Kind = SIGNED
) -> Interval:
    """Return sum(above) ÷ sum(below) over questions, both of shape (questions,), with a 95 %
    interval.

    `groups`  the document of each question. Questions of one document share passages and are not
              independent, so whole documents are drawn with replacement, and both sums are taken
              over the same draw

    Bounds use t quantiles of the bootstrap's standard error, and the skewness of the documents
    (coverage: benchmarks/coverage). One document gives no bounds.
    """
    clusters = Clusters.of(np.zeros(len(groups), np.int64), groups)
    return kind(clusters.sums(above), clusters.sums(below))


def separated(difference: Interval) -> bool:
    """Return whether the interval of a difference excludes zero, so that the difference is
    shown."""
    low, high = difference.low, difference.high
    return low is not None and high is not None and (low > 0 or high < 0)


# ------------------------------------------------------------------------------
# Mean and percentiles of one long run, with errors by a bootstrap over blocks of consecutive
# requests.
# ------------------------------------------------------------------------------

BOOTSTRAP_BLOCKS = 30
PERCENTS = {"p50": 50.0, "p95": 95.0, "p99": 99.0}
_MIN_BLOCK_REQUESTS = 10
_THRESHOLDS = 2048  # values at which the distribution is counted


class Estimate(NamedTuple):
    """A statistic and its standard error; None where the run is too short for two blocks."""

    value: float
    error: float | None


def block_estimates(values: Floats) -> dict[str, Estimate] | None:
    """Return mean and percentiles of `values`, shape (n,), in order of time; None where all are
    NaN.

    NaN values are ignored. Blocks are resampled with replacement (Carlstein 1986), so that requests
    that waited for the same event stay together.
    """
    valid = ~np.isnan(values)
    if not valid.any():
        return None
    blocks = number_of_blocks(len(values))
    block = np.arange(len(values)) * blocks // len(values)
    values, block = values[valid], block[valid]
    statistics = {"mean": float(values.mean())} | {
        name: float(np.percentile(values, percent)) for name, percent in PERCENTS.items()
    }
    errors = _errors(values, block, blocks) if blocks > 1 else dict.fromkeys(statistics)
    return {name: Estimate(value, errors[name]) for name, value in statistics.items()}


def number_of_blocks(requests: int) -> int:
    """Return the number of blocks into which a run of `requests` requests is split."""
    return max(1, min(BOOTSTRAP_BLOCKS, requests // _MIN_BLOCK_REQUESTS))


def _errors(values: Floats, block: NDArray[np.int64], blocks: int) -> dict[str, float | None]:
    """Return standard errors, corrected for the bootstrap variance of k blocks, which is too small
    by (k − 1) / k."""
    counts = drawn_counts(blocks)
    sizes = counts @ np.bincount(block, minlength=blocks)
    counts, sizes = counts[sizes > 0], sizes[sizes > 0]
    draws = {"mean": counts @ np.bincount(block, values, blocks) / sizes}
    # percentiles of each draw: the least threshold that enough of its values do not exceed
    thresholds = np.unique(values)
    if len(thresholds) > _THRESHOLDS:
        thresholds = np.unique(np.quantile(values, np.linspace(0, 1, _THRESHOLDS), method="higher"))
    threshold = np.searchsorted(thresholds, values)
    cells = np.bincount(
        block * len(thresholds) + threshold, minlength=counts.shape[1] * len(thresholds)
    )
    below = counts @ cells.reshape(-1, len(thresholds)).cumsum(1)
    required = {name: percent / 100 * sizes for name, percent in PERCENTS.items()}
    draws |= {name: thresholds[(below < least[:, None]).sum(1)] for name, least in required.items()}
    widen = (blocks / (blocks - 1)) ** 0.5
    return {name: widen * float(drawn.std()) for name, drawn in draws.items()}


# ------------------------------------------------------------------------------
# Bars: limits that a measured number must meet, and the closed form of the expected prefix
# match.
# ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """One measured number compared with its bar.

    `bar`     name of the bar
    `arm`     the arm that was measured
    `what`    description of the number, with its unit
    `value`   the measured value
    `least`, `most`  inclusive limits; None: no limit on that side. Without limits the number is
                     only reported
    """

    bar: str
    arm: str
    what: str
    value: float
    least: float | None = None
    most: float | None = None

    @property
    def judged(self) -> bool:
        """Whether the number has a limit on either side."""
        return self.least is not None or self.most is not None

    @property
    def holds(self) -> bool:
        """Whether the number is within its limits."""
        return (self.least is None or self.value >= self.least) and (
            self.most is None or self.value <= self.most
        )

    @property
    def limits(self) -> str:
        """The limits as a short text."""
        low, high = (None if end is None else f"{end:.4g}" for end in (self.least, self.most))
        if low is not None and high is not None:
            return low if low == high else f"{low} to {high}"
        return f"≥ {low}" if low is not None else f"≤ {high}" if high is not None else "reported"

    def sentence(self) -> str:
        """Return a sentence about a missed bar, with its numbers."""
        return f"bars.{self.bar}: {self.what} of {self.arm} is {self.value:.4g}, expected {self.limits}"

    def plain(self) -> dict[str, Any]:
        """Return the verdict as an entry of `summary.json`."""
        return asdict(self) | {"judged": self.judged, "holds": self.holds}


def verdict_of(entry: Mapping[str, Any]) -> Verdict:
    """Return the verdict of an entry of `summary.json`."""
    return Verdict(**{field.name: entry[field.name] for field in fields(Verdict)})


def expected_prefix(parts: int, part_tokens: int, earlier: int) -> float:
    """Return E[LCP] in tokens of a random order of `parts` equal parts with the closest of
    `earlier` random orders.

    The first j parts agree with one order with probability p_j = (parts − j)! ÷ parts!, and with at
    least one of n independent orders with 1 − (1 − p_j)^n; the expectation is the sum over j.
    """
    match_probabilities = [
        math.factorial(parts - j) / math.factorial(parts) for j in range(1, parts + 1)
    ]
    return part_tokens * sum(
        1 - (1 - probability) ** earlier for probability in match_probabilities
    )
