"""Trained weights, run through our attention, say what they were trained to say."""

from __future__ import annotations

import pytest
import torch

from spanlab.engine.load import wrap
from spanlab.engine.model import SpanModel
from spanlab.engine.oracle import causal_attend, causal_mask, dense_logits, eager_twin

from ..support.shared import MODELS
from .llama2c import read_model, read_pieces

OPENING = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "
    "One day, she saw a big, red ball."
)
LETTERS = "One day, a boy named Tim found a big box. He liked to show his friends."


def continue_greedily(model: SpanModel, ids: list[int], count: int) -> list[int]:
    """`count` more tokens, each the likeliest, everything computed anew for each of them."""
    for _ in range(count):
        rows = torch.arange(len(ids))
        logits = model.forward(torch.tensor(ids), rows, causal_attend(model), rows[-1:])
        ids = [*ids, int(logits.argmax())]
    return ids


def letters_of(text: str) -> list[int]:
    """Ids of a text for the letter model, BOS and the leading space included."""
    lines = (MODELS / "babyllama-tok105" / "tok105.vocab").read_text().splitlines()
    line_numbers = {line.split("\t")[0]: number for number, line in enumerate(lines)}
    return [1, *(line_numbers[letter] for letter in "▁" + text.replace(" ", "▁"))]


def surprise(model: SpanModel, ids: list[int]) -> float:
    """Mean negative log-likelihood of each token but the first, in nats."""
    rows = torch.arange(len(ids) - 1)
    logits = model.forward(torch.tensor(ids[:-1]), rows, causal_attend(model), rows)
    return float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:])))


def test_word_pieces_tell_the_story_they_are_known_for(stories):
    pieces = read_pieces(MODELS / "stories260K" / "tok512.bin")
    ids = continue_greedily(stories, [1], 60)
    assert "".join(pieces[number] for number in ids[1:]).strip().startswith(OPENING)


def test_letters_are_expected_as_trained(babyllama):
    assert surprise(babyllama, letters_of(LETTERS)) < 1.0


def test_letters_are_a_surprise_with_the_pairs_left_interleaved(babyllama):
    mixed = wrap("mixed", read_model(MODELS / "babyllama-tok105" / "model5000.bin", half_split=False))
    assert surprise(mixed, letters_of(LETTERS)) > surprise(babyllama, letters_of(LETTERS)) + 0.5


@pytest.mark.parametrize("name", ["stories", "babyllama"])
def test_trained_logits_equal_eager_attention(name, request):
    model = request.getfixturevalue(name)
    ids = torch.randint(3, model.vocab_size, (200,), generator=torch.Generator().manual_seed(0))
    rows = torch.arange(200)
    ours = model.forward(ids, rows, causal_attend(model), rows)
    truth = dense_logits(eager_twin(model), ids, causal_mask(200), rows)
    assert (ours - truth).norm() < 1e-5 * truth.norm()
