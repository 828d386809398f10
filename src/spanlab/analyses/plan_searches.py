"""Searches of a plan, one per setting."""

from __future__ import annotations

import math
from dataclasses import replace

from spanlab.analyses.plan import (
    SEARCHES,
    Axis,
    Mark,
    Planner,
    SearchResult,
    no_more_hits,
    scan,
    value_of,
    why_load_fails,
    why_memory_fails,
)
from spanlab.analyses.plan_points import APART_NS, Border, Point, geometric
from spanlab.analyses.state_ratio import SGLANG_DEFAULT, balanced
from spanlab.model_spec import GIB
from spanlab.settings.arms import PlacementSettings
from spanlab.study.prepare import room_gib

# ------------------------------------------------------------------------------
# The search `memory`: the least store that meets the targets at the study's load.
# ------------------------------------------------------------------------------

MEMORY_AXIS = Axis("gib", "memory for KV and states (GiB)")


@SEARCHES.register("memory")
def memory(planner: Planner) -> SearchResult:
    """Try sizes from the need of the largest request alone, up to that of everything ever stored,
    or to the device."""
    point, store = planner.study_point, planner.study.store
    least = sum(planner.need_gib(planner.strategy))
    stored = planner.references["no_limit"].mean("cached_bytes")
    assert stored is not None, "every run reports the bytes that it stored"
    most, room = max(least, stored / GIB + 2 * least), room_gib(planner.study)
    limit = math.inf if room is None else room
    if limit < least:
        verdict = f"memory will not help: the largest request alone needs {least:.5g} GiB, and {_device(planner)}"
        return SearchResult(MEMORY_AXIS, (), verdict, value=None, answer={"least_gib": None})
    grid = sorted(
        {
            min(size, limit)
            for size in geometric(least, min(most, limit), planner.study.analyses.plan.resolution)
        }
    )
    border = planner.border(
        grid,
        lambda size: replace(point, store=replace(store, total_gib=size)),
        lambda size: f"memory {size:g} GiB",
    )
    return SearchResult(
        axis=MEMORY_AXIS,
        curve=border.curve,
        verdict=_memory_verdict(planner, border, limit < most),
        value=border.value,
        answer={"least_gib": border.value},
        caveats=border.caveats("memory", "{:g} GiB meet the targets and {:g} GiB do not"),
    )


def _memory_verdict(planner: Planner, border: Border, is_cut: bool) -> str:
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


# ------------------------------------------------------------------------------
# The search `load`: the most requests per second that meet the targets with the study's memory.
# ------------------------------------------------------------------------------

LOAD_AXIS = Axis("times", "load (times the workload's own)")
LEAST, MOST = 0.05, 1.25  # multiples of the saturating load


@SEARCHES.register("load")
def load(planner: Planner) -> SearchResult:
    """Compress arrivals in time, up to a load that exceeds the capacity of full batches.

    Where the least load misses the targets and one request at a time meets them, the search goes on
    to lower loads, down to a mean gap as long as that between requests that come one at a time.
    """
    own_outcome = planner.references["own"]
    utilisation, rate = own_outcome.mean("utilisation"), own_outcome.mean("rate_rps")
    if utilisation is None or rate is None:
        # no load, since all requests arrive at once; ValueError where the search is set explicitly
        reason = "all requests come at once; expected a log with times, or arrivals=poisson arrivals.rate_rps=RATE"
        if planner.study.analyses.plan.search is not None:
            raise ValueError(f"plan.search=load: {reason}")
        answer = {"highest_load": None, "highest_rate_rps": None}
        return SearchResult(
            LOAD_AXIS, (), f"the load is undefined: {reason}", value=None, answer=answer
        )
    least, lowest = LEAST / utilisation, 1e9 / (rate * APART_NS)
    border = _border(planner, least, MOST / utilisation)
    if border.value is None and planner.references["alone"].meets and lowest < least:
        border = border.continued(_border(planner, lowest, least))
    times = border.value
    return SearchResult(
        axis=LOAD_AXIS,
        curve=border.curve,
        verdict=_load_verdict(planner, border, rate),
        value=times,
        answer={"highest_load": times, "highest_rate_rps": None if times is None else times * rate},
        caveats=border.caveats("load", "{:.4g} times the load meets the targets, {:.4g} not"),
    )


