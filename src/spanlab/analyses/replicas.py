"""Tables of several engines behind one router."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from spanlab.analyses.base import Findings, Finished, point_entries
from spanlab.report import style
from spanlab.report.data import mean_ttft, token_hit_rate
from spanlab.report.sweep import SweepPoint, footer_of, value_text
from spanlab.report.table import (
    Field,
    Table,
    count,
    percent,
    percent_interval,
    ratio,
    seconds,
    seconds_interval,
    tabulate,
    word,
)
from spanlab.settings.analyses import ANALYSES, ARMS, Analysis
from spanlab.settings.study import Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
    return tabulate(
        "routings", "Every arm at every point, several replicas", fields, rows, (_BUSY_NOTE,)
    )


# ------------------------------------------------------------------------------
# The figure of the analysis `replicas`: how busy each replica is, by routing or by another
# swept setting.
# ------------------------------------------------------------------------------


def draw_busy(points: Sequence[SweepPoint]) -> Figure:
    """A column of dots per arm and point, one dot for each replica."""
    arms = list(points[0].findings("replicas")["arms"])
    figure, [[axes]] = style.framed_with(
        footer_of(points), "How busy each replica is", margins=style.margins_for(arms)
    )
    positions = np.arange(len(points))
    for number, arm in enumerate(arms):
        shift = (number - (len(arms) - 1) / 2) * 0.6 / len(arms)
        for position, point in zip(positions, points, strict=True):
            busy = point.findings("replicas")["arms"][arm]["busy_fraction"]
            axes.scatter(
                np.full(len(busy), position + shift),
                100 * np.array(busy),
                s=18,
                color=f"C{number}",
                label=arm if position == 0 else None,
            )
    axes.set_xticks(
        positions, [value_text(point.value) for point in points], rotation=20, ha="right"
    )
    axes.set_ylim(bottom=0)
    style.label(axes, "", "share of the time in which steps run (%)")
    style.legend_right(axes)
    return figure


# ------------------------------------------------------------------------------
# The analysis `replicas`: distribution of requests, work and reuse over the engines behind one
# router.
# ------------------------------------------------------------------------------


def replicas_of_study(finished: Finished) -> Findings:
    """Return the numbers of every replica of every arm, over all seeds."""
    settings = finished.study.replicas
    arms = {result.data.name: spread_of(result.data.runs) for result in finished.results}
    entry = {"count": settings.count, "routing": settings.routing, "arms": arms}
    return Findings(summary={"replicas": entry}, tables=(replicas_table(arms),))


def spread_of(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return numbers by replica over all runs, and the busy time of the busiest replica ÷ the
    mean."""
    requests, prompt, reused = (
        np.array([[replica[key] for replica in run["replicas"]] for run in runs]).sum(axis=0)
        for key in ("requests", "prompt_tokens", "reused_tokens")
    )
    busy = np.mean(
        [[replica["busy_s"] / run["makespan_s"] for replica in run["replicas"]] for run in runs],
        axis=0,
    )
    return {
        "requests": requests.tolist(),
        "busy_fraction": busy.tolist(),
        "token_hit_rate": (reused / np.maximum(prompt, 1)).tolist(),
        "busiest_over_mean": float(busy.max() / busy.mean()),
    }


def replicas_of_points(points: Sequence[SweepPoint]) -> Findings:
    """Return reuse, waiting and balance of load of each routing, over all points of a sweep."""
    return Findings(
        summary={"routings": point_entries(points, "replicas")},
        tables=(routings_table(points),),
        figures={"replicas_busy": partial(draw_busy, points)},
    )


def _check(study: Study) -> None:
    """Raise ValueError for a study of one replica."""
    if study.replicas.count == 1:
        raise ValueError("analyses=replicas with replicas.count=1: expected two replicas or more")


ANALYSES.add(
    Analysis(
        "replicas", replicas_of_study, needs=(ARMS,), check=_check, of_points=replicas_of_points
    )
)
