"""Points of a plan: arrivals, trials and their outcomes."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import as_completed
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from rich.console import Console
from rich.progress import track

from spanlab.analyses.base import PointWorker
from spanlab.core.request import Request
from spanlab.records import delays_of
from spanlab.report.table import rounded_up
from spanlab.settings.analyses import PlanSettings, Target
from spanlab.settings.arms import Strategy
from spanlab.settings.server import StoreSettings
from spanlab.settings.study import Study
from spanlab.stats import (
    SATURATED,
    Interval,
    Run,
    assess,
    block_estimates,
    number_of_blocks,
    t_quantile,
)
from spanlab.study.backends import Simulator
from spanlab.study.executor import Executor
from spanlab.study.folder import print_line
from spanlab.study.jobs import Job, build_arrivals
from spanlab.study.numbers import replace_file, select, utilisation_of

# ------------------------------------------------------------------------------
# Arrivals of a point: the study's arrivals, compressed in time, shake, or far apart.
# ------------------------------------------------------------------------------

APART_NS = 3_600 * 10**9  # between arrivals, so that no request waits for another


def arrivals_of(
    study: Study, requests: tuple[Request, ...], replication: int, load: float | None
) -> list[Request]:
    """Return requests in order of arrival at a multiple of the study's load; None: no request waits
    for another.

    `replication`  the seed of drawn arrivals; for recorded arrivals the number of the shake, and 0
                   for no shake
    """
    drawn = study.draws_arrivals()
    served = build_arrivals(
        study, requests, replication if drawn else study.runs.seeds[0], study.arrivals.rate_rps
    )
    if load is None:
        return [
            replace(request, arrived_at=index * APART_NS) for index, request in enumerate(served)
        ]
    times = np.array([request.arrived_at for request in served], dtype=np.int64)
    if replication and not drawn:
        times = shake(times, np.array([request.group_id for request in served]), replication)
    times = np.rint(times / load).astype(np.int64)
    order, stamps = np.argsort(times, kind="stable").tolist(), times.tolist()
    return [replace(served[index], arrived_at=stamps[index]) for index in order]


def shake(times: np.ndarray, groups: np.ndarray, seed: int) -> np.ndarray:
    """Return times that are moved at random by up to half the mean gap; a group's requests keep
    their order.

    Input shaking (Tsafrir, Ouaknine and Feitelson, MASCOTS 2007): results that change under it are
    chance.
    """
    reach = np.ptp(times) / max(1, len(times) - 1) / 2
    moved = np.maximum(
        0, np.rint(times + np.random.default_rng([seed, 2]).uniform(-reach, reach, len(times)))
    )
    by_group = np.lexsort((np.arange(len(times)), groups))
    times_in_order = np.empty(len(times), dtype=np.int64)
    times_in_order[by_group] = moved[np.lexsort((moved, groups))].astype(np.int64)
    return times_in_order


# ------------------------------------------------------------------------------
# A point of a plan: one store, one strategy, one load; and the result of a run of it.
# ------------------------------------------------------------------------------

FIELDS = (
    "arrived_s",
    "admitted_s",
    "first_token_s",
    "finished_s",
    "prompt_tokens",
    "reused_tokens",
    "output_tokens",
    "counted",
)
RunResult = dict[str, Any]


@dataclass(frozen=True)
class Point:
    """A combination of settings that a plan tries.

    `load`      multiple of the study's own; None: no request waits for another
    `replicas`  number of engines, each with its own store; None: as in the study
    """

    store: StoreSettings
    strategy: Strategy
    load: float | None = 1.0
    replicas: int | None = None

    @property
    def key(self) -> str:
        """A hash of the point, unique in the study."""
        return hashlib.sha256(orjson.dumps(asdict(self))).hexdigest()[:16]


def serve(worker: PointWorker, point: Point, replication: int) -> RunResult:
    """Simulate one run of a point, and return its result, which fits one line of a file."""
    # the study with a point's settings, and with the analysis `summary` only
    arms = {worker.study.runs.baseline: point.strategy}
    replicas = replace(worker.study.replicas, count=point.replicas or worker.study.replicas.count)
    study = worker.study.changed(
        store=point.store, arms=arms, replicas=replicas, analyses=["summary"], plan=PlanSettings()
    )
    requests = arrivals_of(study, worker.requests, replication, point.load)
    job = Job(
        strategy=point.strategy,
        requests=requests,
        rules=study.batch,
        seed=replication,
        rate_rps=None,
        warmup=int(study.runs.warmup_fraction * len(requests)),
        max_tokens=max(request.num_tokens for request in requests),
        group=worker.requests[0].group_id,
        steps=Path(os.devnull),
        clients=study.arrivals.clients,
    )
    rows: list[tuple[Any, ...]] = []
    fields_of = attrgetter(*FIELDS)
    row = Simulator(study).simulate(job, lambda record: rows.append(fields_of(record)))
    all_columns = {
        name: np.array(column) for name, column in zip(FIELDS, zip(*rows, strict=True), strict=True)
    }
    order = np.argsort(all_columns["arrived_s"], kind="stable")
    all_columns = {name: values[order] for name, values in all_columns.items()}
    columns = select(all_columns, all_columns["counted"])
    delays: dict[str, dict[str, list[float | None]] | None] = {}
    for name, values in delays_of(columns).items():
        # values and errors as lists, for JSON
        blocks = block_estimates(values)
        delays[name.removesuffix("_s")] = (
            None if blocks is None else {key: list(estimate) for key, estimate in blocks.items()}
        )
    arrived = all_columns["arrived_s"]
    # requests that arrive at once have no load and no rate
    utilisation, grows, rate = None, False, None
    if np.ptp(arrived):
        one_seed = all_columns | {"seed": np.zeros(len(arrived), dtype=np.int64)}
        utilisation = utilisation_of(one_seed, [asdict(row) | {"seed": 0}])
        state = assess([Run(arrived, all_columns["first_token_s"])], utilisation)
        grows = state.verdict == SATURATED
        rate = float((len(arrived) - 1) / np.ptp(arrived))
    return {
        "estimates": delays,
        "blocks": number_of_blocks(len(columns["arrived_s"])),
        "token_hit_rate": float(columns["reused_tokens"].sum() / columns["prompt_tokens"].sum()),
        "utilisation": utilisation,
        "grows": grows,
        "preemptions": row.preemptions,
        "cached_bytes": row.kv_resident_peak_bytes + row.state_resident_peak_bytes,
        "rate_rps": rate,
    }


# ------------------------------------------------------------------------------
# The outcome of one point over its runs: intervals, and whether they meet the targets.
# ------------------------------------------------------------------------------

_LEVEL = 0.975  # upper probability of a two-sided 95 % interval


@dataclass(frozen=True)
class Outcome:
    """The outcome of a point over its runs.

    `drawn`  whether arrivals are independent draws; otherwise all runs share one recorded sample
             path
    """

    point: Point
    targets: Sequence[Target]
    runs: Sequence[RunResult]
    drawn: bool

    @cached_property
    def intervals(self) -> dict[str, Interval]:
        """95 % intervals of the targets' statistics, by key."""
        return {target.key: self._interval(target) for target in self.targets}

    def _interval(self, target: Target) -> Interval:
        """Return Student's t interval over draws; for one sample path, from errors of bootstrap and
        shakes, added.

        Degrees of freedom are Satterthwaite's. Without an error, for example for very few requests,
        there are no ends. A lower end below zero is not cut, because it shows that the runs hardly
        determine the statistic.
        """
        by_run = [run["estimates"][target.delay] for run in self.runs]
        if None in by_run:
            raise ValueError(
                f"slo.{target.key}={target.limit_s}: expected a request with two output tokens or more"
            )
        estimates = [statistics[target.statistic] for statistics in by_run]
        values = np.array([value for value, _ in estimates])
        variances = []
        if len(values) > 1:
            variances.append((float(values.var(ddof=1)) / len(values), len(values) - 1))
        if estimates[0][1] is not None and not (self.drawn and variances):
            variances.append(
                (float(np.mean([error**2 for _, error in estimates])), self.runs[0]["blocks"] - 1)
            )
        mean, half = float(values.mean()), 0.0
        if not variances:
            return Interval(mean, None, None)
        if variance := sum(size for size, _ in variances):
            degrees = variance**2 / sum(size**2 / degrees for size, degrees in variances)
            half = t_quantile(_LEVEL, degrees) * math.sqrt(variance)
        return Interval(mean, mean - half, mean + half)

    @property
    def grows(self) -> bool:
        """Whether the queue grows in most runs, so that delays depend on the length of the run."""
        growing: int = sum(run["grows"] for run in self.runs)
        return growing > len(self.runs) / 2

    @property
    def meets(self) -> bool:
        """Whether the upper end of every target's interval is within the target, and no queue
        grows."""
        return not self.grows and all(
            self._ends(target)[1] <= target.limit_s for target in self.targets
        )

    @property
    def fails(self) -> bool:
        """Whether a miss is shown: a queue grows, or a whole interval lies above its target."""
        return self.grows or any(self._ends(target)[0] > target.limit_s for target in self.targets)

    @property
    def is_clear(self) -> bool:
        """Whether further runs are unnecessary: intervals three times as wide would give the same
        result."""
        ends = [(target.limit_s, *self._ends(target, 3)) for target in self.targets]
        misses = any(low > limit for limit, low, _ in ends)
        return misses or (not self.grows and all(high <= limit for limit, _, high in ends))

    def _ends(self, target: Target, times: float = 1) -> tuple[float, float]:
        """Return the ends of a target's interval, widened by `times`; without ends, its value
        twice."""
        mean, low, high = self.intervals[target.key]
        half = 0.0 if low is None or high is None else high - mean
        return mean - times * half, mean + times * half

    @property
    def worst(self) -> Target:
        """The target with the largest ratio of the interval's upper end to the limit."""
        return max(self.targets, key=lambda target: self._ends(target)[1] / target.limit_s)

    @property
    def distance(self) -> float:
        """The worst target's value as a multiple of its limit."""
        return max(self.intervals[target.key].mean / target.limit_s for target in self.targets)

    def mean(self, name: str) -> float | None:
        """Return the mean of a field over the runs; None where a run lacks it."""
        values = [run[name] for run in self.runs]
        return None if None in values else float(np.mean(values))

    def line(self) -> str:
        """Return the worst target and its state, as a line of progress."""
        state = "meets" if self.meets else "queue grows" if self.grows else "misses"
        return f"{self.worst.key} {self.intervals[self.worst.key].mean:.4g}, {state}"

    def summary(self) -> dict[str, Any]:
        """Return the entry of `summary.json`."""
        return {
            **{key: interval._asdict() for key, interval in self.intervals.items()},
            "meets": self.meets,
            "queue_grows": self.grows,
            **{name: self.mean(name) for name in ("token_hit_rate", "utilisation", "preemptions")},
        }


