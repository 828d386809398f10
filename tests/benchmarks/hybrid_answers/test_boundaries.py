"""Documents encoded apart with a halo, a separator or a repair, compared with the full view."""

import pytest
import torch
from hybrid_answers import state_errors
from probe_model import (
    encode_apart,
    encode_repaired,
    encode_with_halo,
    forward_logits,
    mixers,
    question_logits,
    with_separators,
)
from probe_settings import HybridAnswers, NormSettings
from transformers import PreTrainedModel

from spanlab.engine.maps import exact

from .conftest import TASK, Case, close


@torch.no_grad()
def test_a_repair_of_one_document_is_the_full_view(model: PreTrainedModel, case: Case):
    """A single document has no context before it, so that any repair equals the full view."""
    document = case[0][:, :1]
    for tokens in (1, 6, 12):
        close(
            question_logits(model, encode_repaired(model, document, tokens, exact), case[1]),
            forward_logits(model, document, case[1]),
        )


@torch.no_grad()
def test_a_repair_sees_all_before_it_in_both_kinds_of_layers(model: PreTrainedModel, case: Case):
    """Keys, values and states of the second document's first tokens are those of the full view."""
    documents = case[0][:, :2]
    repaired = encode_repaired(model, documents, 5, exact)
    full = encode_apart(model, documents.flatten(1)[:, None, :18]).assembled(
        exact
    )  # up to there, documents are the same
    for layer, rows in full.kv.items():
        for repaired_rows, full_rows in zip(repaired.kv[layer], rows, strict=True):
            close(repaired_rows[:, :, 13:18], full_rows[:, :, 13:18])
    repaired_logits = [
        question_logits(model, encode_repaired(model, documents, tokens, exact), case[1]) for tokens in (1, 5, 12)
    ]
    errors = [float((logits - forward_logits(model, documents, case[1])).abs().mean()) for logits in repaired_logits]
    assert errors[2] < errors[0]


@torch.no_grad()
def test_a_repair_of_no_consequence_is_plain_composition(model: PreTrainedModel, case: Case):
    """If convolutions see one token only, inputs of the first layer do not depend on earlier tokens."""
    for mixer in mixers(model):
        mixer.conv1d.weight[..., :-1] = 0
    first = mixers(model)[0].layer_idx
    plain = encode_apart(model, case[0]).assembled(exact)
    repaired = encode_repaired(model, case[0], 5, exact)
    close(repaired.recurrent[first], plain.recurrent[first])


@torch.no_grad()
def test_first_layer_is_exact_behind_a_halo(model: PreTrainedModel, case: Case):
    """The inputs of the first layer are tokens, so that only the last ones before a document are missing."""
    through = encode_apart(model, case[0].flatten(1)[:, None]).assembled(exact)
    halo, plain = encode_with_halo(model, case[0], 3).assembled(exact), encode_apart(model, case[0]).assembled(exact)
    close(halo.recurrent[0], through.recurrent[0])
    assert not torch.allclose(plain.recurrent[0], through.recurrent[0], atol=1e-3)
    assert halo.tokens == plain.tokens == 39
    assert {rows.shape[2] for pair in halo.kv.values() for rows in pair} == {39}


@pytest.mark.parametrize("halo", [1, 2])
@torch.no_grad()
def test_a_halo_shorter_than_the_convolution_is_not_enough(halo: int, model: PreTrainedModel, case: Case):
    through = encode_apart(model, case[0].flatten(1)[:, None]).assembled(exact)
    short = encode_with_halo(model, case[0], halo).assembled(exact)
    assert not torch.allclose(short.recurrent[0], through.recurrent[0], atol=1e-3)


def test_errors_of_states_by_layer(model: PreTrainedModel):
    """A halo has no error in the first layer; the error of a repair decreases with the recomputed tokens."""
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
def test_one_document_behind_a_separator_is_the_full_view_of_both(model: PreTrainedModel, case: Case):
    documents = with_separators(case[0][:, :1], 3)
    assert documents.shape[2] == 16
    close(
        question_logits(model, encode_apart(model, documents).assembled(exact), case[1]),
        forward_logits(model, documents, case[1]),
    )
