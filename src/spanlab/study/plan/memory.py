"""The search `memory`: the least store that meets the targets at the study's load."""

from __future__ import annotations

from dataclasses import replace

from spanlab.build import GIB
from spanlab.settings.plan import SEARCHES
from spanlab.study.plan.monotone import Border, geometric
from spanlab.study.plan.planner import Planner
from spanlab.study.plan.reasons import no_more_hits, why_memory_fails
from spanlab.study.plan.search_result import Axis, SearchResult

AXIS = Axis("gib", "memory for KV and states (GiB)")


@SEARCHES.register("memory")
def memory(planner: Planner) -> SearchResult:
    """Try sizes from the need of the largest request alone, up to the size of everything that is ever stored."""
    point, store = planner.study_point, planner.study.store
    least, stored = sum(planner.need_gib(planner.strategy)), planner.references["no_limit"].mean("cached_bytes")
    assert stored is not None, "every run reports the bytes that it stored"
    grid = geometric(least, max(least, stored / GIB + 2 * least), planner.study.plan.resolution)
    border = planner.border(
        grid, lambda size: replace(point, store=replace(store, total_gib=size)), lambda size: f"memory {size:g} GiB"
    )
    return SearchResult(
        axis=AXIS,
        curve=border.curve,
        verdict=_verdict(planner, border),
        value=border.value,
        answer={"least_gib": border.value},
        caveats=border.caveats("memory", "{:g} GiB meet the targets and {:g} GiB do not"),
    )


def _verdict(planner: Planner, border: Border) -> str:
    size, room = border.value, planner.room_gib
    if size is None:
        return f"memory will not help: {why_memory_fails(planner)}"
    least = ", as little as the largest request needs" if border.first == 0 else ""
    more = "" if room is None or size <= room else f", more than the {room:.3g} GiB beside the weights of the model"
    hits = no_more_hits(planner) if not border.first else None
    return f"{size:g} GiB meet {planner.targets_text}{least}{more}{'; ' + hits if hits else ''}"
