"""The search `replicas`: the fewest engines that meet the targets at the study's load."""

from __future__ import annotations

import math
from dataclasses import replace

from spanlab.settings.plan import SEARCHES
from spanlab.study.plan.outcome import Outcome
from spanlab.study.plan.planner import Planner
from spanlab.study.plan.reasons import value_of
from spanlab.study.plan.search_result import Axis, SearchResult

AXIS = Axis("replicas", "replicas")
LEAST_MOST = 8
TIMES = 4  # multiple of the replicas that the work needs at least, with full batches


@SEARCHES.register("replicas")
def replicas(planner: Planner) -> SearchResult:
    """Try one replica up to four times as many as the work needs, each with the study's store."""
    study = planner.study
    utilisation = planner.references["own"].mean("utilisation")
    most = max(LEAST_MOST, math.ceil(TIMES * study.replicas.count * (utilisation or 0.0)))
    grid = [float(count) for count in range(1, most + 1)]
    border = planner.border(
        grid, lambda count: replace(planner.study_point, replicas=round(count)), lambda count: f"{count:g} replicas"
    )
    fewest = None if border.value is None else round(border.value)
    return SearchResult(
        axis=AXIS,
        curve=border.curve,
        verdict=_verdict(planner, fewest, border.outcomes[most - 1]),
        value=fewest,
        answer={"fewest_replicas": fewest},
        caveats=border.caveats("replicas", "{:g} meet the targets and {:g} do not"),
    )


def _verdict(planner: Planner, fewest: int | None, best: Outcome) -> str:
    if fewest is None:
        return f"replicas will not help: with the largest number tried, {value_of(best, best.worst)}"
    template = "1 replica with {} meets" if fewest == 1 else f"{fewest} replicas with {{}} each meet"
    return f"{template.format(planner.memory_text)} {planner.targets_text}"
