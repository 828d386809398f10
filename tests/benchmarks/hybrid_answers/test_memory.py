"""Memory of documents that were encoded apart, compared with forwards without a cache."""

import pytest
import torch
from probe_model import encode_apart, forward_logits, mixers, question_logits, recorded_maps
from transformers import PreTrainedModel

from spanlab.engine.maps import exact, scalar

from .conftest import Case, close


@torch.no_grad()
def test_one_document_apart_equals_full_view(model: PreTrainedModel, case: Case):
    documents, questions = case[0][:, :1], case[1]
    apart = question_logits(model, encode_apart(model, documents).assembled(exact), questions)
    close(apart, forward_logits(model, documents, questions))


@torch.no_grad()
def test_full_view_equals_plain_forward(model: PreTrainedModel, case: Case):
    documents, questions = case
    plain = model(torch.cat([documents.flatten(1), questions], dim=1)).logits
    close(forward_logits(model, documents, questions), plain[:, documents[0].numel() + 1 :: 2])


@torch.no_grad()
def test_spans_equal_blocks_where_nothing_recurs(model: PreTrainedModel, case: Case):
    for mixer in mixers(model):
        mixer.out_proj.weight.zero_()
    apart = question_logits(model, encode_apart(model, case[0]).assembled(exact), case[1])
    close(apart, forward_logits(model, *case, "blocks"))
    assert not torch.allclose(apart, forward_logits(model, *case), atol=1e-3)


@torch.no_grad()
def test_composed_state_equals_running_through(model: PreTrainedModel, case: Case):
    """In the first layer, inputs do not depend on other documents if the convolution reads one token."""
    first = mixers(model)[0]
    first.conv1d.weight[..., :-1] = 0
    through = encode_apart(model, case[0].flatten(1)[:, None]).assembled(exact)
    composed = encode_apart(model, case[0]).assembled(exact)
    close(composed.recurrent[first.layer_idx], through.recurrent[first.layer_idx])


@torch.no_grad()
def test_forms_of_the_transition_change_answers(model: PreTrainedModel, case: Case):
    spans = encode_apart(model, case[0])
    logits = question_logits(model, spans.assembled(exact), case[1])
    forgotten = question_logits(model, spans.assembled(lambda span: scalar(span.decay, 16)), case[1])
    assert not torch.allclose(logits, forgotten, atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("removed", ["kv", "state"])
def test_questions_read_both_kv_and_state(model: PreTrainedModel, case: Case, removed: str):
    memory = encode_apart(model, case[0]).assembled(exact)
    reduced = memory.without_kv() if removed == "kv" else memory.without_state()
    assert not torch.allclose(
        question_logits(model, memory, case[1]), question_logits(model, reduced, case[1]), atol=1e-3
    )


@torch.no_grad()
def test_first_state_leaves_one_layer(model: PreTrainedModel, case: Case):
    memory = encode_apart(model, case[0]).assembled(exact)
    first = memory.with_first_state()
    assert list(first.recurrent) == list(first.conv) == [0]
    assert torch.equal(first.recurrent[0], memory.recurrent[0])
    assert not torch.allclose(
        question_logits(model, memory, case[1]), question_logits(model, first, case[1]), atol=1e-3
    )


@torch.no_grad()
def test_nothing_is_left_without_kv_and_state(model: PreTrainedModel, case: Case):
    """Answers then do not depend on documents."""
    documents, questions = case
    bare = [encode_apart(model, ids).base.without_kv().without_state() for ids in (documents, documents.flip(0))]
    assert torch.equal(question_logits(model, bare[0], questions), question_logits(model, bare[1], questions))


@torch.no_grad()
def test_hidden_documents_are_not_attended(model: PreTrainedModel, case: Case):
    for mixer in mixers(model):
        mixer.out_proj.weight.zero_()
    documents, questions = case
    hidden = forward_logits(model, documents, questions, "no_kv")
    assert torch.equal(hidden, forward_logits(model, documents.flip(0), questions, "no_kv"))
    assert not torch.equal(hidden, forward_logits(model, documents, questions))


def test_gradients_pass_through_composed_states(model: PreTrainedModel, case: Case):
    """Gradients equal those of a forward without a cache, for one document."""
    documents, questions = case[0][:, :1], case[1]
    weight = mixers(model)[0].in_proj_b.weight
    grads = []
    for logits in (
        question_logits(model, encode_apart(model, documents).assembled(exact), questions),
        forward_logits(model, documents, questions),
    ):
        (grad,) = torch.autograd.grad(logits.log_softmax(-1)[..., 5].sum(), weight)
        grads.append(grad)
    torch.testing.assert_close(grads[0], grads[1], atol=1e-3, rtol=1e-3)
    assert grads[0].abs().max() > 1e-3


def test_recording_leaves_the_scan_as_it_was(model: PreTrainedModel, case: Case):
    before = model(case[0][:, 0]).logits
    with recorded_maps(model) as maps:
        during = model(case[0][:, 0]).logits
    assert len(maps) == len(mixers(model))
    close(before, during)
    assert torch.equal(before, model(case[0][:, 0]).logits)
    assert len(maps) == len(mixers(model))
