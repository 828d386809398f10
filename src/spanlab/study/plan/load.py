"""The search `load`: the most requests per second that meet the targets with the study's memory."""

from __future__ import annotations

from collections.abc import Sequence

from spanlab.settings.plan import SEARCHES
from spanlab.study.plan.monotone import Border, find_border, geometric
from spanlab.study.plan.outcome import Outcome
from spanlab.study.plan.planner import Planner
from spanlab.study.plan.reasons import why_load_fails
from spanlab.study.plan.search_result import Axis, SearchResult

AXIS = Axis("times", "load (times the workload's own)")
LEAST, MOST = 0.05, 1.25  # multiples of the saturating load


@SEARCHES.register("load")
def load(planner: Planner) -> SearchResult:
    """Compress arrivals in time, up to a load that exceeds the capacity of full batches."""

    def outcomes(multiples: Sequence[float], every: bool) -> list[Outcome]:
        points = [planner.point(load=times) for times in multiples]
        return planner.try_points(points, [f"load times {times:g}" for times in multiples], every)

    own_outcome = planner.references["own"]
    utilisation, rate = own_outcome.mean("utilisation"), own_outcome.mean("rate_rps")
    if utilisation is None or rate is None:
        return _no_load(planner)
    grid = geometric(LEAST / utilisation, MOST / utilisation, planner.study.plan.resolution)[::-1]
    border = find_border(grid, planner.study.plan.points, outcomes)
    times = None if border.first is None else grid[border.first]
    return SearchResult(
        axis=AXIS,
        curve=[(grid[index], border.outcomes[index]) for index in sorted(border.outcomes, reverse=True)],
        verdict=_verdict(planner, times, rate),
        helps=times is not None,
        value=times,
        answer={"highest_load": times, "highest_rate_rps": None if times is None else times * rate},
        caveats=_reversed(grid, border),
    )


def _no_load(planner: Planner) -> SearchResult:
    """Return no load, since all requests arrive at once; ValueError where the search is set explicitly."""
    reason = "all requests come at once; expected a log with times, or arrivals=poisson arrivals.rate_rps=RATE"
    if planner.study.plan.search is not None:
        raise ValueError(f"plan.search=load: {reason}")
    answer = {"highest_load": None, "highest_rate_rps": None}
    return SearchResult(AXIS, (), f"the load is undefined: {reason}", helps=False, value=None, answer=answer)


def _verdict(planner: Planner, times: float | None, rate: float) -> str:
    if times is not None:
        condition = f"meets {planner.targets_text} with {planner.memory_text}"
        return f"a load of up to {times:.4g} times this one, {times * rate:.3g} requests/s, {condition}"
    if planner.references["alone"].meets:
        return f"no load of {LEAST:.0%} of saturation or more meets {planner.targets_text} with {planner.memory_text}"
    return f"less load will not help: {why_load_fails(planner)}"


def _reversed(grid: Sequence[float], border: Border) -> list[str]:
    return [
        f"load: not monotone beyond the intervals: {grid[a]:.4g} times the load meets the targets, {grid[b]:.4g} not"
        for a, b in border.reversals
    ]