# ------------------------------------------------------------------------------
# Search for the first value that meets the targets, along an axis on which outcomes should be
# monotone.
# ------------------------------------------------------------------------------

#: Returns outcomes of values; with `True` after all runs of each, otherwise further runs only where
#: unclear.
Try = Callable[[Sequence[float], bool], Sequence[Outcome]]


def geometric(low: float, high: float, resolution: float) -> list[float]:
    """Return values from `low` to at least `high` in steps of at most the share `resolution`, to
    five digits."""
    steps = (
        max(1, math.ceil(math.log(high / low) / math.log1p(resolution) - 1e-9)) if high > low else 0
    )
    values = (
        [rounded_up(low * (high / low) ** (step / steps)) for step in range(steps)] if steps else []
    )
    return sorted({*values, rounded_up(high if steps else low)})


@dataclass(frozen=True)
class Border:
    """The border at which a grid, ordered from worst to best, begins to meet the targets.

    `grid`      the values
    `outcomes`  outcomes of the tried values, by index on the grid
    `first`     the first index from which all tried values meet the targets; None: the best value
                does not
    """

    grid: Sequence[float]
    outcomes: dict[int, Outcome]
    first: int | None

    @property
    def value(self) -> float | None:
        """The value at the border; None where the best value does not meet the targets."""
        return None if self.first is None else self.grid[self.first]

    @property
    def curve(self) -> list[tuple[float, Outcome]]:
        """Every tried value with its outcome, in increasing order."""
        return sorted(
            [(self.grid[index], outcome) for index, outcome in self.outcomes.items()],
            key=itemgetter(0),
        )

    @property
    def reversals(self) -> list[tuple[int, int]]:
        """Pairs of indices: the nearest worse value that meets the targets, and a value that is
        shown to fail them."""
        failing = [index for index, outcome in self.outcomes.items() if outcome.fails]
        meeting = {
            b: [a for a, outcome in self.outcomes.items() if a < b and outcome.meets]
            for b in failing
        }
        return [(max(worse), b) for b, worse in meeting.items() if worse]

    def continued(self, better: Border) -> Border:
        """Return this border with a better grid behind it, whose first value is the last one of
        this grid."""
        offset = len(self.grid) - 1
        assert self.grid[offset] == better.grid[0], "both grids have the value at which they meet"
        outcomes = self.outcomes | {
            index + offset: outcome for index, outcome in better.outcomes.items()
        }
        first = None if better.first is None else better.first + offset
        return Border([*self.grid, *better.grid[1:]], outcomes, first)

    def caveats(self, search: str, values: str) -> list[str]:
        """Caveats about reversals; `values` is a format for a value that meets the targets and one
        that does not."""
        pairs = [(self.grid[a], self.grid[b]) for a, b in self.reversals]
        return [
            f"{search}: not monotone beyond the intervals: {values.format(*pair)}" for pair in pairs
        ]


