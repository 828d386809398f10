"""Decay of a cache's gain while novel requests arrive: reuse and speedup in windows of a request
stream."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from spanlab.analyses.base import Findings, Finished, footer
from spanlab.core.protocol import novel_requests
from spanlab.core.request import Request
from spanlab.records import ttft
from spanlab.report import style
from spanlab.report.sweep import SweepPoint, axis_name, value_text
from spanlab.report.table import (
    Cell,
    Field,
    Table,
    nats_interval,
    percent,
    percent_interval,
    placeholder,
    ratio,
    ratio_interval,
    tabulate,
    word,
)
from spanlab.settings.analyses import ANALYSES, Analysis
from spanlab.settings.study import Study
from spanlab.stats import Interval, paired_ratio_interval, t_interval
from spanlab.study.bounds import family
from spanlab.study.jobs import build_arrivals
from spanlab.study.numbers import RunCell, read_scores

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


WINDOWS = 10
LEAST_SPEEDUP = 1.1  # the gain counts as lost below this speedup
ColumnMap = Mapping[str, NDArray[Any]]
Flags = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Stream:
    """The requests of one seed in order of arrival.

    `ids`    ids of the requests, int64 [requests]
    `novel`  whether a request shares no passage with any other request, bool [requests]
    """

    ids: Ints
    novel: Flags

    @property
    def windows(self) -> Ints:
        """The window of each request: 0 before the first novel request, then 1 to WINDOWS.

        Windows 1 to WINDOWS have equally many novel requests. The first half of the requests before
        them has -1, since it meets an empty cache.
        """
        count = np.cumsum(self.novel, dtype=np.int64)
        windows: Ints = (count * WINDOWS + count[-1] - 1) // count[-1]
        windows[: int(np.argmax(self.novel)) // 2] = -1
        return windows

    def check(self, seed: int) -> None:
        """Raise ValueError where a window has no known request, or novel requests are fewer than
        windows."""
        known = set(self.windows[~self.novel].tolist())
        missing = [window for window in range(WINDOWS + 1) if window not in known]
        if self.novel.sum() < WINDOWS or missing:
            setting = f"analyses=decay with {self.novel.sum()} novel of {len(self.ids)} requests under seed {seed}"
            raise ValueError(
                f"{setting}: expected known ones in each of {WINDOWS} windows with a novel one, and before them"
            )

    def aligned(self, columns: ColumnMap, name: str) -> NDArray[Any]:
        """Return a column of a run's records, in the order of the stream."""
        rows = np.argsort(columns["request_id"])
        return np.asarray(columns[name])[rows][
            np.searchsorted(columns["request_id"][rows], self.ids)
        ]


@dataclass(frozen=True)
class Decay:
    """One arm by window, starting with the window before any novel request; intervals are over
    seeds.

    `novel`    number of novel requests up to the end of each window, mean over seeds
    `speedup`  sum of TTFT of the baseline ÷ that of the arm, over known requests; `overall` over
               all requests
    `reused`   reused ÷ prompt tokens of known requests; `seen` is the upper bound of an infinite
               cache, at the positions where the arm looks
    `change`   gold loss − that of the baseline, nats, mean over known requests; empty where no
               answers are scored
    """

    novel: list[float]
    speedup: list[Interval]
    overall: list[Interval]
    reused: list[Interval]
    seen: list[float]
    change: list[Interval]

    @property
    def falls_after(self) -> float | None:
        """Novel requests at the end of the first window whose speedup is below `LEAST_SPEEDUP`;
        None without one."""
        below = [
            window for window, speedup in enumerate(self.speedup) if speedup.mean < LEAST_SPEEDUP
        ]
        return self.novel[below[0]] if below else None

    def summary(self) -> dict[str, Any]:
        """Return the entry of `summary.json`."""
        names = ("speedup", "overall", "reused", "change")
        numbers = {name: [interval._asdict() for interval in getattr(self, name)] for name in names}
        return {"novel": self.novel, **numbers, "seen": self.seen, "falls_after": self.falls_after}


