"""Tables of the analysis `plan`: the verdict with the reference points, and the points that each
search tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console

from spanlab.analyses.base import Findings, Finished, footer
from spanlab.analyses.plan_points import Border, Outcome, Point, Trials, find_border
from spanlab.build import build_policy
from spanlab.core.request import Request
from spanlab.model_spec import GIB
from spanlab.registry import Registry, one_of, require
from spanlab.report import style
from spanlab.report.style import log_scale
from spanlab.report.table import (
    Cell,
    Field,
    Table,
    count,
    number_format,
    percent,
    percent_text,
    seconds_interval,
    seconds_text,
    tabulate,
    whole,
    word,
)
from spanlab.settings.analyses import ANALYSES, POINTS, Analysis, PlanSettings, Target
from spanlab.settings.arms import Strategy
from spanlab.settings.study import Study
from spanlab.study.numbers import requests_needed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# ------------------------------------------------------------------------------
# Context of every search of a plan: the study's own point, reference points, and the trial of
# other points.
# ------------------------------------------------------------------------------

REFERENCES = {
    "own": "this memory and load",
    "no_limit": "memory without limit, this load",
    "alone": "this memory, one request at a time",
    "floor": "memory without limit, one request at a time",
}


class Pools(NamedTuple):
    """GiB of KV and of states."""

    kv: float
    states: float


class Planner:
    """The planned arm of a study, its baseline; `requests` are those of the workload."""

    def __init__(self, study: Study, requests: tuple[Request, ...], trials: Trials) -> None:
        self.study, self.requests, self.trials = study, requests, trials

    @property
    def targets(self) -> list[Target]:
        """The latency targets."""
        return list(self.study.analyses.plan.slo.targets)

    @property
    def targets_text(self) -> str:
        """The targets as text."""
        return " and ".join(target.words for target in self.targets)

    @property
    def strategy(self) -> Strategy:
        """The planned arm."""
        return self.study.arms[self.study.runs.baseline]

    @cached_property
    def references(self) -> dict[str, Outcome]:
        """Outcomes of the reference points, by the keys of `REFERENCES`."""
        own_store, no_limit = self.study.store, replace(self.study.store, total_gib=None)
        points = [
            replace(self.study_point, store=store, load=load)
            for load in (1.0, None)
            for store in (own_store, no_limit)
        ]
        return dict(
            zip(REFERENCES, self.trials.outcomes(points, list(REFERENCES.values())), strict=True)
        )

    @property
    def study_point(self) -> Point:
        """The study's own point, of which a search changes fields."""
        return Point(self.study.store, self.strategy)

    def border(
        self,
        grid: Sequence[float],
        point: Callable[[float], Point],
        describe: Callable[[float], str],
    ) -> Border:
        """Return the border on a grid from worst to best; `point` and `describe` take a value of
        the grid."""

        def outcomes(values: Sequence[float], every: bool) -> list[Outcome]:
            return self.trials.outcomes(
                list(map(point, values)), list(map(describe, values)), every
            )

        return find_border(grid, self.study.analyses.plan.points, outcomes)

    def need_gib(self, strategy: Strategy) -> Pools:
        """Return the largest memory of one request alone, for KV and for states."""
        policy = build_policy(self.study, strategy, 0, 1)
        needs = [policy.need(request) for request in self.requests]
        kv, states = max(need.kv_bytes for need in needs), max(need.state_bytes for need in needs)
        return Pools(kv / GIB, states / GIB)

    @property
    def memory_text(self) -> str:
        """The study's own memory as text."""
        gib = self.study.store.total_gib
        return "memory without limit" if gib is None else f"{gib:g} GiB"


# ------------------------------------------------------------------------------
# The result of a search, its axis and its marks.
# ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mark:
    """A value that another system recommends, marked in the figure of a search."""

    label: str
    value: float


