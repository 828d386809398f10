"""What questions read of documents that were encoded apart, against forwards without any cache."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from spanlab.engine.affine import exact, scalar
from spanlab.probe.memory import ask, encode_apart, read_through, recorded_maps
from spanlab.probe.model import mixers

Asked = tuple[Tensor, Tensor]


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, atol=2e-4, rtol=1e-4)


@torch.no_grad()
def test_one_document_apart_equals_full_view(model: PreTrainedModel, asked: Asked):
    documents, questions = asked[0][:, :1], asked[1]
    apart = ask(model, encode_apart(model, documents).assembled(exact), questions)
    close(apart, read_through(model, documents, questions))


@torch.no_grad()
def test_full_view_equals_plain_forward(model: PreTrainedModel, asked: Asked):
    documents, questions = asked
    plain = model(torch.cat([documents.flatten(1), questions], dim=1)).logits
    close(read_through(model, documents, questions), plain[:, documents[0].numel() + 1 :: 2])


@torch.no_grad()
def test_spans_equal_blocks_where_nothing_recurs(model: PreTrainedModel, asked: Asked):
    for mixer in mixers(model):
        mixer.out_proj.weight.zero_()
    apart = ask(model, encode_apart(model, asked[0]).assembled(exact), asked[1])
    close(apart, read_through(model, *asked, "blocks"))
    assert not torch.allclose(apart, read_through(model, *asked), atol=1e-3)


@torch.no_grad()
def test_composed_state_equals_running_through(model: PreTrainedModel, asked: Asked):
    """In the first layer, where inputs do not depend on other documents once the convolution reads one token."""
    first = mixers(model)[0]
    first.conv1d.weight[..., :-1] = 0
    through = encode_apart(model, asked[0].flatten(1)[:, None]).assembled(exact)
    composed = encode_apart(model, asked[0]).assembled(exact)
    close(composed.recurrent[first.layer_idx], through.recurrent[first.layer_idx])


@torch.no_grad()
def test_forms_of_the_transition_change_answers(model: PreTrainedModel, asked: Asked):
    spans = encode_apart(model, asked[0])
    logits = ask(model, spans.assembled(exact), asked[1])
    forgotten = ask(model, spans.assembled(lambda span: scalar(span.decay, 16)), asked[1])
    assert not torch.allclose(logits, forgotten, atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("part", ["kv", "state"])
def test_questions_read_both_kv_and_state(model: PreTrainedModel, asked: Asked, part: str):
    memory = encode_apart(model, asked[0]).assembled(exact)
    less = memory.without_kv() if part == "kv" else memory.without_state()
    assert not torch.allclose(ask(model, memory, asked[1]), ask(model, less, asked[1]), atol=1e-3)


@torch.no_grad()
def test_first_state_leaves_one_layer(model: PreTrainedModel, asked: Asked):
    memory = encode_apart(model, asked[0]).assembled(exact)
    first = memory.with_first_state()
    assert list(first.recurrent) == list(first.conv) == [0]
    assert torch.equal(first.recurrent[0], memory.recurrent[0])
    assert not torch.allclose(ask(model, memory, asked[1]), ask(model, first, asked[1]), atol=1e-3)


@torch.no_grad()
def test_nothing_is_left_without_kv_and_state(model: PreTrainedModel, asked: Asked):
    """Answers then do not depend on documents."""
    documents, questions = asked
    bare = [encode_apart(model, ids).whole.without_kv().without_state() for ids in (documents, documents.flip(0))]
    assert torch.equal(ask(model, bare[0], questions), ask(model, bare[1], questions))


@torch.no_grad()
def test_hidden_documents_are_not_attended(model: PreTrainedModel, asked: Asked):
    for mixer in mixers(model):
        mixer.out_proj.weight.zero_()
    documents, questions = asked
    hidden = read_through(model, documents, questions, "no_kv")
    assert torch.equal(hidden, read_through(model, documents.flip(0), questions, "no_kv"))
    assert not torch.equal(hidden, read_through(model, documents, questions))


def test_gradients_pass_through_composed_states(model: PreTrainedModel, asked: Asked):
    """They equal those of a forward without a cache, where one document stands for all."""
    documents, questions = asked[0][:, :1], asked[1]
    weight = mixers(model)[0].in_proj_b.weight
    grads = []
    for logits in (
        ask(model, encode_apart(model, documents).assembled(exact), questions),
        read_through(model, documents, questions),
    ):
        (grad,) = torch.autograd.grad(logits.log_softmax(-1)[..., 5].sum(), weight)
        grads.append(grad)
    torch.testing.assert_close(grads[0], grads[1], atol=1e-3, rtol=1e-3)
    assert grads[0].abs().max() > 1e-3


def test_recording_leaves_the_scan_as_it_was(model: PreTrainedModel, asked: Asked):
    before = model(asked[0][:, 0]).logits
    with recorded_maps(model) as maps:
        during = model(asked[0][:, 0]).logits
    assert len(maps) == len(mixers(model))
    close(before, during)
    assert torch.equal(before, model(asked[0][:, 0]).logits)
    assert len(maps) == len(mixers(model))
