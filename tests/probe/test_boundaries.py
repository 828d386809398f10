"""How documents begin that are encoded apart: a halo and a separator lose nothing, and a repair is the full view."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from spanlab.engine.affine import exact
from spanlab.probe.boundaries import encode_with_halo, read_repaired, separated
from spanlab.probe.memory import ask, encode_apart, read_through
from spanlab.probe.model import mixers
from spanlab.probe.state_errors import state_errors
from spanlab.settings.probe import HybridAnswers, NormSettings

from .conftest import TASK

Asked = tuple[Tensor, Tensor]


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, atol=2e-4, rtol=1e-4)


@torch.no_grad()
def test_all_tokens_but_the_last_computed_again_are_the_full_view_but_for_that(model: PreTrainedModel, asked: Asked):
    """A single document has nothing before it: however much is computed again, it is the full view."""
    one = asked[0][:, :1]
    for tokens in (1, 6, 12):
        close(ask(model, read_repaired(model, one, tokens, exact), asked[1]), read_through(model, one, asked[1]))


@torch.no_grad()
def test_a_repair_sees_all_before_it_in_both_kinds_of_layers(model: PreTrainedModel, asked: Asked):
    """Keys, values and states of the second document's first tokens are those of the full view."""
    documents = asked[0][:, :2]
    repaired = read_repaired(model, documents, 5, exact)
    full = encode_apart(model, documents.flatten(1)[:, None, :18]).assembled(exact)  # up to there it is no other
    for layer, rows in full.kv.items():
        for own, whole in zip(repaired.kv[layer], rows, strict=True):
            close(own[:, :, 13:18], whole[:, :, 13:18])
    more = [ask(model, read_repaired(model, documents, tokens, exact), asked[1]) for tokens in (1, 5, 12)]
    off = [float((one - read_through(model, documents, asked[1])).abs().mean()) for one in more]
    assert off[2] < off[0]


@torch.no_grad()
def test_a_repair_of_no_consequence_is_plain_composition(model: PreTrainedModel, asked: Asked):
    """Where attention and convolution see one token alone, inputs depend on nothing before them."""
    for mixer in mixers(model):
        mixer.conv1d.weight[..., :-1] = 0
    first = mixers(model)[0].layer_idx
    plain = encode_apart(model, asked[0]).assembled(exact)
    repaired = read_repaired(model, asked[0], 5, exact)
    close(repaired.recurrent[first], plain.recurrent[first])


@torch.no_grad()
def test_first_layer_is_exact_behind_a_halo(model: PreTrainedModel, asked: Asked):
    """Its inputs are tokens, so that the true last ones before a document are all that was missing."""
    through = encode_apart(model, asked[0].flatten(1)[:, None]).assembled(exact)
    halo, plain = encode_with_halo(model, asked[0], 3).assembled(exact), encode_apart(model, asked[0]).assembled(exact)
    close(halo.recurrent[0], through.recurrent[0])
    assert not torch.allclose(plain.recurrent[0], through.recurrent[0], atol=1e-3)
    assert halo.tokens == plain.tokens == 39
    assert {rows.shape[2] for own in halo.kv.values() for rows in own} == {39}


@pytest.mark.parametrize("halo", [1, 2])
@torch.no_grad()
def test_a_halo_shorter_than_the_convolution_is_not_enough(halo: int, model: PreTrainedModel, asked: Asked):
    through = encode_apart(model, asked[0].flatten(1)[:, None]).assembled(exact)
    short = encode_with_halo(model, asked[0], halo).assembled(exact)
    assert not torch.allclose(short.recurrent[0], through.recurrent[0], atol=1e-3)


def test_errors_of_states_by_layer(model: PreTrainedModel):
    """In the first layer a halo leaves none; a repair leaves the less, the more is computed again."""
    task = {"weights": "none", "task": TASK, "cases": [], "facts": 4, "repaired": [1, 12]}
    settings = HybridAnswers(**task, norms=NormSettings(spans=2, published=False, slow=False))
    errors = {(row.arm, row.layer): row.error for row in state_errors(model, settings, "3x13")}
    arms = ["exact", "exact, first 1 again", "exact, first 12 again", "exact, halo", "exact, separator"]
    assert list(dict.fromkeys(arm for arm, _ in errors)) == arms
    assert {layer for _, layer in errors} == {mixer.layer_idx for mixer in mixers(model)}
    assert errors["exact, halo", 0] < 1e-4 < errors["exact", 0]
    assert errors["exact, first 12 again", 0] < 1e-4 < errors["exact, first 1 again", 0]
    deepest = mixers(model)[-1].layer_idx
    assert errors["exact, first 12 again", deepest] < errors["exact, first 1 again", deepest]


@torch.no_grad()
def test_one_document_behind_a_separator_is_the_full_view_of_both(model: PreTrainedModel, asked: Asked):
    documents = separated(asked[0][:, :1], 3)
    assert documents.shape[2] == 16
    close(
        ask(model, encode_apart(model, documents).assembled(exact), asked[1]), read_through(model, documents, asked[1])
    )
