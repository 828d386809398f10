"""Tables of several engines behind one router."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spanlab.report.cells import count, percent, percent_interval, ratio, seconds, seconds_interval, word
from spanlab.report.fields import Field, tabulate
from spanlab.report.measures import mean_ttft, token_hit_rate
from spanlab.report.sweep.data import SweepPoint, value_text
from spanlab.report.tables import Table

_BUSY_NOTE = "busy = share of the time in which steps run; busiest ÷ mean = 1 where all replicas are equally busy"

_BY_REPLICA = ("requests", "busy_fraction", "token_hit_rate")


def replicas_table(arms: Mapping[str, Mapping[str, Any]]) -> Table:
    """A row for each replica of each arm."""
    fields = (
        Field("arm", "arm", word, left=True),
        Field("replica", "replica", count),
        Field("requests", "requests", count),
        Field("busy_fraction", "busy", percent),
        Field("token_hit_rate", "token hit rate", percent),
    )
    rows = [
        {"arm": arm, "replica": number} | {key: spread[key][number] for key in _BY_REPLICA}
        for arm, spread in arms.items()
        for number in range(len(spread["requests"]))
    ]
    return tabulate("replicas", "Requests and load by replica", fields, rows, (_BUSY_NOTE,))


def routings_table(points: Sequence[SweepPoint]) -> Table:
    """A row for each arm at each point of a sweep."""
    fields = (
        Field("point", "point", word, left=True),
        Field("arm", "arm", word, left=True),
        Field("token_hit_rate", "token hit rate", percent_interval, token_hit_rate),
        Field("ttft_mean_s", "mean TTFT", seconds_interval, mean_ttft),
        Field("ttft_p95_s", "p95 TTFT", seconds, "ttft_s.p95"),
        Field("busy_fraction", "busy", percent),
        Field("busiest_over_mean", "busiest ÷ mean", ratio),
    )
    rows = [
        {
            "point": value_text(point.value),
            "arm": arm,
            "busiest_over_mean": spread["busiest_over_mean"],
            **point.findings("arms")[arm],
        }
        for point in points
        for arm, spread in point.findings("replicas")["arms"].items()
    ]
    return tabulate("routings", "Every arm at every point, several replicas", fields, rows, (_BUSY_NOTE,))
