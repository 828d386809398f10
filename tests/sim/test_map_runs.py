"""Spans of hybrid models in the simulator: reuse where prefix caching has none, and its cost."""

from dataclasses import replace

import numpy as np
import pytest

from spanlab.core.admission import BatchRules
from spanlab.core.placement import boundary, last
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.repair import MapRules, Repair
from spanlab.core.request import Budget, Request, Span
from spanlab.core.rules import ReuseRules
from spanlab.core.step import StepFeatures, features
from spanlab.core.tree import composable
from spanlab_sim.timing import ConstantTiming, RooflineTiming

from ..support.models import make_model
from ..support.policies import make_tree_policy
from . import serving
from .test_timing import make_hardware

STATE, MAP, WORKING_MAP, GRID = 40, 60, 80, 4
TIMING = ConstantTiming(0.001, seconds_per_step=0.01)
SYSTEM = Span(np.arange(8, dtype=np.int32), reusable=True)
DOCUMENTS = [Span(np.arange(100 * n, 100 * n + 10 * n, dtype=np.int32), independent=True) for n in (1, 2, 3)]


def make_policy(
    maps: MapRules | None, budget: Budget | None = None, placer=None, repair: Repair | None = None
) -> TreePolicy:
    sizes = {"maps": maps, "map_bytes": MAP, "working_map_bytes": WORKING_MAP, "layout": composable} if maps else {}
    rules = ReuseRules(needs_states=True, grid=GRID, repair=repair or Repair(), **sizes)
    return make_tree_policy(rules, budget=budget, placer=placer or boundary(), state_bytes=STATE)


def asked(number: int, order: list[int], question: int, first: tuple[Span, ...] = (SYSTEM,)) -> Request:
    """Documents in some order behind a system prompt, and a question of 3 tokens; one request a second."""
    end = Span(np.arange(900 + 10 * question, 903 + 10 * question, dtype=np.int32))
    return Request(number, 0, (*first, *(DOCUMENTS[n] for n in order), end), arrived_at=number * 10**9, output_len=2)


def serve(
    policy: TreePolicy, requests: list[Request], max_num_batched_tokens: int = 8192
) -> tuple[list, list[StepFeatures]]:
    steps = []
    rules = BatchRules(max_num_batched_tokens, min(64, max_num_batched_tokens))
    note = lambda step, now, result: steps.append(features(step, STATE, policy.rules))  # noqa: E731
    records, _ = serving.serve(requests, policy, TIMING, rules, on_step=note)
    policy.check()
    return list(records.values()), steps


ORDERS = [[0, 1, 2], [2, 0, 1], [0, 2, 1], [1, 1, 0]]
SHUFFLED = [asked(number, order, number) for number, order in enumerate(ORDERS)]


def test_pic_reuses_shuffled_documents_beyond_the_system_prompt():
    prefix, _ = serve(make_policy(None), SHUFFLED)
    assert [record.reused_tokens for record in prefix] == [0, 8, 8, 8]
    anywhere, _ = serve(make_policy(MapRules()), SHUFFLED)
    assert [record.reused_tokens for record in anywhere] == [0, 8 + 60, 8 + 60, 8 + 50]
    assert [record.computed_tokens for record in anywhere] == [71, 3, 3, 3]
    assert [record.loaded_state_bytes for record in anywhere] == [0, *[STATE + 3 * MAP] * 3]
    assert [record.captured_states for record in anywhere] == [4, 0, 0, 0]
    assert [record.captured_state_bytes for record in anywhere] == [STATE + 3 * MAP, 0, 0, 0]


def test_documents_without_common_opening_text_share_nothing_as_prefixes():
    requests = [asked(n, order, n, first=(Span(np.array([7000 + n], np.int32)),)) for n, order in enumerate(ORDERS)]
    assert sum(record.reused_tokens for record in serve(make_policy(None, placer=last()), requests)[0]) == 0
    assert [r.reused_tokens for r in serve(make_policy(MapRules()), requests)[0]] == [0, 60, 60, 50]


