"""Trained weights give their trained outputs with our attention."""

import torch

from spanlab.engine.model import SpanModel
from spanlab.engine.oracle import causal_attend, causal_mask, dense_logits, eager_twin

from ..support.shared import MODELS
from .llama2c import read_pieces

OPENING = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "
    "One day, she saw a big, red ball."
)


def continue_greedily(model: SpanModel, ids: list[int], count: int) -> list[int]:
    """`count` more tokens, each the likeliest, with full recompute for each."""
    for _ in range(count):
        rows = torch.arange(len(ids))
        logits = model.forward(torch.tensor(ids), rows, causal_attend(model), rows[-1:])
        ids = [*ids, int(logits.argmax())]
    return ids


def test_word_pieces_tell_the_story_they_are_known_for(stories):
    pieces = read_pieces(MODELS / "stories260K" / "tok512.bin")
    ids = continue_greedily(stories, [1], 60)
    assert "".join(pieces[number] for number in ids[1:]).strip().startswith(OPENING)


def test_trained_logits_equal_eager_attention(stories):
    ids = torch.randint(3, stories.vocab_size, (200,), generator=torch.Generator().manual_seed(0))
    rows = torch.arange(200)
    ours = stories.forward(ids, rows, causal_attend(stories), rows)
    truth = dense_logits(eager_twin(stories), ids, causal_mask(200), rows)
    assert (ours - truth).norm() < 1e-5 * truth.norm()