def _border(planner: Planner, low: float, high: float) -> Border:
    """Return the border between two multiples of the load, from the highest down."""
    grid = geometric(low, high, planner.study.analyses.plan.resolution)[::-1]
    return planner.border(
        grid,
        lambda times: replace(planner.study_point, load=times),
        lambda times: f"load times {times:g}",
    )


def _load_verdict(planner: Planner, border: Border, rate: float) -> str:
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


# ------------------------------------------------------------------------------
# The search `tier`: the least size of the last tier that meets the targets, with the study's
# other memory.
# ------------------------------------------------------------------------------

SMALLEST = 1024  # divisor of everything that is ever stored, for the smallest size


@SEARCHES.register("tier")
def tier(planner: Planner) -> SearchResult:
    """Try sizes from 1/1024 to twice the bytes that are ever stored."""
    store = planner.study.store
    name, rules = list(store.tiers.items())[-1]

    def point(size: float) -> Point:
        return replace(
            planner.study_point,
            store=replace(store, tiers=store.tiers | {name: replace(rules, gib=size)}),
        )

    stored = planner.references["no_limit"].mean("cached_bytes")
    assert stored is not None, "every run reports the bytes that it stored"
    grid = geometric(
        stored / GIB / SMALLEST, 2 * stored / GIB, planner.study.analyses.plan.resolution
    )
    border = planner.border(grid, point, lambda size: f"{name} {size:g} GiB")
    best = border.outcomes[len(grid) - 1]
    if border.value is None:
        verdict = (
            f"a larger {name} will not help: with room for everything that is ever stored, "
            f"{value_of(best, best.worst)}"
        )
    else:
        verdict = f"{border.value:g} GiB of {name} beside {planner.memory_text} meet {planner.targets_text}"
    return SearchResult(
        axis=Axis("tier_gib", f"size of {name} (GiB)"),
        curve=border.curve,
        verdict=verdict,
        value=border.value,
        answer={"least_tier_gib": border.value},
        caveats=border.caveats("tier", "{:g} GiB meet the targets and {:g} GiB do not"),
    )


# ------------------------------------------------------------------------------
# The search `replicas`: the fewest engines that meet the targets at the study's load.
# ------------------------------------------------------------------------------

REPLICAS_AXIS = Axis("replicas", "replicas")
LEAST_MOST = 8
TIMES = 4  # multiple of the replicas that the work needs at least, with full batches


@SEARCHES.register("replicas")
def replicas(planner: Planner) -> SearchResult:
    """Try one replica up to four times as many as the work needs, each with the study's store."""
    study = planner.study
    utilisation = planner.references["own"].mean("utilisation")
    most = max(LEAST_MOST, math.ceil(TIMES * study.replicas.count * (utilisation or 0.0)))
    grid = [float(count) for count in range(1, most + 1)]
    border = planner.border(
        grid,
        lambda count: replace(planner.study_point, replicas=round(count)),
        lambda count: f"{count:g} replicas",
    )
    fewest = None if border.value is None else round(border.value)
    best = border.outcomes[most - 1]
    if fewest is None:
        verdict = (
            f"replicas will not help: with the largest number tried, {value_of(best, best.worst)}"
        )
    else:
        template = (
            "1 replica with {} meets" if fewest == 1 else f"{fewest} replicas with {{}} each meet"
        )
        verdict = f"{template.format(planner.memory_text)} {planner.targets_text}"
    return SearchResult(
        axis=REPLICAS_AXIS,
        curve=border.curve,
        verdict=verdict,
        value=fewest,
        answer={"fewest_replicas": fewest},
        caveats=border.caveats("replicas", "{:g} meet the targets and {:g} do not"),
    )


