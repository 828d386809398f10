"""The search `tier`: the least size of the last tier that meets the targets, with the study's other memory."""

from __future__ import annotations

from dataclasses import replace

from spanlab.build import GIB
from spanlab.settings.plan import SEARCHES
from spanlab.study.plan.monotone import geometric
from spanlab.study.plan.outcome import Outcome
from spanlab.study.plan.planner import Planner
from spanlab.study.plan.point import Point
from spanlab.study.plan.reasons import value_of
from spanlab.study.plan.search_result import Axis, SearchResult

SMALLEST = 1024  # divisor of everything that is ever stored, for the smallest size


@SEARCHES.register("tier")
def tier(planner: Planner) -> SearchResult:
    """Try sizes from 1/1024 to twice the bytes that are ever stored."""
    store = planner.study.store
    name, rules = list(store.tiers.items())[-1]

    def point(size: float) -> Point:
        return replace(planner.study_point, store=replace(store, tiers=store.tiers | {name: replace(rules, gib=size)}))

    stored = planner.references["no_limit"].mean("cached_bytes")
    assert stored is not None, "every run reports the bytes that it stored"
    grid = geometric(stored / GIB / SMALLEST, 2 * stored / GIB, planner.study.plan.resolution)
    border = planner.border(grid, point, lambda size: f"{name} {size:g} GiB")
    return SearchResult(
        axis=Axis("tier_gib", f"size of {name} (GiB)"),
        curve=border.curve,
        verdict=_verdict(planner, name, border.value, border.outcomes[len(grid) - 1]),
        value=border.value,
        answer={"least_tier_gib": border.value},
        caveats=border.caveats("tier", "{:g} GiB meet the targets and {:g} GiB do not"),
    )


def _verdict(planner: Planner, name: str, least: float | None, best: Outcome) -> str:
    if least is None:
        return (
            f"a larger {name} will not help: with room for everything that is ever stored, {value_of(best, best.worst)}"
        )
    return f"{least:g} GiB of {name} beside {planner.memory_text} meet {planner.targets_text}"