@pytest.mark.parametrize("max_num_batched_tokens", [7, 16, 8192])
@pytest.mark.parametrize("form", ["exact", "scalar"])
def test_every_span_is_composed_once_in_any_cut(max_num_batched_tokens, form):
    """Over the steps of a run: one map for each span of each prompt, one column of A for each span row computed."""
    records, steps = serve(make_policy(MapRules(form)), SHUFFLED, max_num_batched_tokens)
    assert sum(step.composed_maps for step in steps) == 4 * 3
    assert sum(step.map_tokens for step in steps) == (60 if form == "exact" else 0)
    assert sum(step.loaded_state_bytes for step in steps) == sum(record.loaded_state_bytes for record in records)
    assert sum(step.captured_state_bytes for step in steps) == sum(record.captured_state_bytes for record in records)
    if max_num_batched_tokens == 8192:
        first = [step.composed_maps for step in steps if step.prefill_tokens]
        assert first == [3, 3, 3, 3]


def test_a_repair_computes_the_first_tokens_of_every_span_once_more():
    """The first prompt computes 60 tokens of spans alone, 48 of them behind the repair's, and repairs one at a time."""
    records, steps = serve(make_policy(MapRules(), repair=Repair("first", k=4)), SHUFFLED)
    assert [record.reused_tokens for record in records] == [0, 8 + 48, 8 + 48, 8 + 38]
    assert [record.computed_tokens for record in records] == [71, 3 + 12, 3 + 12, 3 + 12]
    assert [record.captured_state_bytes for record in records] == [STATE + 3 * MAP, 0, 0, 0]
    first, *later = [step for step in steps if step.prefill_tokens]
    assert (first.prefill_tokens, first.map_tokens, first.composed_maps) == (71 + 12, 60 + 48, 3)
    pieces = [8, *(4, 6, 4), *(4, 16, 4), *(4, 26, 4), 3]  # each span alone up to the repair's end, behind it, again
    assert (first.scan_runs, first.scan_chunks) == (len(pieces), sum(-(-piece // GRID) for piece in pieces))
    assert [(step.prefill_tokens, step.scan_runs, step.scan_chunks) for step in later] == [(15, 4, 4)] * 3


@pytest.mark.parametrize("form", ["exact", "scalar"])
def test_a_repair_is_the_same_work_in_any_cut(form):
    policy = make_policy(MapRules(form), repair=Repair("first", k=4))
    records, steps = serve(policy, SHUFFLED, max_num_batched_tokens=7)
    assert [record.reused_tokens for record in records] == [0, 8 + 48, 8 + 48, 8 + 38]
    assert sum(step.map_tokens for step in steps) == 60 * (form == "exact") + 48
    assert sum(step.composed_maps for step in steps) == 4 * 3
    assert sum(step.prefill_tokens for step in steps) == 71 + 12 + 3 * 15
    assert sum(step.captured_state_bytes for step in steps) == STATE + 3 * MAP


def test_a_small_store_keeps_its_budget_and_serves_all():
    room = Budget(total_bytes=71 + 2 + STATE + WORKING_MAP + 2 * MAP)
    again = [replace(request, id=request.id + len(ORDERS)) for request in SHUFFLED]
    records, _ = serve(make_policy(MapRules(), room), SHUFFLED + again)
    assert len(records) == 8
    assert 0 < sum(record.reused_tokens for record in records) < 8 * 60
    assert all(r.reused_tokens + r.computed_tokens == r.prompt_tokens for r in records)


def test_the_roofline_charges_composing_and_the_columns_of_a():
    sizes = {"recurrent_layers": 3, "recurrent_key_heads": 1, "recurrent_value_heads": 2, "conv_kernel": 4}
    model = make_model(recurrent_key_dim=5, recurrent_value_dim=7, **sizes)
    plain = StepFeatures(prefill_tokens=10, num_prefills=1)
    compute = RooflineTiming(model, make_hardware(bandwidth_bytes_per_s=1e12))
    assert compute.step(plain._replace(composed_maps=4)) - compute.step(plain) == 4 * 6 * 2 * 5 * 5 * 7 * 1_000
    assert compute.step(plain._replace(map_tokens=9)) - compute.step(plain) == 9 * 6 * 7 * 5 * 5 * 1_000
    memory = RooflineTiming(model, make_hardware(peak_flops=1e12))
    moved = 4 * (6 * 5 * 5 * 4 + 2 * model.state_bytes)
    assert memory.step(plain._replace(composed_maps=4)) - memory.step(plain) == moved * 1_000
