"""Maps of spans: bytes by hand, reuse of an unlimited store by brute force, and release."""

import random

import pytest

from spanlab.core.placement import boundary, branch, every_n, last, no_states
from spanlab.core.repair import ITEMSIZES, MapRules, Repair, map_bytes, working_map_bytes
from spanlab.core.rules import ReuseRules
from spanlab.core.tree import composable, isolated
from spanlab.model_spec import ModelSpec

from ..support.models import make_model
from .factories import (
    KV,
    MAP,
    STATE,
    WORKING_MAP,
    assert_drained,
    begin,
    common,
    doc,
    finish,
    make_budget,
    make_map_policy,
    make_prompt,
    resumes,
    serve_prompt,
    text,
)

HEAD, ONE, TWO, TAIL = text(1, 2, 3, 4), doc(10, 11, 12, 13, 14), doc(20, 21, 22), text(5, 6)
PROMPT = make_prompt(HEAD, ONE, TWO, TAIL)  # [0, 4) [4, 9) [9, 12) [12, 14)


def make_hybrid(**changes) -> ModelSpec:
    sizes = {"recurrent_layers": 5, "recurrent_key_heads": 2, "recurrent_value_heads": 4, "recurrent_key_dim": 6}
    return make_model(**(sizes | {"recurrent_value_dim": 8, "conv_kernel": 4} | changes))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("form", "rank", "factors", "numbers"),
    [("exact", None, 0, 36), ("scalar", None, 1, 0), ("low_rank", 2, 1, 24), ("sum", None, 0, 0), ("last", None, 0, 0)],
)
def test_a_map_weighs_its_numbers_and_the_conv_state(form, rank, factors, numbers, dtype):
    model, heads, conv = make_hybrid(), 5 * 4, 5 * (2 * 2 * 6 + 4 * 8) * 3 * 2
    size = ITEMSIZES[dtype]
    assert map_bytes(MapRules(form, rank, dtype), model) == heads * (4 * factors + size * (numbers + 48)) + conv
    assert working_map_bytes(model) == heads * 4 * (36 + 48) + conv
    repaired = map_bytes(MapRules(form, rank, dtype), model, repaired=True)
    assert repaired == heads * (4 * factors + size * (numbers + 48 + 48)) + conv
    assert working_map_bytes(model, repaired=True) == heads * 4 * (36 + 48 + 48) + conv


def test_a_map_of_b_alone_weighs_as_much_as_a_state():
    for form in ("sum", "last"):
        assert map_bytes(MapRules(form), make_hybrid()) == make_hybrid().state_bytes
    halves = make_hybrid(state_itemsize=2)
    assert map_bytes(MapRules("last", None, "bfloat16"), halves) == halves.state_bytes


def test_the_published_sizes_of_qwen_maps():
    """0.8B: a map in float32 weighs as much as the KV of 3,072 tokens, its conv state aside; 27B: 4,608 tokens."""
    small = make_hybrid(
        attention_layers=6, kv_heads=2, head_dim=256, recurrent_layers=18, recurrent_key_heads=16,
        recurrent_value_heads=16, recurrent_key_dim=128, recurrent_value_dim=128,
    )  # fmt: skip
    large = make_hybrid(
        attention_layers=16, attention_heads=4, kv_heads=4, head_dim=256, recurrent_layers=48, recurrent_key_heads=16,
        recurrent_value_heads=48, recurrent_key_dim=128, recurrent_value_dim=128,
    )  # fmt: skip
    for model, tokens in ((small, 3_072), (large, 4_608)):
        matrices = map_bytes(MapRules(), model) - model.conv_state_bytes
        assert matrices == tokens * model.kv_bytes_per_token
        half = map_bytes(MapRules(dtype="bfloat16"), model) - model.conv_state_bytes
        assert 2 * half == matrices


def make_random_prompt(rng: random.Random, number: int):
    """Documents of a small set between texts of a small set; some begin alike, so that they share a part."""
    documents = [doc(*range(10), *range(100 * n, 100 * n + n)) for n in range(1, 5)]
    texts = [text(*range(50, 50 + n)) for n in (1, 5, 9)]
    spans = [rng.choice(documents + texts[:2]) for _ in range(rng.randint(1, 5))]
    return make_prompt(*spans, rng.choice(texts), id=number)