# ------------------------------------------------------------------------------
# The search `ratio`: split of a hybrid model's memory between states and KV.
# ------------------------------------------------------------------------------

RATIO_AXIS = Axis("ratio", "states ÷ KV (bytes)")
RATIOS = (0.05, 0.1, 0.2, 0.3, 0.45, 0.6, SGLANG_DEFAULT, 1.3, 2.0, 3.0, 5.0, 8.0)


@SEARCHES.register("ratio")
def ratio(planner: Planner) -> SearchResult:
    """Try the study's memory as two pools, at every ratio that the largest request fits."""
    study, total = planner.study, planner.study.store.total_gib
    assert total is not None, "the settings let no other memory pass"
    rule = balanced(study.model, planner.requests)
    ratios = sorted({*RATIOS, float(f"{rule:.3g}")})
    need, points = planner.need_gib(planner.strategy), {}
    for value in ratios:
        store = replace(study.store, state_ratio=value)
        kv_gib, state_gib = store.pools_gib
        assert kv_gib is not None and state_gib is not None, "both pools are limited"
        if need.kv <= kv_gib and need.states <= state_gib:
            points[value] = replace(planner.study_point, store=store)
    if not points:
        raise ValueError(
            f"store.total_gib={total} with plan.search=ratio: expected memory for the largest request"
        )
    marks = (Mark("SGLang's default", SGLANG_DEFAULT), Mark("SGLang's formula", rule))
    return scan(planner, RATIO_AXIS, points, lambda value: f"states ÷ KV = {value:g}", marks)


# ------------------------------------------------------------------------------
# The search `interval`: distance between a hybrid model's states along a prompt.
# ------------------------------------------------------------------------------

INTERVAL_AXIS = Axis("interval", "tokens between two states")


@SEARCHES.register("interval")
def interval(planner: Planner) -> SearchResult:
    """Try states at every multiple of an interval, doubled up to the longest prompt; eviction and
    matching stay."""
    study, strategy = planner.study, planner.strategy
    unit = max(strategy.block_size, study.model.grid)
    longest = max(request.num_tokens for request in planner.requests)
    steps = [unit << power for power in range(max(1, (longest // unit).bit_length()))]
    placements = {step: PlacementSettings(kind="block", interval=step) for step in steps}
    points = {
        float(step): replace(planner.study_point, strategy=replace(strategy, placement=placement))
        for step, placement in placements.items()
    }
    return scan(planner, INTERVAL_AXIS, points, lambda step: f"a state every {step:g} tokens")


# ------------------------------------------------------------------------------
# The search `block`: tokens per block, the unit of matching and sharing.
# ------------------------------------------------------------------------------

BLOCK_AXIS = Axis("block_size", "tokens per block")
SIZES = (16, 32, 64, 128, 256, 512)


@SEARCHES.register("block")
def block(planner: Planner) -> SearchResult:
    """Try powers of two from 16 and the arm's own size, where the largest request fits the study's
    memory."""
    strategy, total = planner.strategy, planner.study.store.total_gib
    arm_size = strategy.block_size if strategy.pool is None else strategy.pool.block_size
    sizes = sorted({*SIZES, arm_size or SIZES[0]})
    arms = {}
    for size in sizes:
        if strategy.pool is None:
            arms[size] = replace(strategy, block_size=size)
        else:
            arms[size] = replace(strategy, pool=replace(strategy.pool, block_size=size))
    points = {
        float(size): replace(planner.study_point, strategy=arm)
        for size, arm in arms.items()
        if total is None or sum(planner.need_gib(arm)) <= total
    }
    return scan(planner, BLOCK_AXIS, points, lambda size: f"a block of {size:g} tokens")