def decay_of(
    streams: Sequence[Stream],
    runs: Sequence[ColumnMap],
    baseline: Sequence[ColumnMap],
    changes: Sequence[Floats] = (),
) -> Decay:
    """Return an arm's windows, from its runs and the baseline's, one of each per stream.

    `changes`  gold loss of each request minus that of the baseline, in the order of the stream;
               empty where not scored
    """
    pairs = [_PairedRun(*pair) for pair in zip(streams, runs, baseline, strict=True)]
    windows = range(WINDOWS + 1)
    change = []
    for window in windows if changes else ():
        known = [(stream.windows == window) & ~stream.novel for stream in streams]
        means = [float(loss[rows].mean()) for loss, rows in zip(changes, known, strict=True)]
        change.append(t_interval(means))
    return Decay(
        novel=[float(np.mean([pair.novel_by(window) for pair in pairs])) for window in windows],
        speedup=[_speedup(pairs, window, with_novel=False) for window in windows],
        overall=[_speedup(pairs, window, with_novel=True) for window in windows],
        reused=[
            t_interval([pair.share("reused_tokens", window) for pair in pairs])
            for window in windows
        ],
        seen=[
            1 - float(np.mean([pair.share("lost_never_seen", window) for pair in pairs]))
            for window in windows
        ],
        change=change,
    )


def _speedup(pairs: Sequence[_PairedRun], window: int, with_novel: bool) -> Interval:
    above = [pair.ttft(pair.baseline, window, with_novel) for pair in pairs]
    return paired_ratio_interval(above, [pair.ttft(pair.run, window, with_novel) for pair in pairs])


@dataclass(frozen=True)
class _PairedRun:
    stream: Stream
    run: ColumnMap
    baseline: ColumnMap

    def novel_by(self, window: int) -> int:
        return int(self.stream.novel[self.stream.windows <= window].sum())

    def ttft(self, columns: ColumnMap, window: int, with_novel: bool) -> float:
        arrived, first = (
            self.stream.aligned(columns, name) for name in ("arrived_s", "first_token_s")
        )
        return float(ttft(arrived, first)[self._rows(window, with_novel)].sum())

    def share(self, name: str, window: int) -> float:
        rows = self._rows(window, with_novel=False)
        return float(
            self.stream.aligned(self.run, name)[rows].sum()
            / self.stream.aligned(self.run, "prompt_tokens")[rows].sum()
        )

    def _rows(self, window: int, with_novel: bool) -> Flags:
        rows: Flags = (self.stream.windows == window) & (~self.stream.novel | with_novel)
        return rows


# ------------------------------------------------------------------------------
# Tables of the analysis `decay`: every arm before the first novel request and after the last
# one.
# ------------------------------------------------------------------------------

_NOTES = (
    "known = requests whose passages others get too; novel = requests whose passages nobody else gets",
    "before = known requests before the first novel one, in a warm cache; after = in the last of 10 windows",
    f"falls after = novel requests by the end of the first window with a speedup below {LEAST_SPEEDUP:g}; "
    "lasts = none has",
)


def _share(estimate: Mapping[str, Any]) -> Cell:
    return percent_interval(Interval(**estimate).clipped())


def _falls(novel: float | None) -> Cell:
    return (
        placeholder("lasts")
        if novel is None
        else Cell(novel, f"{novel:.0f}" if novel else "never above")
    )


_FIELDS = (
    Field("arm", "arm", word, left=True),
    Field("speedup_before", "speedup, known\nbefore", ratio_interval, "speedup.0"),
    Field("speedup_after", "speedup, known\nafter", ratio_interval, "speedup.-1"),
    Field("overall_after", "speedup, all\nafter", ratio_interval, "overall.-1", 1),
    Field("falls_after", "falls below\nafter (novel)", _falls),
    Field("reused_before", "hit rate, known\nbefore", _share, "reused.0", 2),
    Field("reused_after", "hit rate, known\nafter", _share, "reused.-1"),
    Field("seen_after", "no limit of\nmemory", percent, "seen.-1", 3),
    Field("change_before", "gold loss, change\nbefore", nats_interval, "change.0"),
    Field("change_after", "gold loss, change\nafter", nats_interval, "change.-1"),
)


