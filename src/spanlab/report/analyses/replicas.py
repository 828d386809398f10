"""Tables of several engines behind one router."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spanlab.report import cells
from spanlab.report.measures import interval
from spanlab.report.sweep.data import SweepPoint, value_text
from spanlab.report.tables import Column, Table

_BUSY_NOTE = "busy = share of the time in which steps run; busiest ÷ mean = 1 where all replicas are equally busy"


def replicas_table(arms: Mapping[str, Mapping[str, Any]]) -> Table:
    """A row for each replica of each arm."""
    columns = (
        Column("arm", "arm", left=True),
        Column("replica", "replica"),
        Column("requests", "requests"),
        Column("busy_fraction", "busy"),
        Column("token_hit_rate", "token hit rate"),
    )
    rows = tuple(
        (
            cells.word(arm),
            cells.count(number),
            cells.count(requests),
            cells.percent(spread["busy_fraction"][number]),
            cells.percent(spread["token_hit_rate"][number]),
        )
        for arm, spread in arms.items()
        for number, requests in enumerate(spread["requests"])
    )
    return Table("replicas", "Requests and load by replica", columns, rows, (_BUSY_NOTE,))


def routings_table(points: Sequence[SweepPoint]) -> Table:
    """A row for each arm at each point of a sweep."""
    columns = (
        Column("point", "point", left=True),
        Column("arm", "arm", left=True),
        Column("token_hit_rate", "token hit rate"),
        Column("ttft_mean_s", "mean TTFT"),
        Column("ttft_p95_s", "p95 TTFT"),
        Column("busy_fraction", "busy"),
        Column("busiest_over_mean", "busiest ÷ mean"),
    )
    rows = []
    for point in points:
        summary = point.summary or {}
        for arm, spread in summary["replicas"]["arms"].items():
            arm_summary = summary["arms"][arm]
            rows.append(
                (
                    cells.word(value_text(point.value)),
                    cells.word(arm),
                    cells.percent_between(
                        arm_summary["token_hit_rate"], interval(arm_summary["token_hit_rate_interval"])
                    ),
                    cells.seconds(arm_summary["ttft_s"]["mean"], interval(arm_summary["ttft_s_interval"]["mean"])),
                    cells.seconds(arm_summary["ttft_s"]["p95"]),
                    cells.percent(arm_summary["busy_fraction"]),
                    cells.ratio(spread["busiest_over_mean"]),
                )
            )
    return Table("routings", "Every arm at every point, several replicas", columns, tuple(rows), (_BUSY_NOTE,))
