"""The search `memory`: the least store that meets the targets at the study's load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from spanlab.build import GIB
from spanlab.settings.plan import SEARCHES
from spanlab.study.plan.found import Axis, Found
from spanlab.study.plan.monotone import Border, find_border, geometric
from spanlab.study.plan.outcome import Outcome
from spanlab.study.plan.planner import Planner
from spanlab.study.plan.reasons import no_more_hits, why_memory_fails

AXIS = Axis("gib", "memory for KV and states (GiB)")


@SEARCHES.register("memory")
def memory(planner: Planner) -> Found:
    """From what the largest request takes alone, to what holds all that was ever stored."""

    def outcomes(sizes: Sequence[float], every: bool) -> list[Outcome]:
        points = [planner.point(store=replace(planner.study.store, total_gib=size)) for size in sizes]
        return planner.try_points(points, [f"memory {size:g} GiB" for size in sizes], every)

    least, stored = sum(planner.need_gib(planner.strategy)), planner.references["no_limit"].mean("cached_bytes")
    assert stored is not None, "every run tells what it stored"
    grid = geometric(least, max(least, stored / GIB + 2 * least), planner.study.plan.resolution)
    border = find_border(grid, planner.study.plan.points, outcomes)
    found = None if border.first is None else grid[border.first]
    curve = [(grid[at], outcome) for at, outcome in border.outcomes.items()]
    return Found(
        axis=AXIS,
        curve=curve,
        verdict=_verdict(planner, grid, border),
        helps=found is not None,
        value=found,
        answer={"least_gib": found},
        caveats=_reversed(grid, border),
    )


def _verdict(planner: Planner, grid: Sequence[float], border: Border) -> str:
    if border.first is None:
        return f"memory will not help: {why_memory_fails(planner)}"
    size, room = grid[border.first], planner.room_gib
    least = ", as little as the largest request needs" if border.first == 0 else ""
    more = "" if room is None or size <= room else f", more than the {room:.3g} GiB beside the weights of the model"
    told = no_more_hits(planner) if not border.first else None
    return f"{size:g} GiB meet {planner.aims}{least}{more}{'; ' + told if told else ''}"


def _reversed(grid: Sequence[float], border: Border) -> list[str]:
    return [
        f"memory: not monotone beyond the intervals: {grid[a]:g} GiB meet the targets and {grid[b]:g} GiB do not"
        for a, b in border.reversals
    ]
