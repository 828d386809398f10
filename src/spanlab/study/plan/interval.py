"""The search `interval`: distance between a hybrid model's states along a prompt."""

from __future__ import annotations

from dataclasses import replace

from spanlab.settings import PlacementSettings
from spanlab.settings.plan import SEARCHES
from spanlab.study.plan.planner import Planner
from spanlab.study.plan.scan import scan
from spanlab.study.plan.search_result import Axis, SearchResult

AXIS = Axis("interval", "tokens between two states")


@SEARCHES.register("interval")
def interval(planner: Planner) -> SearchResult:
    """Try states at every multiple of an interval, doubled up to the longest prompt; eviction and matching stay."""
    study, strategy = planner.study, planner.strategy
    unit, longest = max(strategy.block_size, study.model.grid), max(request.num_tokens for request in planner.requests)
    steps = [unit << power for power in range(max(1, (longest // unit).bit_length()))]
    placements = {step: PlacementSettings(kind="block", interval=step) for step in steps}
    points = {
        float(step): replace(planner.study_point, strategy=replace(strategy, placement=placement))
        for step, placement in placements.items()
    }
    return scan(planner, AXIS, points, lambda step: f"a state every {step:g} tokens")
