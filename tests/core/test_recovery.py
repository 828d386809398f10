"""Work that a replay of a gap omits, counted by layer, and tokens that a policy then reads, keeps and reserves."""

import pytest

from spanlab.core.rules import RECOVERIES, Replay
from spanlab.model_spec import ModelSpec

from .factories import KV, at, begin, make_budget, make_policy, make_request, serve

SIZES = {
    "hidden_size": 8,
    "vocab_size": 10,
    "attention_heads": 4,
    "kv_heads": 2,
    "head_dim": 3,
    "recurrent_key_heads": 1,
    "recurrent_value_heads": 2,
    "recurrent_key_dim": 3,
    "recurrent_value_dim": 5,
    "conv_kernel": 4,
    "attention_layers": 2,
    "recurrent_layers": 6,
}
DENSE = ModelSpec("dense", intermediate_size=16, gated_attention=True, **SIZES)
EXPERTS = ModelSpec(
    "experts",
    expert_layers=8,
    experts=6,
    experts_per_token=2,
    expert_intermediate_size=5,
    shared_intermediate_size=3,
    **SIZES,
)
KINDS = "rrrarrra"  # as in Qwen3.5: every fourth layer is of attention, the last one among them


def mlp(model: ModelSpec) -> int:
    if not model.expert_layers:
        return 2 * 3 * 8 * 16
    return 2 * (8 * 6 + 2 * 3 * 8 * 5 + 3 * 8 * 3 + 8)  # router, two experts, the shared one, its gate


def recurrent(model: ModelSpec) -> int:
    """FLOPs of a token without attention and MLP blocks, per layer."""
    attention = 2 * 8 * 3 * ((2 if model.gated_attention else 1) * 4 + 2 * 2 + 4)
    remaining_flops = model.linear_flops_per_token - 2 * attention - 8 * mlp(model)
    assert remaining_flops % 6 == 0
    return remaining_flops // 6


def run_over(model: ModelSpec, attention: bool, pairs: int) -> int:
    """FLOPs of a token that sees `pairs` keys: every block up to the last recurrent one, without keys and values."""
    query_output = 2 * 8 * 3 * ((2 if model.gated_attention else 1) * 4 + 4)
    flops, last = 0, KINDS.rindex("r")
    for number, kind in enumerate(KINDS[: last + 1]):
        if kind == "r":
            flops += recurrent(model)
        elif attention:
            flops += query_output + 4 * 4 * 3 * pairs
        flops += mlp(model) if number < last else 0
    return flops


@pytest.mark.parametrize("model", [DENSE, EXPERTS], ids=lambda model: model.name)
@pytest.mark.parametrize(("kind", "attention"), [("resident_kv", True), ("tail_replay", False)])
def test_a_replay_leaves_out_blocks_one_by_one(kind, attention, model):
    replay = RECOVERIES.make(kind, {}, {}, model=model).replay
    start, stop = 7, 12
    total = model.prefill_flops(start, stop)
    needed = sum(run_over(model, attention, position + 1) for position in range(start, stop))
    assert replay.left_out(start, stop, alone=False) == (total - needed, 0)
    assert replay.exact == attention


def test_a_chunk_of_a_gap_alone_reads_less():
    token = DENSE.kv_bytes_per_token
    for kind, layers in (("resident_kv", 1), ("tail_replay", 2)):
        replay = RECOVERIES.make(kind, {}, {}, model=DENSE).replay
        assert replay.left_out(7, 12, alone=True)[1] == 12 * token * layers // 2


def test_recompute_replays_nothing():
    assert RECOVERIES.make("recompute", {}, {}, model=DENSE).replay is None


# -- in a policy ------------------------------------------------------------------------------------------------------

DOCUMENT = list(range(12))


def replaying(most: int | None = None, budget=None, placer=None, **options):
    replay = Replay(True, 3, 1, 0, most)
    return make_policy(budget, hybrid=True, placer=placer or at(4), replay=replay, **options)


def test_a_gap_is_computed_and_its_kv_is_read():
    policy = replaying()
    serve(policy, DOCUMENT, 0)
    plan, allocation = begin(policy, make_request([*DOCUMENT[:10], 70, 71]), 1)
    span_plan = plan.cache_spans[0]
    assert (plan.resume, plan.matched, span_plan.replayed, span_plan.stored) == (4, 10, 6, 10)
    assert plan.losses.state_never_placed == 6
    assert allocation.kv_bytes == 2 * KV
    assert [(work.start, work.stop) for work in allocation.work] == [(4, 12)]
    policy.free(allocation, 1)


def test_a_known_prompt_still_computes_its_last_token():
    policy = replaying(block_size=4, grid=4)
    serve(policy, DOCUMENT, 0)
    plan = policy.match(make_request(DOCUMENT), 1)
    assert (plan.resume, plan.cache_spans[0].replayed) == (4, 4)  # whole blocks within 11 tokens


@pytest.mark.parametrize(("most", "replayed"), [(5, 0), (6, 6), (None, 6)])
def test_longer_gaps_are_recomputed(most, replayed):
    policy = replaying(most)
    serve(policy, DOCUMENT, 0)
    assert policy.match(make_request([*DOCUMENT[:10], 70]), 1).cache_spans[0].replayed == replayed


def test_a_prompt_without_a_state_is_replayed_from_its_start():
    policy = replaying(placer=at())
    serve(policy, DOCUMENT, 0)
    plan = policy.match(make_request([*DOCUMENT, 70]), 1)
    assert (plan.resume, plan.cache_spans[0].replayed) == (0, 12)


@pytest.mark.parametrize("chunks", [[15], [6, 9, 13, 15], [10, 15]])
def test_states_in_a_gap_are_kept(chunks):
    policy = replaying(placer=at(4))
    serve(policy, DOCUMENT, 0)
    policy.placer = at(6, 10, 14)
    request = make_request([*DOCUMENT, 70, 71, 72])
    _, allocation = begin(policy, request, 1)
    assert allocation.captures == [6, 10, 14]
    for stop in chunks:
        policy.insert(allocation, stop, 1)
        policy.check()
    policy.free(allocation, 1)
    assert policy.checkpoints(request) == [4, 6, 10, 14]
    assert policy.store.tree.num_tokens == 15
    assert policy.store.kv_reserved == policy.store.state_reserved == 0


@pytest.mark.parametrize(("replay", "fits"), [(Replay(True, 3, 1, 0), True), (None, False)])
def test_a_replay_needs_no_second_copy_of_the_gap(replay, fits):
    """A document of 12 tokens, one more behind it, and 10 more behind the first 10: 23 tokens where no gap is twice."""
    policy = make_policy(make_budget(tokens=23), hybrid=True, placer=at(4), replay=replay)
    serve(policy, DOCUMENT, 0)
    begin(policy, make_request([*DOCUMENT, 1]), 1)
    other = policy.match(make_request([*DOCUMENT[:10], *range(70, 80)]), 1)
    assert (policy.allocate(other, 1) is not None) == fits
    policy.check()
