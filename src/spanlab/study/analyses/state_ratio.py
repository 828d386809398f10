"""The analysis `state_ratio`: two pools for states and KV by their ratio, compared with one shared budget."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from spanlab.report.analyses.state_ratio import ratio_curves, ratios_table
from spanlab.report.sweep.data import SweepPoint, footer_of
from spanlab.settings.analyses import ANALYSES, OF_POINTS
from spanlab.study.findings import Findings, Finished
from spanlab.study.plan.ratio import SGLANG_DEFAULT, balanced

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from spanlab.report.analyses.state_ratio import RatioCurves


@ANALYSES.register("state_ratio")
def ratio_of_study(finished: Finished) -> Findings:
    """Return the ratio of the study and the ratios of SGLang's rules; the analysis `summary` has the arms."""
    study = finished.study
    rules = {"default": SGLANG_DEFAULT, "formula": balanced(study.model, finished.workload.requests)}
    return Findings({"state_ratio": {"ratio": study.store.state_ratio, **rules}})


@OF_POINTS.register("state_ratio")
def ratios_of_points(points: Sequence[SweepPoint]) -> Findings:
    """Return reuse at every ratio of a sweep, at SGLang's ratios, and with one shared budget."""
    ran = [point for point in points if point.summary is not None]
    curves = ratio_curves(ran)
    return Findings(
        summary={"state_ratio": [_entry(point) for point in ran]},
        tables=(ratios_table(curves),),
        figures={"state_ratio": partial(_draw, curves, footer_of(ran))},
    )


def _entry(point: SweepPoint) -> dict[str, Any]:
    assert point.summary is not None, "only points that ran are told"
    return {"settings": dict(point.settings), **point.summary["state_ratio"]}


def _draw(curves: Sequence[RatioCurves], footer: str) -> Figure:
    from spanlab.report.analyses.state_ratio_figure import (
        draw_ratios,  # matplotlib: half a second that only drawing needs
    )

    return draw_ratios(curves, footer)
