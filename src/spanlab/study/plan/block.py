"""The search `block`: tokens per block, the unit of matching and sharing."""

from __future__ import annotations

from dataclasses import replace

from spanlab.settings import Strategy
from spanlab.settings.plan import SEARCHES
from spanlab.study.plan.planner import Planner
from spanlab.study.plan.scan import scan
from spanlab.study.plan.search_result import Axis, SearchResult

AXIS = Axis("block_size", "tokens per block")
SIZES = (16, 32, 64, 128, 256, 512)


@SEARCHES.register("block")
def block(planner: Planner) -> SearchResult:
    """Try powers of two from 16 and the arm's own size, where the largest request fits the study's memory."""
    strategy, total = planner.strategy, planner.study.store.total_gib
    arm_size = strategy.block_size if strategy.pool is None else strategy.pool.block_size
    sizes = sorted({*SIZES, arm_size or SIZES[0]})
    arms = {size: _with_blocks(strategy, size) for size in sizes}
    points = {
        float(size): replace(planner.study_point, strategy=arm)
        for size, arm in arms.items()
        if total is None or sum(planner.need_gib(arm)) <= total
    }
    return scan(planner, AXIS, points, lambda size: f"a block of {size:g} tokens")


def _with_blocks(strategy: Strategy, size: int) -> Strategy:
    if strategy.pool is None:
        return replace(strategy, block_size=size)
    return replace(strategy, pool=replace(strategy.pool, block_size=size))