@dataclass(frozen=True)
class Axis:
    """The varied quantity: key in `summary.json`, label with unit in figures, and whether the scale
    is logarithmic."""

    key: str
    label: str
    logarithmic: bool = True


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    `axis`      the varied quantity
    `curve`     every tried value with its outcome, in increasing order; empty where none could be
                tried
    `verdict`   the answer in one sentence without a full stop, or the reason why there is none
    `value`     the best value on the axis that meets the targets; None without one
    `answer`    keys for `summary.json`
    `marks`     values that other systems recommend
    `caveats`   limitations of the answer
    """

    axis: Axis
    curve: Sequence[tuple[float, Outcome]]
    verdict: str
    value: float | None
    answer: Mapping[str, Any]
    marks: Sequence[Mark] = ()
    caveats: Sequence[str] = ()

    @property
    def helps(self) -> bool:
        """Whether some value meets the targets."""
        return self.value is not None


#: Functions of a planner; each returns the result of one search.
SEARCHES: Registry[SearchResult] = Registry("plan.search", given=("planner",))


Summary = Mapping[str, Any]


def tables_of(summary: Summary, title: str, caveats: Sequence[str]) -> tuple[Table, ...]:
    """Return the table of reference points, with `caveats` as notes, and one table per search."""
    fields = (Field("point", "point", word, "says", left=True), *_fields(summary["targets"]))
    rows = summary["references"].values()
    tables = [tabulate("plan", f"{title}\n{summary['verdict']}", fields, rows, caveats)]
    for name, curve in summary["curves"].items():
        if curve:
            search = summary["searches"][name]
            key, label = search["axis"]["key"], search["axis"]["label"].replace(" (", "\n(", 1)
            varied = Field(key, label, number_format(".5g"), itemgetter(key))
            marks = [f"{label}: {value:.3g}" for label, value in search["marks"].items()]
            heading = f"{name}\n{search['verdict']}"
            fields = (varied, *_fields(summary["targets"]))
            tables.append(tabulate(f"plan_{name}", heading, fields, curve, marks))
    return tuple(tables)


def _fields(targets: Mapping[str, float]) -> tuple[Field, ...]:
    return (
        *(
            Field(
                key, f"{key.removesuffix('_s').replace('_', ' ')}\n≤ {limit:g} s", seconds_interval
            )
            for key, limit in targets.items()
        ),
        Field(
            "meets",
            "meets",
            lambda point: Cell(
                point["meets"],
                "yes" if point["meets"] else "queue grows" if point["queue_grows"] else "no",
            ),
            whole,
        ),
        Field("token_hit_rate", "token\nhit rate", percent, keep=1),
        Field("utilisation", "load ÷\ncapacity", percent, keep=2),
        Field("preemptions", "preempted\nper run", count, keep=3),
    )


# ------------------------------------------------------------------------------
# Figures of the analysis `plan`: latencies by the setting that a search varies.
# ------------------------------------------------------------------------------


def draw_search(summary: Mapping[str, Any], name: str, title: str) -> Figure:
    """Draw each target's value with its interval, as a multiple of the target; values above 1 miss
    the target.

    A single target is drawn in seconds. Open markers: the queue grows.
    """
    search, curve, targets = summary["searches"][name], summary["curves"][name], summary["targets"]
    names = [*targets, *search["marks"], "target", "queue grows"]
    figure, [[ax]] = style.framed_with(
        title, f"Targets over {name}", margins=style.margins_for(names)
    )
    single = len(targets) == 1
    for number, (key, limit) in enumerate(targets.items()):
        _draw_target(ax, search["axis"]["key"], curve, key, 1.0 if single else limit, f"C{number}")
    ax.axhline(
        next(iter(targets.values())) if single else 1.0,
        color=style.INK,
        linestyle="--",
        label="target",
    )
    answer = search["answer"]
    for number, (label, value) in enumerate(search["marks"].items()):
        ax.axvline(
            value,
            color="#777777",
            linestyle=style.LINE_STYLES[1 + number % 3],
            linewidth=1,
            label=label,
        )
    if answer is not None:
        ax.axvline(answer, color=style.INK, linewidth=1, label=f"answer: {answer:.4g}")
    if search["axis"]["logarithmic"]:
        log_scale(ax.xaxis, *ax.get_xlim())
    log_scale(ax.yaxis, *ax.get_ylim())
    style.label(ax, search["axis"]["label"], "seconds" if single else "value ÷ target")
    style.legend_right(ax)
    return figure


def _draw_target(
    ax: Axes, axis: str, curve: list[Mapping[str, Any]], key: str, unit: float, colour: str
) -> None:
    positive = [point for point in curve if point[key]["mean"] > 0]  # a log axis cannot show zero
    ax.plot(
        [point[axis] for point in positive],
        [point[key]["mean"] / unit for point in positive],
        color=colour,
        linewidth=1.2,
        label=key,
    )
    for point in positive:
        low, high = (
            point[key]["mean"] if point[key][end] is None else point[key][end]
            for end in ("low", "high")
        )
        least = point[key]["mean"] / 10  # nor an interval that ends at zero
        ax.plot([point[axis]] * 2, [max(low, least) / unit, high / unit], color=colour, linewidth=1)
        face = "white" if point["queue_grows"] else colour
        ax.plot(
            point[axis],
            point[key]["mean"] / unit,
            color=colour,
            marker="o",
            markersize=4,
            markerfacecolor=face,
        )


# ------------------------------------------------------------------------------
# The analysis `plan`: results of the searches, their verdict, and the runs that support them.
# ------------------------------------------------------------------------------


def plan(finished: Finished) -> Findings:
    """Search for settings that meet the study's latency targets, or report why none do."""
    study = finished.study
    assert finished.workers is not None, "they stay available for analyses that need points"
    trials = Trials(study, finished.workers, finished.folder / "points.jsonl", Console(stderr=True))
    planner = Planner(study, finished.workload.requests, trials)
    results = {name: SEARCHES[name](planner) for name in study.analyses.plan.searches}
    answers = {key: value for result in results.values() for key, value in result.answer.items()}
    # verdicts of searches that help come first; where none helps, the sentence begins with that
    helpful = [result.verdict for result in results.values() if result.helps]
    unhelpful = [result.verdict for result in results.values() if not result.helps]
    summary = {
        "verdict": "; ".join([*helpful, *unhelpful])
        if helpful
        else f"this will not help: {'; '.join(unhelpful)}",
        "targets": {target.key: target.limit_s for target in planner.targets},
        "meets": planner.references["own"].meets,
        **answers,
        "searches": {
            name: {
                "verdict": result.verdict,
                "helps": result.helps,
                "answer": result.value,
                "axis": {
                    "key": result.axis.key,
                    "label": result.axis.label,
                    "logarithmic": result.axis.logarithmic,
                },
                "marks": {mark.label: mark.value for mark in result.marks},
            }
            for name, result in results.items()
        },
        "references": {
            name: {"says": label} | planner.references[name].summary()
            for name, label in REFERENCES.items()
        },
        "curves": {
            name: [{result.axis.key: value} | outcome.summary() for value, outcome in result.curve]
            for name, result in results.items()
        },
    }
    trials.sort()
    title = f"{finished.name} · {footer(finished)}"
    caveats = (
        *_caveats(planner),
        *(caveat for result in results.values() for caveat in result.caveats),
    )
    curves = [name for name, result in results.items() if result.curve]
    figures = {f"plan_{name}": partial(draw_search, summary, name, title) for name in curves}
    return Findings(summary, tables_of(summary, title, caveats), (), figures, caveats)


