"""Tables of the analysis `decay`: every arm before the first novel request and after the last one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spanlab.analysis.decay import LEAST_SPEEDUP, Decay
from spanlab.report.cells import percent, percent_between, placeholder, ratio, word
from spanlab.report.sweep.data import SweepPoint, axis_name, value_text
from spanlab.report.tables import Cell, Column, Table

_NOTES = (
    "known = requests whose passages others get too; novel = requests whose passages nobody else gets",
    "before = known requests before the first novel one, in a warm cache; after = in the last of 10 windows",
    f"falls after = novel requests by the end of the first window with a speedup below {LEAST_SPEEDUP:g}; "
    "lasts = none has",
)


def decay_table(title: str, arms: Mapping[str, Decay], baseline: str) -> Table:
    """Speedup over the baseline and reuse of each arm, with intervals over seeds."""
    scored = any(decay.change for decay in arms.values())
    columns = (
        Column("arm", "arm", left=True),
        Column("speedup_before", "speedup, known\nbefore"),
        Column("speedup_after", "speedup, known\nafter"),
        Column("overall_after", "speedup, all\nafter", 1),
        Column("falls_after", "falls below\nafter (novel)"),
        Column("reused_before", "hit rate, known\nbefore", 2),
        Column("reused_after", "hit rate, known\nafter"),
        Column("seen_after", "no limit of\nmemory", 3),
        *(Column(f"change_{when}", f"gold loss, change\n{when}") for when in ("before", "after") if scored),
    )
    rows = [
        (
            word(name),
            *(_ratio(speedup) for speedup in (decay.speedup[0], decay.speedup[-1], decay.overall[-1])),
            _falls(decay.falls_after),
            *(_share(rate) for rate in (decay.reused[0], decay.reused[-1])),
            percent(decay.seen[-1]),
            *(_nats(decay.change[window]) for window in (0, -1) if scored),
        )
        for name, decay in arms.items()
        if name != baseline
    ]
    notes = (
        f"speedup = mean TTFT of {baseline} ÷ that of the arm, same requests; intervals: 95 %, over seeds",
        *_NOTES,
    )
    bound = "no limit of memory = tokens that were computed before, for prefixes in the order that was served"
    change = f"change = loss of gold answers to known requests − that of {baseline}, nats per token"
    all_notes = (*notes, bound, change) if scored else (*notes, bound)
    return Table("decay", f"Speedup while novel requests arrive\n{title}", columns, tuple(rows), all_notes)


def _nats(interval: Any) -> Cell:
    ends = "" if interval.low is None else f" [{interval.low:.3f}, {interval.high:.3f}]"
    return Cell(interval.mean, f"{interval.mean:.3f}{ends}")


def _ratio(interval: Any) -> Cell:
    return ratio(interval.mean, None if interval.low is None else (interval.low, interval.high))


def _share(interval: Any) -> Cell:
    if interval.low is None:
        return percent(interval.mean)
    return percent_between(interval.mean, (max(0.0, interval.low), min(1.0, interval.high)))


def _falls(novel: float | None) -> Cell:
    return placeholder("lasts") if novel is None else Cell(novel, f"{novel:.0f}" if novel else "never above")


def points_table(points: Sequence[SweepPoint]) -> Table:
    """Speedup of known requests before and after novel ones, by arm and point of a sweep."""
    axis = axis_name(points[0].axis) if points else "point"
    columns = (
        Column("point", axis, left=True),
        Column("arm", "arm", left=True),
        Column("speedup_before", "speedup\nbefore"),
        Column("speedup_after", "speedup\nafter"),
        Column("falls_after", "falls below\nafter (novel)"),
        Column("reused_after", "hit rate\nafter"),
    )
    rows = [
        (
            word(value_text(point.value)),
            word(name),
            *(ratio(decay["speedup"][window]["mean"]) for window in (0, -1)),
            _falls(decay["falls_after"]),
            percent(decay["reused"][-1]["mean"]),
        )
        for point in points
        for name, decay in (point.summary or {})["decay"].items()
    ]
    return Table("decay_points", f"Speedup while novel requests arrive, by {axis}", columns, tuple(rows), _NOTES)
