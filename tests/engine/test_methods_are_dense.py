"""Every arm of conf/arms/methods.yaml against dense forwards, behind a prompt that left its documents elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from spanlab.core.request import Request
from spanlab.core.spans import SpanSettings
from spanlab.engine.model import SpanModel
from spanlab.engine.oracle import block_mask, causal_mask

from . import factories
from .factories import APART, HEAD, arm, ask, document, make_small, run, study_of, text
from .oracles import all_ids, apart, blended, dense, found_in, most_read, overlapped, places, segments_of
from .plain import Bank, Plain, Recompute

ARMS = sorted(study_of(make_small()).arms)


@pytest.fixture(autouse=True)
def small_vocabulary(monkeypatch):
    """Tokens that every model here knows."""
    whole = factories.words
    monkeypatch.setattr(factories, "words", lambda name, length, vocab=105: whole(name, length, 105))


def requests() -> list[Request]:
    """One that stores three documents, and one that finds them in another order, with text between two of them."""
    first = ask(0, text(HEAD, 11), document(0, 32), document(1, 16), document(2, 48), text(4, 7))
    spans = text(HEAD, 11), document(2, 48), document(0, 32), text(6, 5), document(1, 16), text(5, 8)
    return [first, ask(1, *spans, output=3, at=APART)]


def moved(model: SpanModel, donor: Request, request: Request, ids: Tensor, seen: bool) -> tuple[Bank, Tensor]:
    """Keys and values of a prompt, its documents as the donor has them, and the positions where they stood."""
    plain, theirs = Plain(model), all_ids(donor, [0])
    mask = causal_mask(len(theirs)) if seen else block_mask(segments_of(donor, len(theirs)))
    given = plain.bank(theirs, mask, torch.arange(len(theirs)))
    bank = plain.bank(ids, causal_mask(len(ids)), torch.arange(len(ids)))
    stands, there = torch.arange(len(ids)), starts_of(donor)
    for tokens, place in starts_of(request).items():
        new, old = (slice(at, at + len(tokens) // 4) for at in (place, there[tokens]))
        stands[new] = torch.arange(old.start, old.stop)
        for mine, other in zip(bank, given, strict=True):
            for layer in range(model.layers):
                mine[layer][new] = other[layer][old]
    return bank, stands


def starts_of(request: Request) -> dict[bytes, int]:
    """Where each document stands, by its tokens."""
    starts = np.cumsum([0, *(len(span.tokens) for span in request.spans)]).tolist()
    return {s.tokens.tobytes(): at for s, at in zip(request.spans, starts, strict=False) if s.independent}


def expected(model: SpanModel, spans: SpanSettings | None, output: list[int]) -> Tensor:
    """Logits [output, V] of the second request."""
    donor, request = requests()
    if spans is None:
        return dense(model, request, output, blocks=False)
    if spans.positions == "overlapping":
        return overlapped(model, request, output, spans.temperature, spans.scale)
    repair, ids = spans.repair.of_model(model.layers), all_ids(request, output)
    bank, stands = moved(model, donor, request, ids, spans.provenance == "as_seen")
    if repair.rewrites:
        return blended(model, request, output, repair, bank)
    segments = segments_of(request, len(ids))
    found = found_in(segments)
    again = most_read(model, request, repair) if repair.probes else repair.rows(found, 1) if repair.count(found) else []
    rows = {*again, *places(s for s in segments[1:] if not s.independent).tolist()}
    stands = stands if spans.positions == "original" else torch.arange(len(ids))
    return Recompute(Plain(model), ids, bank, stands=stands).run(torch.tensor(sorted(rows)))[-len(output) :]


def assert_is_dense(model: SpanModel, name: str, block_size: int) -> None:
    done = run(model, arm(name, None if name.startswith("block_hash") else block_size), requests())
    truth = expected(model, arm(name).spans, done.engine.outputs[1])
    assert apart(done.of(requests()[1]), truth) < 1e-5


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("name", ARMS)
def test_random_weights(name, block_size):
    assert_is_dense(make_small(layers=6), name, block_size)


@pytest.mark.parametrize("name", ARMS)
def test_trained_weights(stories, name):
    assert_is_dense(stories, name, 1)