def find_border(grid: Sequence[float], points: int, try_: Try) -> Border:
    """Return the border, by bisection between the `points` values of a first round; `grid` goes
    from worst to best.

    Both sides of the border are confirmed with all runs. The search continues where these move the
    border.
    """
    last = len(grid) - 1
    indices = sorted({round(point * last / (points - 1)) for point in range(points)})
    outcomes, sure = dict[int, Outcome](), set[int]()
    while indices:
        every = sure.issuperset(indices)
        outcomes |= zip(indices, try_([grid[index] for index in indices], every), strict=True)
        end = len(grid)
        last_miss = max(
            (index for index, outcome in outcomes.items() if not outcome.meets), default=-1
        )
        first = min((index for index in outcomes if index > last_miss), default=end)
        if first - last_miss > 1 and last_miss >= 0:
            indices = [(last_miss + first) // 2]
        else:
            indices = [
                index for index in (last_miss, first) if index in outcomes and index not in sure
            ]
            sure |= set(indices)
    return Border(grid, dict(sorted(outcomes.items())), first if first in outcomes else None)


# ------------------------------------------------------------------------------
# Trials of points: runs on the study's executor, each appended to a file as soon as it
# finishes.
# ------------------------------------------------------------------------------


class Trials:
    """Runs of points under common random numbers: the same seeds, or the same shakes, at every
    point.

    `path`  file of finished runs, one line each, which a resumed plan reads; `sort` puts the lines
            into order
    """

    def __init__(self, study: Study, workers: Executor[Any], path: Path, console: Console) -> None:
        self._study, self._workers, self._path, self._console = study, workers, path, console
        # finished runs; an incomplete last line of a killed process is removed from the file
        path.touch()
        lines, newline, _ = path.read_bytes().rpartition(b"\n")
        os.truncate(path, len(lines + newline))
        rows = map(orjson.loads, lines.splitlines())
        self._results = {(row.pop("point"), row.pop("replication")): row for row in rows}
        # cells in the order in which the plan asked for them
        self._order: dict[tuple[str, int], None] = {}

    def outcomes(
        self, points: Sequence[Point], labels: Sequence[str], every: bool = False
    ) -> list[Outcome]:
        """Return the outcomes of points, run in parallel; `labels` name them in the progress.

        A point with a clear outcome after one run is run once, unless `every` run is requested.
        """
        self._run([(point, self._replications(point)[0]) for point in points])
        unclear = [point for point in points if every or not self._outcome(point, 1).is_clear]
        self._run(
            [(point, number) for point in unclear for number in self._replications(point)[1:]]
        )
        outcomes = [
            self._outcome(point, len(self._replications(point)) if point in unclear else 1)
            for point in points
        ]
        for name, outcome in zip(labels, outcomes, strict=True):
            print_line(self._console, f"{name}: {outcome.line()}")
        return outcomes

    def _replications(self, point: Point) -> Sequence[int]:
        """Return seeds of drawn arrivals, or numbers of shakes of recorded ones; one where no
        request waits."""
        if self._study.draws_arrivals():
            return self._study.runs.seeds
        return range(1 if point.load is None else self._study.analyses.plan.shakes)

    def _run(self, cells: Sequence[tuple[Point, int]]) -> None:
        """Run the cells that have no result yet."""
        self._order |= dict.fromkeys((point.key, number) for point, number in cells)
        missing = {
            (point.key, number): point
            for point, number in cells
            if (point.key, number) not in self._results
        }
        jobs = {
            self._workers.submit(serve, point, cell[1]): cell for cell, point in missing.items()
        }
        silent = not (jobs and self._console.is_terminal)
        for job in track(
            as_completed(jobs),
            "runs",
            len(jobs),
            console=self._console,
            transient=True,
            disable=silent,
        ):
            cell, result = jobs[job], job.result()
            self._results[cell] = result
            with self._path.open("ab") as file:
                file.write(_line(cell, result))

    def sort(self) -> None:
        """Order the lines as the plan asked for them, which no order of completion changes; others
        last."""
        cells = [*self._order, *sorted(self._results.keys() - self._order.keys())]
        replace_file(self._path, b"".join(_line(cell, self._results[cell]) for cell in cells))

    def _outcome(self, point: Point, runs: int) -> Outcome:
        results = [self._results[point.key, number] for number in self._replications(point)[:runs]]
        return Outcome(
            point, self._study.analyses.plan.slo.targets, results, self._study.draws_arrivals()
        )


def _line(cell: tuple[str, int], result: RunResult) -> bytes:
    return orjson.dumps(
        {"point": cell[0], "replication": cell[1]} | result, option=orjson.OPT_APPEND_NEWLINE
    )
