"""The oracle: its masks against a manual count, its spans against each span computed alone."""

import pytest
import torch

from spanlab.engine.oracle import Segment, block_mask, causal_attend, causal_mask, dense_logits, dense_run, eager_twin

HEAD, FIRST, SECOND, TAIL = Segment(0, 5), Segment(5, 12, True), Segment(12, 20, True), Segment(20, 24)
SEGMENTS = (HEAD, FIRST, SECOND, TAIL)


def make_ids(count: int = 24) -> torch.Tensor:
    """Random tokens."""
    return torch.randint(3, 2048, (count,), generator=torch.Generator().manual_seed(7))


def sees(row: int, other: int, head: int) -> bool:
    """Whether one row sees another, from the words of the definition."""
    mine = next(segment for segment in SEGMENTS if segment.start <= row < segment.stop)
    if other > row:
        return False
    return not mine.independent or other >= mine.start or other < head


@pytest.mark.parametrize("head", [0, 3, 5])
def test_block_mask_is_its_definition(head):
    mask = block_mask(SEGMENTS, head)
    assert mask.tolist() == [[sees(row, other, head) for other in range(24)] for row in range(24)]


@pytest.mark.parametrize("independent", [False, True])
def test_one_segment_is_plain_causal(independent):
    assert torch.equal(block_mask([Segment(0, 9, independent)]), causal_mask(9))


def test_segments_with_a_gap_are_noticed():
    with pytest.raises(AssertionError, match="gap or overlap"):
        block_mask([Segment(0, 5), Segment(6, 9)])


def test_a_row_that_sees_nothing_is_noticed(make_model):
    mask = causal_mask(3)
    mask[0, 0] = False
    with pytest.raises(AssertionError, match="sees nothing"):
        dense_logits(eager_twin(make_model("tiny")), make_ids(3), mask, torch.arange(3))


def test_an_independent_span_has_the_states_it_has_alone(model):
    twin, ids = eager_twin(model), make_ids()
    dense = dense_run(twin, ids, block_mask(SEGMENTS), torch.arange(24))
    for span in (FIRST, SECOND):
        here = slice(span.start, span.stop)
        positions = torch.arange(span.start, span.stop)
        alone = dense_run(twin, ids[here], causal_mask(len(positions)), positions)
        assert torch.allclose(dense.logits[here], alone.logits, atol=1e-4)
        assert torch.allclose(dense.keys[:, here], alone.keys, atol=1e-4)
        assert torch.allclose(dense.values[:, here], alone.values, atol=1e-4)


def test_a_span_after_a_head_keeps_its_states(model):
    twin, ids = eager_twin(model), make_ids()
    dense = dense_run(twin, ids, block_mask(SEGMENTS, head=5), torch.arange(24))
    rows = torch.cat([torch.arange(5), torch.arange(12, 20)])
    behind = dense_run(twin, ids[rows], causal_mask(13), rows)
    assert torch.allclose(dense.values[:, rows], behind.values, atol=1e-4)


def test_a_token_may_stand_twice_under_two_masks(make_model):
    # The second span alone, and again after all others: the repaired rows are full recompute.
    twin, ids = eager_twin(make_model("tiny")), make_ids()
    again = torch.arange(12, 20)
    rows = torch.cat([torch.arange(24), again])
    mask = torch.zeros(32, 32, dtype=torch.bool)
    mask[:24, :24] = block_mask(SEGMENTS)
    mask[5:12, :5] = True  # the first span is as in the whole text
    mask[24:, :12], mask[24:, 24:] = True, causal_mask(8)
    doubled = dense_logits(twin, ids[rows], mask, rows)
    full = dense_logits(twin, ids, causal_mask(24), torch.arange(24))
    assert torch.allclose(doubled[24:], full[12:20], atol=1e-4)
    assert not torch.allclose(doubled[12:20], full[12:20], atol=0.1)


def test_keys_and_values_are_those_that_our_attention_is_given(model):
    ids, rows, plain, recorded = make_ids(), torch.arange(24), causal_attend(model), []

    def attend(layer, query, key, value):
        recorded.append((key, value))
        return plain(layer, query, key, value)

    model.forward(ids, rows, attend, rows[:0])
    run = dense_run(eager_twin(model), ids, causal_mask(24), rows)
    assert run.keys.shape == (model.layers, 24, model.kv_heads, model.head_dim)
    assert torch.allclose(run.keys, torch.stack([key for key, _ in recorded]), atol=1e-4)
    assert torch.allclose(run.values, torch.stack([value for _, value in recorded]), atol=1e-4)


def test_the_twin_shares_the_weights_and_leaves_the_model_ours(model):
    twin = eager_twin(model)
    ours = {tensor.data_ptr() for tensor in model.hf.parameters()}
    assert {tensor.data_ptr() for tensor in twin.parameters()} == ours
    assert (twin.config._attn_implementation, model.config._attn_implementation) == ("eager", "spanlab")
    with pytest.raises(AssertionError, match="transformers' eager attention"):
        dense_logits(model.hf, make_ids(), causal_mask(24), torch.arange(24))
