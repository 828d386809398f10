"""The analysis `replicas`: distribution of requests, work and reuse over the engines behind one router."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from spanlab.report.analyses.replicas import replicas_table, routings_table
from spanlab.report.analyses.replicas_figure import draw_busy
from spanlab.report.sweep.data import SweepPoint
from spanlab.settings.analyses import ANALYSES, OF_POINTS
from spanlab.study.analyses.of_points import point_entries
from spanlab.study.findings import Findings, Finished


@ANALYSES.register("replicas")
def replicas_of_study(finished: Finished) -> Findings:
    """Return the numbers of every replica of every arm, over all seeds."""
    settings = finished.study.replicas
    arms = {result.data.name: spread_of(result.data.runs) for result in finished.results}
    entry = {"count": settings.count, "routing": settings.routing, "arms": arms}
    return Findings(summary={"replicas": entry}, tables=(replicas_table(arms),))


def spread_of(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return numbers by replica over all runs, and the busy time of the busiest replica ÷ the mean."""
    requests, prompt, reused = (
        np.array([[replica[key] for replica in run["replicas"]] for run in runs]).sum(axis=0)
        for key in ("requests", "prompt_tokens", "reused_tokens")
    )
    busy = np.mean([[replica["busy_s"] / run["makespan_s"] for replica in run["replicas"]] for run in runs], axis=0)
    return {
        "requests": requests.tolist(),
        "busy_fraction": busy.tolist(),
        "token_hit_rate": (reused / np.maximum(prompt, 1)).tolist(),
        "busiest_over_mean": float(busy.max() / busy.mean()),
    }


@OF_POINTS.register("replicas")
def replicas_of_points(points: Sequence[SweepPoint]) -> Findings:
    """Return reuse, waiting and balance of load of each routing, over all points of a sweep."""
    return Findings(
        summary={"routings": point_entries(points, "replicas")},
        tables=(routings_table(points),),
        figures={"replicas_busy": partial(draw_busy, points)},
    )
