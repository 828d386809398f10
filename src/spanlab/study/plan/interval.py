"""The search `interval`: how far apart a hybrid model's states stand along a prompt."""

from __future__ import annotations

from dataclasses import replace

from spanlab.settings import PlacementSettings
from spanlab.settings.plan import SEARCHES
from spanlab.study.plan.found import Axis, Found
from spanlab.study.plan.planner import Planner
from spanlab.study.plan.scan import scan

AXIS = Axis("interval", "tokens between two states")


@SEARCHES.register("interval")
def interval(planner: Planner) -> Found:
    """States at every multiple of each interval, doubled up to the longest prompt; eviction and matching stay."""
    study, strategy = planner.study, planner.strategy
    if not study.model.is_hybrid or strategy.pool is not None:
        told = f"model.name={study.model.name} and baseline={study.baseline}"
        raise ValueError(f"plan.search=interval with {told}: expected a hybrid model and an arm that keeps a tree")
    unit, longest = max(strategy.block_size, study.model.grid), max(request.num_tokens for request in planner.requests)
    steps = [unit << power for power in range(max(1, (longest // unit).bit_length()))]
    placed = {step: PlacementSettings(kind="block", interval=step) for step in steps}
    points = {float(step): planner.point(strategy=replace(strategy, placement=own)) for step, own in placed.items()}
    return scan(planner, AXIS, points, lambda step: f"a state every {step:g} tokens")