def _caveats(planner: Planner) -> tuple[str, ...]:
    """Return caveats of the intervals."""
    study, count = planner.study, len(planner.requests)
    if study.draws_arrivals():
        runs = f"intervals are Student's t over {len(study.runs.seeds)} draws of the arrivals, the same for every point"
    else:
        shakes = study.analyses.plan.shakes
        runs = (
            "arrivals are one recorded path: intervals are of a bootstrap over blocks of time, and of "
            f"{shakes} runs with arrivals moved by up to half the mean gap, the same for every point"
        )
    criterion = "a target counts as met where the upper end of the 95 % interval meets it and the queue does not grow"
    small_samples = [
        f"{target.key} is of {count} requests, and a percentile needs {needed}: its interval is unreliable"
        for target in planner.targets
        if target.statistic != "mean"
        and count < (needed := requests_needed(float(target.statistic[1:])))
    ]
    at_once = planner.references["own"].mean("rate_rps") is None
    burst = ("all requests come at once: delays are those of one burst",) if at_once else ()
    return (runs, criterion, *burst, *small_samples)


# ------------------------------------------------------------------------------
# Reasons why targets are not met, from reference runs with unlimited memory and without
# waiting.
# ------------------------------------------------------------------------------

_PARTS = {
    "queue": "nothing waits then, and admission alone takes longer",
    "ttft": "prefill alone takes longer",
    "tpot": "a decode step alone takes longer",
    "e2e": "prefill and decode alone take longer",
}