def decay_table(title: str, arms: Mapping[str, Decay], baseline: str) -> Table:
    """Speedup over the baseline and reuse of each arm, with intervals over seeds."""
    scored = any(decay.change for decay in arms.values())
    rows = [{"arm": name, **decay.summary()} for name, decay in arms.items() if name != baseline]
    notes = (
        f"speedup = mean TTFT of {baseline} ÷ that of the arm, same requests; intervals: 95 %, over seeds",
        *_NOTES,
    )
    bound = "no limit of memory = tokens that were computed before, for prefixes in the order that was served"
    change = f"change = loss of gold answers to known requests − that of {baseline}, nats per token"
    all_notes = (*notes, bound, change) if scored else (*notes, bound)
    fields = _FIELDS if scored else _FIELDS[:-2]
    return tabulate(
        "decay", f"Speedup while novel requests arrive\n{title}", fields, rows, all_notes
    )


def points_table(points: Sequence[SweepPoint]) -> Table:
    """Speedup of known requests before and after novel ones, by arm and point of a sweep."""
    axis = axis_name(points[0].axis) if points else "point"
    fields = (
        Field("point", axis, word, left=True),
        Field("arm", "arm", word, left=True),
        Field("speedup_before", "speedup\nbefore", ratio, "speedup.0.mean"),
        Field("speedup_after", "speedup\nafter", ratio, "speedup.-1.mean"),
        Field("falls_after", "falls below\nafter (novel)", _falls),
        Field("reused_after", "hit rate\nafter", percent, "reused.-1.mean"),
    )
    rows = [
        {"point": value_text(point.value), "arm": arm, **decay}
        for point in points
        for arm, decay in point.findings("decay").items()
    ]
    return tabulate(
        "decay_points", f"Speedup while novel requests arrive, by {axis}", fields, rows, _NOTES
    )


# ------------------------------------------------------------------------------
# The figure of the analysis `decay`: speedup and hit rate of known requests over the number of
# novel ones.
# ------------------------------------------------------------------------------


def draw_decay(
    arms: Mapping[str, Decay], families: Mapping[str, str], baseline: str, footer: str
) -> Figure:
    """Draw one line per arm with its interval over seeds; windows are drawn at their middles, the
    first at 0.

    The axes end at twice the largest mean, so wider intervals are clipped.
    """
    title = "Speedup of known requests while novel ones arrive"
    margins = style.Margins(top=1.35)
    scored = any(decay.change for decay in arms.values())
    figure, [[speedup, reused, *loss]] = style.framed_with(
        footer, title, cols=2 + scored, height=5.6, margins=margins, wspace=0.25 + 0.05 * scored
    )
    strokes = style.strokes((name, families[name]) for name in arms if name != baseline)
    for name, stroke in strokes.items():
        decay = arms[name]
        middles = [0.0, *((start + end) / 2 for start, end in pairwise(decay.novel))]
        _line(speedup, middles, decay.speedup, stroke, name, 1)
        _line(reused, middles, decay.reused, stroke, name, 100)
        for axes in loss:
            _line(axes, middles, decay.change, stroke, name, 1)
    speedup.axhline(1, color=style.INK, linewidth=1)
    speedup.axhline(LEAST_SPEEDUP, color=style.INK, linewidth=0.8, linestyle=(0, (1, 2)))
    style.label(
        speedup, "novel requests so far", f"TTFT of {baseline} ÷ TTFT (mean, known requests)"
    )
    style.label(reused, "novel requests so far", "token hit rate, known requests (%)")
    for axes in loss:
        axes.axhline(0, color=style.INK, linewidth=1)
        style.label(
            axes, "novel requests so far", f"gold loss − that of {baseline} (nats, known requests)"
        )
    shown = [decay for name, decay in arms.items() if name in strokes]
    speedup.set_ylim(0, _reach(decay.speedup for decay in shown))
    reused.set_ylim(0, 100)
    for axes in loss:
        reach = _reach(decay.change for decay in shown)
        axes.set_ylim(-reach, reach)
    handles, _ = speedup.get_legend_handles_labels()
    anchor = 0.03, 1 - 0.35 / figure.get_figheight()
    options = {"fontsize": style.TICK_PT, "frameon": False, "ncols": 3, "handlelength": 3.5}
    figure.legend(handles=handles, loc="upper left", bbox_to_anchor=anchor, **options)
    return figure


def _reach(lines: Iterable[Sequence[Interval]]) -> float:
    """Return twice the largest mean as axis limit: the wide intervals of few seeds would flatten
    the lines."""
    return 2 * max(abs(value.mean) for values in lines for value in values) or 1.0


