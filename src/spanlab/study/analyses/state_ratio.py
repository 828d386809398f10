"""The analysis `state_ratio`: two pools for states and KV by their ratio, compared with one shared budget."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from spanlab.report.analyses.state_ratio import ratio_curves, ratios_table
from spanlab.report.analyses.state_ratio_figure import draw_ratios
from spanlab.report.sweep.data import SweepPoint, footer_of
from spanlab.settings.analyses import ANALYSES, OF_POINTS
from spanlab.study.analyses.of_points import point_entries
from spanlab.study.findings import Findings, Finished
from spanlab.study.plan.ratio import SGLANG_DEFAULT, balanced


@ANALYSES.register("state_ratio")
def ratio_of_study(finished: Finished) -> Findings:
    """Return the ratio of the study and the ratios of SGLang's rules; the analysis `summary` has the arms."""
    study = finished.study
    rules = {"default": SGLANG_DEFAULT, "formula": balanced(study.model, finished.workload.requests)}
    return Findings({"state_ratio": {"ratio": study.store.state_ratio, **rules}})


@OF_POINTS.register("state_ratio")
def ratios_of_points(points: Sequence[SweepPoint]) -> Findings:
    """Return reuse at every ratio of a sweep, at SGLang's ratios, and with one shared budget."""
    curves = ratio_curves(points)
    return Findings(
        summary={"state_ratio": point_entries(points, "state_ratio")},
        tables=(ratios_table(curves),),
        figures={"state_ratio": partial(draw_ratios, curves, footer_of(points))},
    )
