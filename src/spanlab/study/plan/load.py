"""The search `load`: the most requests per second that meet the targets with the study's memory."""

from __future__ import annotations

from dataclasses import replace

from spanlab.settings.plan import SEARCHES
from spanlab.study.plan.arrivals import APART_NS
from spanlab.study.plan.monotone import Border, geometric
from spanlab.study.plan.planner import Planner
from spanlab.study.plan.reasons import value_of, why_load_fails
from spanlab.study.plan.search_result import Axis, SearchResult

AXIS = Axis("times", "load (times the workload's own)")
LEAST, MOST = 0.05, 1.25  # multiples of the saturating load


@SEARCHES.register("load")
def load(planner: Planner) -> SearchResult:
    """Compress arrivals in time, up to a load that exceeds the capacity of full batches.

    Where the least load misses the targets and one request at a time meets them, the search goes on to lower loads,
    down to a mean gap as long as that between requests that come one at a time.
    """
    own_outcome = planner.references["own"]
    utilisation, rate = own_outcome.mean("utilisation"), own_outcome.mean("rate_rps")
    if utilisation is None or rate is None:
        return _no_load(planner)
    least, lowest = LEAST / utilisation, 1e9 / (rate * APART_NS)
    border = _border(planner, least, MOST / utilisation)
    if border.value is None and planner.references["alone"].meets and lowest < least:
        border = border.continued(_border(planner, lowest, least))
    times = border.value
    return SearchResult(
        axis=AXIS,
        curve=border.curve,
        verdict=_verdict(planner, border, rate),
        value=times,
        answer={"highest_load": times, "highest_rate_rps": None if times is None else times * rate},
        caveats=border.caveats("load", "{:.4g} times the load meets the targets, {:.4g} not"),
    )


def _border(planner: Planner, low: float, high: float) -> Border:
    """Return the border between two multiples of the load, from the highest down."""
    grid = geometric(low, high, planner.study.plan.resolution)[::-1]
    return planner.border(
        grid, lambda times: replace(planner.study_point, load=times), lambda times: f"load times {times:g}"
    )


def _no_load(planner: Planner) -> SearchResult:
    """Return no load, since all requests arrive at once; ValueError where the search is set explicitly."""
    reason = "all requests come at once; expected a log with times, or arrivals=poisson arrivals.rate_rps=RATE"
    if planner.study.plan.search is not None:
        raise ValueError(f"plan.search=load: {reason}")
    answer = {"highest_load": None, "highest_rate_rps": None}
    return SearchResult(AXIS, (), f"the load is undefined: {reason}", value=None, answer=answer)


def _verdict(planner: Planner, border: Border, rate: float) -> str:
    times = border.value
    if times is not None:
        condition = f"meets {planner.targets_text} with {planner.memory_text}"
        return f"a load of up to {times:.4g} times this one, {times * rate:.3g} requests/s, {condition}"
    if not planner.references["alone"].meets:
        return f"less load will not help: {why_load_fails(planner)}"
    lowest, outcome = border.curve[0]
    statistic = "the queue grows" if outcome.grows else value_of(outcome, outcome.worst)
    return (
        f"no load meets {planner.targets_text} with {planner.memory_text}, though one request at a time does: with "
        f"{1 / (lowest * rate):,.0f} s between requests on average, {statistic}, for some come close together"
    )