UNSURE = "the interval extends beyond the target, and more requests would narrow it"


def value_of(outcome: Outcome, target: Target) -> str:
    """Return a target's statistic and interval as text."""
    interval = outcome.intervals[target.key]
    ends = None if interval.low is None or interval.high is None else (interval.low, interval.high)
    return f"{target.key} is {seconds_text(interval.mean, ends)}"


def why_memory_fails(planner: Planner) -> str:
    """Return why no memory meets the targets at this load."""
    floor, free = planner.references["floor"], planner.references["no_limit"]
    hits = f"hits are bounded by {percent_text(free.mean('token_hit_rate'))} of the prompt tokens"
    floor_text = f"one request at a time and memory without limit, {value_of(floor, floor.worst)}"
    if floor.fails:
        return f"{floor_text}: {_PARTS[floor.worst.delay]}; {hits}"
    times = free.mean("utilisation") or 0.0
    if times >= 1:
        return f"the load exceeds saturation, {times:.3g} times what can be served with memory without limit; {hits}"
    if not floor.meets:
        return f"{floor_text}: {UNSURE}; {hits}"
    grows = "the queue grows" if free.grows else value_of(free, free.worst)
    waits = "though one request at a time meets it: requests wait for each other, not for memory"
    return f"with memory without limit {grows} at this load, {waits}; {hits}"


def why_load_fails(planner: Planner) -> str:
    """Return why no load meets the targets with this memory."""
    alone, floor = planner.references["alone"], planner.references["floor"]
    worst = alone.worst
    above = (
        f", more than {worst.limit_s:g} s: {_PARTS[worst.delay]}" if alone.fails else f": {UNSURE}"
    )
    alone_text = f"one request at a time, {value_of(alone, worst)}{above}"
    if floor.meets:
        return f"{alone_text} with {planner.memory_text}; with memory without limit {value_of(floor, worst)}"
    return f"{alone_text}, with memory without limit too"


def no_more_hits(planner: Planner) -> str | None:
    """Return a sentence that more memory adds no hits; None where it does."""
    limited = planner.references["own"].mean("token_hit_rate")
    unlimited = planner.references["no_limit"].mean("token_hit_rate")
    if limited is None or unlimited is None or unlimited - limited >= 0.005:
        return None
    with_limit, without = percent_text(limited), percent_text(unlimited)
    return f"more memory brings no hits: {with_limit} with {planner.memory_text}, {without} without limit"


# ------------------------------------------------------------------------------
# Scan of an axis that need not be monotone: all values are tried, and the best and its equals
# are reported.
# ------------------------------------------------------------------------------


