"""The search `memory`: the least store that meets the targets at the study's load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from spanlab.build import GIB
from spanlab.settings.plan import SEARCHES
from spanlab.study.plan.monotone import Border, find_border, geometric
from spanlab.study.plan.outcome import Outcome
from spanlab.study.plan.planner import Planner
from spanlab.study.plan.reasons import no_more_hits, why_memory_fails
from spanlab.study.plan.search_result import Axis, SearchResult

AXIS = Axis("gib", "memory for KV and states (GiB)")


@SEARCHES.register("memory")
def memory(planner: Planner) -> SearchResult:
    """Try sizes from the need of the largest request alone, up to the size of everything that is ever stored."""

    def outcomes(sizes: Sequence[float], every: bool) -> list[Outcome]:
        points = [planner.point(store=replace(planner.study.store, total_gib=size)) for size in sizes]
        return planner.try_points(points, [f"memory {size:g} GiB" for size in sizes], every)

    least, stored = sum(planner.need_gib(planner.strategy)), planner.references["no_limit"].mean("cached_bytes")
    assert stored is not None, "every run reports the bytes that it stored"
    grid = geometric(least, max(least, stored / GIB + 2 * least), planner.study.plan.resolution)
    border = find_border(grid, planner.study.plan.points, outcomes)
    size = None if border.first is None else grid[border.first]
    curve = [(grid[index], outcome) for index, outcome in border.outcomes.items()]
    return SearchResult(
        axis=AXIS,
        curve=curve,
        verdict=_verdict(planner, grid, border),
        helps=size is not None,
        value=size,
        answer={"least_gib": size},
        caveats=_reversed(grid, border),
    )


def _verdict(planner: Planner, grid: Sequence[float], border: Border) -> str:
    if border.first is None:
        return f"memory will not help: {why_memory_fails(planner)}"
    size, room = grid[border.first], planner.room_gib
    least = ", as little as the largest request needs" if border.first == 0 else ""
    more = "" if room is None or size <= room else f", more than the {room:.3g} GiB beside the weights of the model"
    hits = no_more_hits(planner) if not border.first else None
    return f"{size:g} GiB meet {planner.targets_text}{least}{more}{'; ' + hits if hits else ''}"


def _reversed(grid: Sequence[float], border: Border) -> list[str]:
    return [
        f"memory: not monotone beyond the intervals: {grid[a]:g} GiB meet the targets and {grid[b]:g} GiB do not"
        for a, b in border.reversals
    ]