def _line(
    axes: Axes,
    positions: list[float],
    values: Sequence[Interval],
    stroke: style.Stroke,
    name: str,
    factor: int,
) -> None:
    """Draw a line of means with a band between the ends of their intervals."""
    means = [factor * value.mean for value in values]
    axes.plot(positions, means, label=name, markersize=4, linewidth=1.5, **stroke.options)
    lows = [factor * (value.mean if value.low is None else value.low) for value in values]
    highs = [factor * (value.mean if value.high is None else value.high) for value in values]
    axes.fill_between(positions, lows, highs, color=stroke.colour, alpha=0.1, linewidth=0)


# ------------------------------------------------------------------------------
# The analysis `decay`: whether the gain of each arm lasts while novel requests arrive.
# ------------------------------------------------------------------------------


def decay(finished: Finished) -> Findings:
    """Return reuse and speedup of every arm in windows of novel requests; intervals are over
    seeds."""
    study = finished.study
    if study.runs.baseline not in finished.files:
        raise ValueError(
            f"baseline={study.runs.baseline} with analyses=decay: it failed, {finished.failed[study.runs.baseline]}"
        )
    cells = [RunCell(seed, study.arrivals.rate_rps) for seed in study.runs.seeds]
    streams = streams_of(study, finished.workload.requests)
    columns = {name: files.columns() for name, files in finished.files.items()}
    runs = {name: [by_cell[cell] for cell in cells] for name, by_cell in columns.items()}
    # the gold loss of every request by seed, in stream order; empty where answers are not scored
    losses: dict[str, list[Floats]] = {name: [] for name in runs}
    if study.backend == "engine" and study.engine.record == "scores":
        for name, files in finished.files.items():
            for cell, stream in zip(cells, streams, strict=True):
                scores = read_scores(files.outputs(name, cell))
                nll = [scores[request]["nll"] for request in stream.ids.tolist()]
                losses[name].append(np.array(nll))
    base_runs, base_losses = runs[study.runs.baseline], losses[study.runs.baseline]
    arms = {}
    for name, arm_runs in runs.items():
        changes = [loss - base for loss, base in zip(losses[name], base_losses, strict=True)]
        arms[name] = decay_of(streams, arm_runs, base_runs, changes)
    noise = finished.noise_sentence("speedups")
    families = {name: family(study.arms[name]) for name in arms}
    return Findings(
        summary={"decay": {name: arm.summary() for name, arm in arms.items()}},
        tables=(decay_table(f"{finished.name} · {footer(finished)}", arms, study.runs.baseline),),
        figures={
            "decay": partial(draw_decay, arms, families, study.runs.baseline, footer(finished))
        },
        caveats=(f"{noise}; they are shown all the same",) if noise else (),
    )


def streams_of(study: Study, requests: Sequence[Request]) -> list[Stream]:
    """Return the order of requests under each seed, equal for all arms; ValueError where a window
    is empty."""
    novel = np.array(sorted(novel_requests(requests)), np.int64)
    streams = []
    for seed in study.runs.seeds:
        arrivals = build_arrivals(study, tuple(requests), seed, study.arrivals.rate_rps)
        ids = np.array([request.id for request in arrivals], np.int64)
        streams.append(Stream(ids, np.isin(ids, novel)))
        streams[-1].check(seed)
    return streams


def decay_of_points(points: Sequence[SweepPoint]) -> Findings:
    """Return every arm's gain before and after novel requests, at every point of a sweep."""
    return Findings(summary={}, tables=(points_table(points),))


def _check(study: Study) -> None:
    """Raise ValueError where requests are not labelled as novel, or no baseline runs."""
    if study.arrivals.kind != "novel_stream":
        raise ValueError(
            f"arrivals.kind={study.arrivals.kind} with analyses=decay: expected novel_stream"
        )
    if study.runs.baseline not in study.chosen():
        raise ValueError(
            f"baseline={study.runs.baseline} with analyses=decay: expected one of the arms that run"
        )
    if study.backend == "server":
        raise ValueError(
            "backend=server with analyses=decay: expected sim or engine, for a server reports no causes"
        )


ANALYSES.add(
    Analysis("decay", decay, of_points=decay_of_points, check=_check, check_requests=streams_of)
)