def scan(
    planner: Planner,
    axis: Axis,
    points: dict[float, Point],
    describe: Callable[[float], str],
    marks: Sequence[Mark] = (),
) -> SearchResult:
    """Try every value and return the best; `describe` formats a value."""
    values = sorted(points)
    outcomes = planner.trials.outcomes(
        [points[value] for value in values], [describe(value) for value in values], every=True
    )
    curve = list(zip(values, outcomes, strict=True))
    best, chosen = min(curve, key=lambda pair: (pair[1].grows, pair[1].distance))
    as_good = [value for value, outcome in curve if value != best and _is_as_good(outcome, chosen)]
    meeting = [value for value, outcome in curve if outcome.meets]
    statistic = "the queue grows" if chosen.grows else value_of(chosen, chosen.worst)
    if as_good:
        statistic += f", {len(as_good)} others within its interval"
    verdict = (
        f"{describe(best)} is best, {statistic}"
        if meeting
        else f"no value meets {planner.targets_text}: the best, {describe(best)}, has {statistic}"
    )
    return SearchResult(
        axis=axis,
        curve=curve,
        verdict=verdict,
        value=best if meeting else None,
        answer={axis.key: best, f"{axis.key}_alike": as_good, f"{axis.key}_meeting": meeting},
        marks=marks,
    )


def _is_as_good(outcome: Outcome, best: Outcome) -> bool:
    """Return whether the intervals of the best outcome's worst target overlap."""
    if outcome.grows != best.grows:
        return False
    a, b = outcome.intervals[best.worst.key], best.intervals[best.worst.key]
    return a.mean <= b.mean or (a.low is not None and b.high is not None and a.low <= b.high)


def _check(study: Study) -> None:
    """Raise ValueError for settings that `plan` does not read, and for a search without the store,
    router, model or arm that it changes."""
    targets, search = study.analyses.plan.slo.targets, study.analyses.plan.search
    for name in search or ():
        one_of("plan.search", name, SEARCHES)
    if search == [] or len(set(search or ())) < len(search or ()):
        raise ValueError(
            f"plan.search={search}: expected one or more of {', '.join(SEARCHES)}, each once"
        )
    if not targets:
        raise ValueError(
            "slo is empty with analyses=plan: expected a target, as in slo.ttft_p95_s=0.5"
        )
    require(
        "analyses=plan",
        ("analyses", study.chosen_analyses(), ["plan"]),
        ("backend", study.backend, "sim"),
        ("load.rates_rps", study.runs.load.rates_rps, []),
        ("sweep", study.runs.sweep, []),
        ("only", study.chosen(), [study.runs.baseline]),
        *(
            (f"store.{key}", getattr(study.store, key), None)
            for key in ("kv_gib", "state_gib", "state_ratio", "entries")
        ),
    )
    hybrid, pool = study.model.is_hybrid, study.arms[study.runs.baseline].pool is not None
    arm = f"model.name={study.model.name} and baseline={study.runs.baseline}"
    tree = hybrid and not pool, arm, "a hybrid model and an arm that keeps a tree"
    tier, split = "a tier, as in +tier@store.tiers.host=dram", "the memory that is split"
    routing, total_gib = study.replicas.routing, study.store.total_gib
    needs = {
        "tier": [(bool(study.store.tiers), "store.tiers={}", tier)],
        "replicas": [(routing is not None, "replicas.routing=null", "a routing, as least_loaded")],
        "interval": [tree],
        "ratio": [tree, (total_gib is not None, "store.total_gib=null", split)],
        "block": [(not (hybrid and pool), arm, "an arm whose blocks need not hold a state")],
    }
    for name in study.analyses.plan.searches:
        for met, given, expected in needs.get(name, ()):
            if not met:
                raise ValueError(f"{given} with plan.search={name}: expected {expected}")


ANALYSES.add(Analysis("plan", plan, needs=(POINTS,), options=PlanSettings, check=_check))
