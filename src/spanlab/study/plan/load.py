"""The search `load`: the most requests per second that meet the targets with the study's memory."""

from __future__ import annotations

from dataclasses import replace

from spanlab.settings.plan import SEARCHES
from spanlab.study.plan.monotone import geometric
from spanlab.study.plan.planner import Planner
from spanlab.study.plan.reasons import why_load_fails
from spanlab.study.plan.search_result import Axis, SearchResult

AXIS = Axis("times", "load (times the workload's own)")
LEAST, MOST = 0.05, 1.25  # multiples of the saturating load


@SEARCHES.register("load")
def load(planner: Planner) -> SearchResult:
    """Compress arrivals in time, up to a load that exceeds the capacity of full batches."""
    own_outcome = planner.references["own"]
    utilisation, rate = own_outcome.mean("utilisation"), own_outcome.mean("rate_rps")
    if utilisation is None or rate is None:
        return _no_load(planner)
    grid = geometric(LEAST / utilisation, MOST / utilisation, planner.study.plan.resolution)[::-1]
    border = planner.border(
        grid, lambda times: replace(planner.study_point, load=times), lambda times: f"load times {times:g}"
    )
    times = border.value
    return SearchResult(
        axis=AXIS,
        curve=border.curve,
        verdict=_verdict(planner, times, rate),
        value=times,
        answer={"highest_load": times, "highest_rate_rps": None if times is None else times * rate},
        caveats=border.caveats("load", "{:.4g} times the load meets the targets, {:.4g} not"),
    )


def _no_load(planner: Planner) -> SearchResult:
    """Return no load, since all requests arrive at once; ValueError where the search is set explicitly."""
    reason = "all requests come at once; expected a log with times, or arrivals=poisson arrivals.rate_rps=RATE"
    if planner.study.plan.search is not None:
        raise ValueError(f"plan.search=load: {reason}")
    answer = {"highest_load": None, "highest_rate_rps": None}
    return SearchResult(AXIS, (), f"the load is undefined: {reason}", value=None, answer=answer)


def _verdict(planner: Planner, times: float | None, rate: float) -> str:
    if times is not None:
        condition = f"meets {planner.targets_text} with {planner.memory_text}"
        return f"a load of up to {times:.4g} times this one, {times * rate:.3g} requests/s, {condition}"
    if planner.references["alone"].meets:
        return f"no load of {LEAST:.0%} of saturation or more meets {planner.targets_text} with {planner.memory_text}"
    return f"less load will not help: {why_load_fails(planner)}"
