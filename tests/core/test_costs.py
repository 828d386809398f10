"""What reuse saves: costs add up along a prompt, and every rule of an arm counts the one that the arm names."""

import re
from dataclasses import replace

import numpy as np
import pytest

from spanlab.build import build_placer, build_policy
from spanlab.cli import compose
from spanlab.core.eviction import EVICTION_ORDERS, EvictionRules
from spanlab.core.placement import Dp, balanced
from spanlab.model_spec import COST, COSTS
from spanlab.settings.arms import PlacementSettings, check_arm

from .factories import BLIND_EVICTIONS, make_budget, make_policy, make_request, serve_prompt

OPTIONS = {"seconds": {"token_s": 3e-6, "pair_s": 2e-10}}
STUDY = compose("smoke", ["arms=own_rules", "load.rates_rps=[]", "load.arms=[]"])
MODEL = STUDY.model


def make(name: str):
    return COSTS.make(name, {}, OPTIONS.get(name, {}), model=MODEL)


@pytest.mark.parametrize("name", sorted(COSTS))
def test_costs_add_up_along_a_prompt(name):
    cost, rng = make(name), np.random.default_rng(0)
    for first, second, third in np.sort(rng.integers(0, 200_000, (100, 3))).tolist():
        total = cost(first, third)
        assert cost(first, second) + cost(second, third) == pytest.approx(total, rel=1e-12, abs=0)
        assert total > 0 or first == third


@pytest.mark.parametrize("name", sorted(COSTS))
def test_costs_of_arrays_are_those_of_numbers(name):
    cost, stops = make(name), np.arange(10, 90_000, 977)
    assert cost(10, stops).tolist() == [cost(10, stop) for stop in stops.tolist()]


def test_seconds_at_a_rate_are_its_flops():
    cost = COSTS.make(
        "seconds", {}, {"token_s": MODEL.linear_flops_per_token, "pair_s": MODEL.attention_flops_per_pair}
    )
    assert cost(100, 70_000) == MODEL.prefill_flops(100, 70_000)


@pytest.mark.parametrize(
    ("arm", "cost", "expected"),
    [("dp_3", "tokens", 50), ("dp_3", "flops", None), ("dp_shared", "flops", None), ("planned", "tokens", 50)],
)
def test_an_arm_gives_its_cost_to_its_placement(arm, cost, expected):
    placer = build_placer(MODEL, replace(STUDY.arms[arm], cost=cost), 0, 1000)
    assert placer._cost(50, 100) == (expected or MODEL.prefill_flops(50, 100))


def test_a_planner_pays_for_states_as_they_are_stored():
    arm = replace(STUDY.arms["planned"], state_format="int8")
    placer = build_placer(MODEL, arm, 0, 1000)
    assert placer._facts.state_bytes == build_policy(STUDY, arm, 0, 1000).store.state_bytes < MODEL.state_bytes / 3


@pytest.mark.parametrize(("cost", "expected"), [("tokens", 50), ("flops", None), (None, None)])
@pytest.mark.parametrize("arm", ["boundary_gdsf", "boundary_value"])
def test_an_arm_gives_its_cost_to_its_eviction(arm, cost, expected):
    store = build_policy(STUDY, replace(STUDY.arms[arm], cost=cost), 0, 1000).store
    kind = getattr(store._leaves, "_kind", None) or store._leaves.kind
    node = store.tree.new_root()
    node.start, node.depth = 50, 100
    assert kind.work(node) == (expected or MODEL.prefill_flops(50, 100))


@pytest.mark.parametrize("eviction", BLIND_EVICTIONS)
def test_orders_that_count_a_cost_say_so(eviction):
    calls = []

    def counted(start, stop):
        calls.append((start, stop))
        return stop - start

    rules = EvictionRules({"order": "gdsf"} if eviction in ("ttl_pins", "lease") else {}, lambda usual: counted)
    budget = make_budget(total=200)
    policy = make_policy(budget, hybrid=True, placer=balanced(2), grid=2, eviction=eviction, eviction_rules=rules)
    rng = np.random.default_rng(0)
    for index in range(60):
        serve_prompt(policy, make_request(tuple(rng.integers(0, 3, 12).tolist()), id=index), index)
    assert bool(calls) == (eviction in EVICTION_ORDERS.needing(COST))


PUBLISHED = PlacementSettings(kind="dp", count=3, dp=Dp(solver="published", backtrack="fixed"))


@pytest.mark.parametrize(
    ("arm", "settings", "sentence"),
    [
        ("boundary", {"cost": "flops"}, "arms.boundary.cost=flops with eviction=lru: expected null"),
        ("dp_3", {"cost": "bytes"}, "arms.dp_3.cost=bytes: expected one of flops, seconds, tokens"),
        ("dp_3", {"cost": "seconds"}, "arms.dp_3.cost=seconds needs arms.dp_3.cost_options.token_s"),
        ("dp_3", {"cost_options": {"token_s": 1}}, "arms.dp_3.cost_options.token_s with arms.dp_3.cost=null"),
        (
            "dp_3",
            {"cost": "seconds", "cost_options": {"token_s": 0, "pair_s": 0}},
            "arms.dp_3.cost_options.token_s=0 with pair_s=0: expected one of both above 0",
        ),
        ("dp_3", {"cost": "flops", "placement": PUBLISHED}, "arms.dp_3.cost=flops with eviction=lru: expected null"),
        ("vllm_0_32", {"cost": "flops"}, "arms.vllm_0_32.cost=flops with arms.vllm_0_32.pool"),
    ],
)
def test_a_cost_that_nothing_counts_is_refused(arm, settings, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        check_arm(arm, replace(STUDY.arms[arm], **settings), MODEL)
