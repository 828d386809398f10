"""The analysis `summary`: arms side by side, with their speedups, bounds and loads."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from spanlab.report import measures
from spanlab.report.data import StudyData
from spanlab.report.figures import FIGURES, load
from spanlab.study import summary as sums
from spanlab.study.aa import withdrawn
from spanlab.study.caveats import caveats, load_words
from spanlab.study.findings import Findings, Finished
from spanlab.study.head import describe_store, footer
from spanlab.study.results import ArmResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def summarise_arms(finished: Finished) -> Findings:
    """Every arm's summary beside the baseline's; speedups are withdrawn where the machine was noisy."""
    data = _side_by_side(finished)
    if finished.noise is not None:
        data = withdrawn(data, finished.noise)
    return Findings(
        summary={
            "intervals": measures.interval_words(data.arms),
            "arms": {arm.name: arm.summary for arm in data.arms},
            "load": [asdict(point) for point in data.load],
        },
        figures={name: partial(_draw, name, data) for name in FIGURES},
        caveats=data.caveats,
        data=data,
    )


def _draw(name: str, data: StudyData) -> Figure | None:
    return load(name)(data)


def _side_by_side(finished: Finished) -> StudyData:
    study, results = finished.study, finished.results
    baseline = next((result for result in results if result.data.name == study.baseline), None)
    bound = max(result.bound for result in results)
    for result in results:
        values = result.data.summary
        values["own_bound_tokens"] = result.bound
        values["bound_tokens"] = bound
        values["share_of_bound"] = values["tokens"]["reused"] / bound if bound else None
        values["speedup"] = _speedup(baseline, result)
    arms = [result.data for result in results]
    return StudyData(
        title=finished.name,
        footer=footer(finished),
        arms=arms,
        load=[point for result in results for point in result.load],
        store=describe_store(study),
        baseline=study.baseline,
        hit=study.hit,
        caveats=caveats(study, arms, finished.failed),
        failed=finished.failed,
        load_words=load_words(study),
    )


def _speedup(baseline: ArmResult | None, result: ArmResult) -> dict[str, Any] | None:
    """None without a baseline, and where either queue grows: that ratio tells the length of the run."""
    if baseline is None or baseline.saturated or result.saturated:
        return None
    return sums.speedup(baseline.ttft_sums, result.ttft_sums)


def flat_table(summary: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    """The arms as one flat table: column names and rows."""
    picks = {
        "token_hit_rate": lambda arm: arm["token_hit_rate"],
        "request_hit_rate": lambda arm: arm["request_hit_rate"],
        "reused_tokens": lambda arm: arm["tokens"]["reused"],
        "computed_tokens": lambda arm: arm["tokens"]["computed"],
        "repaired_tokens": lambda arm: arm["tokens"]["repaired"],
        "ttft_mean_s": lambda arm: arm["ttft_s"]["mean"],
        "ttft_p99_s": lambda arm: arm["ttft_s"]["p99"],
        "kv_resident_mean_bytes": lambda arm: arm["bytes"]["kv_resident_mean"],
        "state_resident_mean_bytes": lambda arm: arm["bytes"]["state_resident_mean"],
        "share_of_bound": lambda arm: arm["share_of_bound"],
        "offline_bound_tokens": lambda arm: arm["bounds"]["offline_tokens"],
        "regret_points": lambda arm: arm["bounds"]["regret_points"],
    }
    rows = [[name, *(pick(arm) for pick in picks.values())] for name, arm in summary["arms"].items()]
    return ["arm", *picks], rows
