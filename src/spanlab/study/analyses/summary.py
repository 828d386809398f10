"""The analysis `summary`: comparison of arms, with their speedups, bounds and loads."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from spanlab.report import measures
from spanlab.report.data import StudyData
from spanlab.report.figures import FIGURES
from spanlab.report.summary.study_tables import study_tables
from spanlab.settings.analyses import ANALYSES
from spanlab.study.analyses.caveats import caveats, load_words
from spanlab.study.analyses.head import describe_store, footer
from spanlab.study.findings import Findings, Finished
from spanlab.study.machine.aa import withdraw_speedups
from spanlab.study.numbers import summary as sums
from spanlab.study.numbers.results import ArmResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@ANALYSES.register("summary")
def summarise_arms(finished: Finished) -> Findings:
    """Return every arm's summary, with speedups over the baseline unless the machine was noisy."""
    data = _study_data(finished)
    if finished.noise is not None:
        data = withdraw_speedups(data, finished.noise)
    tables = study_tables(data)
    return Findings(
        summary={
            "intervals": measures.interval_words(data.arms),
            "arms": {arm.name: arm.summary for arm in data.arms},
            "load": [asdict(point) for point in data.load],
        },
        tables=tables[:1],
        further=tables[1:],
        figures={name: partial(_draw, name, data) for name in FIGURES},
        caveats=data.caveats,
    )


def _draw(name: str, data: StudyData) -> Figure | None:
    return FIGURES[name](data)


def _study_data(finished: Finished) -> StudyData:
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
        count_hit_as=study.count_hit_as,
        caveats=(*finished.workload.notes, *caveats(study, arms, finished.failed)),
        failed=finished.failed,
        load_words=load_words(study),
    )


def _speedup(baseline: ArmResult | None, result: ArmResult) -> dict[str, Any] | None:
    """Return the speedup; None without a baseline, or where a queue grows and the ratio depends on the run's length."""
    if baseline is None or baseline.saturated or result.saturated:
        return None
    return sums.speedup(baseline.ttft_sums, result.ttft_sums)
