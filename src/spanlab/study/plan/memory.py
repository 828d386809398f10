"""The search `memory`: the least store that meets the targets at the study's load."""

from __future__ import annotations

import math
from dataclasses import replace

from spanlab.build import GIB
from spanlab.settings.plan import SEARCHES
from spanlab.study.checks import room_gib
from spanlab.study.plan.monotone import Border, geometric
from spanlab.study.plan.planner import Planner
from spanlab.study.plan.reasons import no_more_hits, value_of, why_memory_fails
from spanlab.study.plan.search_result import Axis, SearchResult

AXIS = Axis("gib", "memory for KV and states (GiB)")


@SEARCHES.register("memory")
def memory(planner: Planner) -> SearchResult:
    """Try sizes from the need of the largest request alone, up to that of everything ever stored, or to the device."""
    point, store = planner.study_point, planner.study.store
    least, stored = sum(planner.need_gib(planner.strategy)), planner.references["no_limit"].mean("cached_bytes")
    assert stored is not None, "every run reports the bytes that it stored"
    most, room = max(least, stored / GIB + 2 * least), room_gib(planner.study)
    limit = math.inf if room is None else room
    if limit < least:
        verdict = f"memory will not help: the largest request alone needs {least:.5g} GiB, and {_device(planner)}"
        return SearchResult(AXIS, (), verdict, value=None, answer={"least_gib": None})
    grid = sorted({min(size, limit) for size in geometric(least, min(most, limit), planner.study.plan.resolution)})
    border = planner.border(
        grid, lambda size: replace(point, store=replace(store, total_gib=size)), lambda size: f"memory {size:g} GiB"
    )
    return SearchResult(
        axis=AXIS,
        curve=border.curve,
        verdict=_verdict(planner, border, limit < most),
        value=border.value,
        answer={"least_gib": border.value},
        caveats=border.caveats("memory", "{:g} GiB meet the targets and {:g} GiB do not"),
    )


def _verdict(planner: Planner, border: Border, is_cut: bool) -> str:
    """Return the answer; `is_cut`: one device holds less than everything that is ever stored."""
    size = border.value
    if size is None and is_cut and planner.references["no_limit"].meets:
        best = border.outcomes[len(border.grid) - 1]
        statistic = "the queue grows" if best.grows else value_of(best, best.worst)
        return (
            f"memory of one device will not help: {_device(planner)}, with which {statistic}; more memory meets "
            f"{planner.targets_text}, so it needs tiers or replicas"
        )
    if size is None:
        return f"memory will not help: {why_memory_fails(planner)}"
    least = ", as little as the largest request needs" if border.first == 0 else ""
    hits = no_more_hits(planner) if not border.first else None
    return f"{size:g} GiB meet {planner.targets_text}{least}{'; ' + hits if hits else ''}"


def _device(planner: Planner) -> str:
    study = planner.study
    return f"one {study.hardware.name} holds {room_gib(study):g} GiB beside the weights of {study.model.name}"