@pytest.mark.parametrize(("block_size", "grid"), [(1, 1), (1, 4), (4, 2), (3, 3)])
def test_a_store_without_limit_reuses_every_span_seen_before(block_size, grid):
    """Complete spans at any position, in whole blocks; text after an equal prefix from its last state on the grid."""
    rng, policy, unit = (
        random.Random(block_size + 10 * grid),
        make_map_policy(block_size=block_size, grid=grid, placer=every_n(1)),
        max(block_size, grid),
    )
    spans, texts = [], []
    reused = 0
    for number in range(60):
        request = make_random_prompt(rng, number)
        cache_spans = [(cache_span.independent, cache_span.tokens.tobytes()) for cache_span in composable(request)]
        plan = serve_prompt(policy, request, number)
        expected = []
        for index, (independent, tokens) in enumerate(cache_spans):
            limit = len(tokens) // 4 - (index == len(cache_spans) - 1)
            if independent:  # of spans with a common beginning: the map at the end of the shorter span
                ends = [len(other) // 4 // block_size * block_size for other in spans]
                stored_ends = [
                    end for other, end in zip(spans, ends, strict=True) if tokens[: 4 * end] == other[: 4 * end]
                ]
            else:
                same = [other for past, other in texts if past == cache_spans[:index]]
                stored_ends = [common(other, tokens) // 4 // unit * unit for other in same]
                stored_ends = [min(length, limit // unit * unit) for length in stored_ends]
            expected.append(max((length for length in stored_ends if length <= limit), default=0))
        assert resumes(plan) == expected
        spans += [tokens for independent, tokens in cache_spans if independent]
        texts += [
            (cache_spans[:index], tokens) for index, (independent, tokens) in enumerate(cache_spans) if not independent
        ]
        reused += plan.reused
    assert reused > 300
    assert_drained(policy)


def test_captures_are_ends_of_spans_and_placed_positions_of_text():
    ends = [("none", no_states(), [9, 12]), ("last", last(), [9, 12, 14]), ("every", every_n(3), [3, 9, 12])]
    for name, placer, captures in ends:
        _, allocation = begin(make_map_policy(placer=placer), PROMPT, 0)
        assert allocation.captures == captures, name
    marked = make_prompt(text(1, 2, 3), ONE, TAIL)
    assert begin(make_map_policy(placer=boundary()), marked, 0)[1].captures == [8]


def test_a_branch_is_where_the_beginning_that_is_stored_ends():
    policy = make_map_policy(placer=branch())
    serve_prompt(policy, PROMPT, 0)
    assert begin(policy, make_prompt(HEAD, doc(30, 31), ONE, TAIL), 1)[1].captures == [4, 6]
    assert begin(policy, make_prompt(text(1, 2, 9), ONE, TWO, text(5)), 2)[1].captures == [2]


def test_spans_of_equal_beginnings_resume_from_the_shorter_ones_map():
    policy = make_map_policy(placer=no_states())
    serve_prompt(policy, make_prompt(doc(10, 11, 12), TAIL), 0)
    plan, allocation = begin(policy, make_prompt(HEAD, ONE, TAIL), 1)
    assert resumes(plan) == [0, 3, 0]
    assert [(work.start, work.stop) for work in allocation.work] == [(0, 4), (7, 9), (9, 11)]
    assert (plan.composed, allocation.working_map) == (0, WORKING_MAP)
    finish(policy, allocation, 1)


def test_a_document_twice_is_two_entries_with_a_map_each():
    policy, twice = make_map_policy(placer=no_states()), make_prompt(HEAD, ONE, TWO, ONE, TAIL)
    plan, allocation = begin(policy, twice, 0)
    assert [span_plan.twin for span_plan in plan.cache_spans] == [None] * 5
    assert [(work.start, work.stop) for work in allocation.work] == [(0, 4), (4, 9), (9, 12), (12, 17), (17, 19)]
    assert policy.need(twice).tokens == 19
    finish(policy, allocation, 0)
    assert policy.store.state_cached == 2 * MAP, "its map is stored once"
    plan, allocation = begin(policy, twice, 1)
    assert resumes(plan) == [0, 5, 3, 5, 0]
    assert policy.store.state_locked == 2 * MAP
    finish(policy, allocation, 1)
    assert_drained(policy)


def test_a_preempted_request_resumes_from_its_stored_maps():
    policy = make_map_policy(placer=no_states())
    _, allocation = begin(policy, PROMPT, 0)
    policy.insert(allocation, 4, 0, 0)
    policy.insert(allocation, 9, 0, 1)
    policy.insert(allocation, 11, 0, 2)
    policy.free(allocation, 0)
    assert resumes(policy.match(PROMPT, 1)) == [0, 5, 0, 0]
    assert policy.match(PROMPT, 1).losses.state_never_placed == 4 + 2
    assert_drained(policy)


def test_the_need_of_a_request_includes_state_and_map():
    policy = make_map_policy(make_budget(tokens=14, states=3, total=14 * KV + STATE + WORKING_MAP), placer=no_states())
    assert policy.need(PROMPT)[3:] == (14 * KV, STATE + WORKING_MAP)
    assert policy.need(make_prompt(HEAD, TAIL)).state_bytes == STATE
    _, allocation = begin(policy, PROMPT, 0)
    assert allocation.captures == [], "there is no room for what would be kept"
    finish(policy, allocation, 0)
    assert resumes(policy.match(PROMPT, 1)) == [0, 0, 0, 0]


def test_an_evicted_map_leaves_its_keys_and_is_named():
    policy = make_map_policy(make_budget(states=20), placer=no_states())
    serve_prompt(policy, PROMPT, 0)
    policy.store.evict(0, 1)
    plan = policy.match(PROMPT, 1)
    assert resumes(plan) == [0, 0, 3, 0]
    assert plan.losses.state_evicted == 5
    policy.check()


def test_rules_of_maps_that_exclude_each_other_are_refused():
    for wrong in (
        {"layout": composable, "needs_states": True},
        {"layout": isolated, "maps": MapRules()},
        {"layout": composable, "needs_states": True, "maps": MapRules(), "copies": True},
        {"layout": composable, "needs_states": True, "maps": MapRules(), "repair": Repair("last", k=2)},
    ):
        with pytest.raises(AssertionError):
            ReuseRules(**wrong)


@pytest.mark.parametrize(
    ("rules", "sentence"),
    [
        (MapRules("dense"), "maps.form=dense: expected one of exact, scalar, low_rank, sum, last"),
        (MapRules(dtype="float16"), "maps.dtype=float16: expected one of float32, bfloat16 (did you mean bfloat16?)"),
        (MapRules("low_rank"), "maps.rank=None with form=low_rank: expected a rank"),
        (MapRules("sum", 2), "maps.rank=2 with form=sum: expected null"),
        (MapRules("low_rank", 0), "maps.rank=0: expected a number above zero"),
    ],
)
def test_a_map_that_makes_no_sense_is_refused(rules, sentence):
    with pytest.raises(ValueError, match="expected") as refused:
        rules.check("maps")
    assert str(refused.value) == sentence
