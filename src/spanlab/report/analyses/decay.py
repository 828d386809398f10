"""Tables of the analysis `decay`: every arm before the first novel request and after the last one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spanlab.analysis.decay import LEAST_SPEEDUP, Decay
from spanlab.report.cells import nats_interval, percent, percent_interval, placeholder, ratio, ratio_interval, word
from spanlab.report.fields import Field, tabulate
from spanlab.report.sweep.data import SweepPoint, axis_name, value_text
from spanlab.report.tables import Cell, Table
from spanlab.stats import Interval

_NOTES = (
    "known = requests whose passages others get too; novel = requests whose passages nobody else gets",
    "before = known requests before the first novel one, in a warm cache; after = in the last of 10 windows",
    f"falls after = novel requests by the end of the first window with a speedup below {LEAST_SPEEDUP:g}; "
    "lasts = none has",
)


def _share(estimate: Mapping[str, Any]) -> Cell:
    return percent_interval(Interval(**estimate).clipped())


def _falls(novel: float | None) -> Cell:
    return placeholder("lasts") if novel is None else Cell(novel, f"{novel:.0f}" if novel else "never above")


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
    return tabulate("decay", f"Speedup while novel requests arrive\n{title}", fields, rows, all_notes)


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
    return tabulate("decay_points", f"Speedup while novel requests arrive, by {axis}", fields, rows, _NOTES)
