"""Tiers below a pool of blocks in the serving loop: times by hand, exact twins, and random runs recounted."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spanlab.core.admission import BatchRules

from .tiered import ONE_AT_A_TIME, SIZE, apart, make_blocks, make_policy, request, rules, serve, times_us

A, B, C = range(100, 116), range(200, 216), range(300, 316)  # four blocks each


def displaced():
    """A document, two that take its place where there are nine blocks, and the first one again."""
    return [request(index, [*document, 900 + index], 100 * index) for index, document in enumerate((A, B, C, A))]


def test_an_evicted_prefix_comes_back_from_a_tier():
    alone, _ = serve(displaced(), make_blocks(9))
    assert alone[3].reused_tokens == 0
    tiered, row = serve(displaced(), make_policy(9, rules(100, bytes_per_us=2)))
    assert tiered[3].reused_tokens == tiered[3].loaded_tokens == 16
    assert tiered[3].loaded_bytes == {"tier0": 16}
    assert times_us(tiered[3]) == (300, 309), "16 tokens take 8 us, the last token 1 us"
    assert tiered[3].critical_load_s == pytest.approx(8e-6)
    assert sum(record.lost_kv_evicted for record in tiered) == 0
    assert row.tiers[0].loaded_bytes == 16


def test_a_load_waits_for_its_latency_first():
    records, _ = serve(displaced(), make_policy(9, rules(100, bytes_per_us=2, latency_s=5e-6)))
    assert times_us(records[3]) == (300, 314)


def test_a_layerwise_load_overlaps_with_the_prefill():
    """Four layers: the longer of both, and a quarter of the shorter."""
    requests = [*displaced()[:3], request(3, [*A, *range(900, 920)], 300)]
    waiting, _ = serve(requests, make_policy(9, rules(100, bytes_per_us=2)))
    assert times_us(waiting[3])[1] == 300 + 8 + 20
    following, _ = serve(requests, make_policy(9, rules(100, bytes_per_us=2, load="layerwise")))
    assert times_us(following[3])[1] == 300 + 20 + 8 / 4
    assert following[3].critical_load_s == pytest.approx(2e-6)


def test_slow_tiers_give_more_hits_and_later_tokens():
    """Every load is slower than computing: hits rise and so does TTFT; the break-even rule computes instead."""
    slow = rules(1000, bytes_per_us=0.5)
    requests = [
        request(index, [*range(100 * (index % 6), 100 * (index % 6) + 40), 5000 + index], 60 * index)
        for index in range(60)
    ]
    results = {}
    for name, policy in {
        "alone": make_blocks(30),
        "always": make_policy(30, slow),
        "break_even": make_policy(30, slow, always=False),
    }.items():
        records, _ = serve(requests, policy)
        hits = sum(record.reused_tokens for record in records) / sum(record.prompt_tokens for record in records)
        results[name] = hits, float(np.mean([record.first_token_s - record.arrived_s for record in records]))
    assert results["always"][0] > 0.8 > results["alone"][0]
    assert results["always"][1] > 1.5 * results["alone"][1], "more hits, and yet a worse TTFT"
    assert results["break_even"] == results["alone"]


def test_break_even_loads_what_is_faster_to_load():
    records, _ = serve(displaced(), make_policy(9, rules(100, bytes_per_us=2), always=False))
    assert (records[3].loaded_tokens, records[3].declined_tokens) == (16, 0)
    records, _ = serve(displaced(), make_policy(9, rules(100, bytes_per_us=0.5), always=False))
    assert (records[3].loaded_tokens, records[3].declined_tokens) == (0, 16)
    assert records[3].lost_kv_evicted == 16


def test_break_even_counts_transfers_in_flight():
    """Alone, 16 tokens load in 10 us and not in 16; beside another load it would be 20."""
    requests = [*displaced()[:3], request(3, [*A, 903], 300), request(4, [*B, 904], 301)]
    records, _ = serve(requests, make_policy(20, rules(100, bytes_per_us=1.6), always=False))
    assert [record.loaded_tokens for record in records[3:]] == [0, 0], "20 blocks still hold both"
    records, _ = serve(requests, make_policy(9, rules(100, bytes_per_us=1.6), always=False))
    assert [record.loaded_tokens for record in records[3:]] == [16, 0]


def test_others_run_while_a_request_loads():
    requests = [*displaced()[:3], request(3, [*A, 903], 300), request(4, range(700, 704), 301)]
    records, _ = serve(requests, make_policy(9, rules(100, bytes_per_us=0.2)))
    assert times_us(records[4]) == (301, 305)
    assert times_us(records[3]) == (300, 401), "the other's block is written meanwhile: four bytes more on the link"


def test_two_requests_wait_for_one_load():
    requests = [*displaced()[:3], request(3, [*A, 903], 300), request(4, [*A, 904], 310)]
    records, row = serve(requests, make_policy(9, rules(100, bytes_per_us=0.2)))
    assert [record.reused_tokens for record in records[3:]] == [16, 16]
    assert row.tiers[0].loaded_bytes == 16
    assert times_us(records[4]) == (310, 382), "both run in one step once the blocks are there"


def test_memory_is_reserved_while_a_load_is_under_way():
    """A prompt of eight blocks does not fit beside four blocks that are still coming."""
    requests = [*displaced()[:3], request(3, [*A, 903], 300), request(4, range(700, 732), 301)]
    records, _ = serve(requests, make_policy(9, rules(100, bytes_per_us=0.2)))
    assert times_us(records[4])[0] == 381


def test_second_use_writes_and_first_does_not():
    once, row = serve(displaced(), make_policy(9, rules(100, write="second_hit")))
    assert once[3].loaded_tokens == row.tiers[0].written_bytes == 0
    requests = apart([request(index, [*document, 900 + index]) for index, document in enumerate((A, A, B, C, A))], 100)
    twice, row = serve(requests, make_policy(9, rules(100, write="second_hit")))
    assert twice[4].loaded_tokens == row.tiers[0].written_bytes == 16


def test_demoted_blocks_load_from_the_next_tier():
    tiers = rules(5, action="demote", write="back"), rules(100, bytes_per_us=4, write="back")
    records, row = serve(displaced(), make_policy(6, *tiers))
    assert records[3].loaded_tokens == 16
    assert records[3].loaded_bytes["tier1"] > 0
    assert row.tiers[0].demoted_blocks > 0


def test_quantised_blocks_are_smaller_and_load_sooner():
    requests = [request(index, [*document, 900 + index], 100 * index) for index, document in enumerate((A, B, C, A))]
    tier = {"action": "quantise", "quantise_to": "int4", "low": 0.5}
    records, row = serve(requests, make_policy(5, rules(8, bytes_per_us=1, **tier)))
    assert records[3].loaded_tokens == 16
    assert records[3].loaded_bytes["tier0"] == 4, "a byte for a block of four"
    assert row.tiers[0].small_loaded_blocks == 4


def test_states_of_hybrids_are_loaded_with_their_prefix():
    records, row = serve(displaced(), make_policy(12, rules(100, bytes_per_us=2), states="align"))
    assert records[3].reused_tokens == 16
    assert row.tiers[0].loaded_blocks == 5, "four blocks of KV and the last state"


def test_an_empty_tier_changes_nothing():
    """A link that never brings a block in time: the same schedule as without tiers."""
    requests = [
        request(index, [*range(100 * (index % 5), 100 * (index % 5) + 30), index], 13 * index, 1 + index % 7)
        for index in range(40)
    ]
    alone, _ = serve(requests, make_blocks(24))
    tiered, _ = serve(requests, make_policy(24, rules(1000, bytes_per_us=1e-9)))
    for record, other in zip(alone, tiered, strict=True):
        assert times_us(record) == times_us(other)
        assert record.reused_tokens == other.reused_tokens


def test_matching_changes_nothing():
    policy = make_policy(9, rules(100, bytes_per_us=2), always=False)
    serve(displaced()[:3], policy)
    policy.start_step(300_000)
    again = request(9, [*A, 909])
    policy.match(again, 300_000)  # which keeps the digests of a request that waits
    before = repr(snapshot(policy))
    resumes = {policy.match(again, 300_000).resume for _ in range(3)}
    assert resumes == {16}
    assert repr(snapshot(policy)) == before


def snapshot(value, seen=frozenset()):
    """All that an object holds, as plain values."""
    if id(value) in seen or isinstance(value, (int, float, str, bytes, type(None))) or callable(value):
        return value if not callable(value) else None
    seen |= {id(value)}
    if isinstance(value, dict):
        return [(snapshot(key, seen), snapshot(member, seen)) for key, member in value.items()]
    if isinstance(value, (list, tuple, set)):
        return [snapshot(member, seen) for member in value]
    names = [*getattr(value, "__dict__", ()), *getattr(type(value), "__slots__", ())]
    return [(name, snapshot(getattr(value, name), seen)) for name in names]


def prompts(draw_from):
    """Prompts that share beginnings: paths in a tree of blocks."""
    return st.lists(
        st.lists(st.integers(0, draw_from), min_size=1, max_size=6).map(
            lambda path: [SIZE * step + token for step in path for token in range(SIZE)]
        ),
        min_size=2,
        max_size=25,
    )


@given(asked=prompts(2), device=st.integers(9, 14), below=st.integers(0, 12))
@settings(max_examples=120, deadline=None)
def test_an_instant_exclusive_tier_is_more_memory(asked, device, below):
    """With one request at a time, a tier with instant transfers equals a larger device."""
    own = [request(at, [*tokens, 100 + at]) for at, tokens in enumerate(asked)]  # so that none is stored twice
    waves = apart(own, 1000)
    larger, _ = serve(waves, make_blocks(device + below), ONE_AT_A_TIME)
    tiered, _ = serve(waves, make_policy(device, rules(max(below, 1e-9), write="back")), ONE_AT_A_TIME)
    assert [one.reused_tokens for one in tiered] == [one.reused_tokens for one in larger]


tier_rules = st.builds(
    lambda blocks, rate, high, low, write, load, action, latency: rules(
        blocks,
        rate,
        write=write,
        load=load,
        high=high,
        low=low * high,
        action=action,
        quantise_to="fp8" if action == "quantise" else None,
        latency_s=latency,
    ),
    blocks=st.integers(1, 20),
    rate=st.sampled_from([0.1, 1.0, 10.0, math.inf]),
    high=st.sampled_from([0.5, 0.9, 1.0]),
    low=st.sampled_from([0.0, 0.7, 1.0]),
    write=st.sampled_from(["through", "back", "second_hit"]),
    load=st.sampled_from(["blocking", "layerwise"]),
    action=st.sampled_from(["evict", "quantise"]),
    latency=st.sampled_from([0.0, 3e-6]),
)


@given(
    asked=prompts(3),
    outputs=st.lists(st.integers(1, 12), min_size=25, max_size=25),
    gap=st.sampled_from([0, 4, 30]),
    tiers=st.lists(tier_rules, min_size=1, max_size=3),
    always=st.booleans(),
    states=st.sampled_from(["none", "align"]),
)
@settings(max_examples=80, deadline=None)
def test_random_runs_lose_no_token_and_no_byte(asked, outputs, gap, tiers, always, states):
    for upper, lower in pairwise(tiers):
        if lower.write == "back":
            upper.action, upper.quantise_to = "demote", None
    policy = make_policy(16, *tiers, always=always, states=states)
    waves = apart([request(at, tokens, 0, outputs[at]) for at, tokens in enumerate(asked)], gap)
    records, row = serve(waves, policy, BatchRules(max_num_seqs=4, max_num_batched_tokens=16))
    assert len(records) == len(asked)
    for one in records:
        lost = sum(getattr(one, name) for name in one.__dataclass_fields__ if name.startswith("lost_"))
        assert one.reused_tokens + lost == one.prompt_tokens
        assert one.arrived_s <= one.admitted_s <= one.first_token_s <= one.finished_s
        assert one.critical_load_s <= one.first_token_s - one.admitted_s or one.preemptions
    for at, tier in enumerate(row.tiers):
        assert tier.loaded_bytes == sum(one.loaded_bytes[f"tier{at}"] for one in records)
        assert tier.resident_peak_bytes <= tier.capacity_bytes
