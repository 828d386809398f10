"""Every arm of conf/arms/methods.yaml against dense forwards, behind a prompt that left its documents elsewhere."""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from spanlab.core.repair import SpanSettings
from spanlab.core.request import Request, Span
from spanlab.engine.load import wrap
from spanlab.engine.model import SpanModel
from spanlab.engine.oracle import block_mask, causal_mask

from ..support.products import in_turn
from . import factories
from .factories import (
    APART,
    HEAD,
    KERNELS,
    arm,
    document,
    make_request,
    make_small,
    permutations,
    questions,
    run,
    study_of,
    text,
)
from .oracles import all_ids, apart, blended, dense, divergence, found_in, most_read, overlapped, places, segments_of
from .plain import Bank, Plain, Recompute

ARMS = sorted(study_of(make_small()).arms)


#: In the environment: a folder with a trained Llama and its tokenizer.
TRAINED = "SPANLAB_TRAINED_MODEL"


@pytest.fixture(autouse=True)
def small_vocabulary(monkeypatch):
    """Token ids in the vocabulary of every model here."""
    whole = factories.random_tokens
    monkeypatch.setattr(factories, "random_tokens", lambda name, length, vocab=105: whole(name, length, 105))


def requests() -> list[Request]:
    """One that stores three documents, and one that finds them in another order, with text between two of them."""
    first = make_request(0, text(HEAD, 11), document(0, 32), document(1, 16), document(2, 48), text(4, 7))
    spans = text(HEAD, 11), document(2, 48), document(0, 32), text(6, 5), document(1, 16), text(5, 8)
    return [first, make_request(1, *spans, output=3, at=APART)]


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
    """Start of each document in the prompt, by its tokens."""
    starts = np.cumsum([0, *(len(span.tokens) for span in request.spans)]).tolist()
    return {s.tokens.tobytes(): at for s, at in zip(request.spans, starts, strict=False) if s.independent}


def expected(
    model: SpanModel, spans: SpanSettings | None, donor: Request, request: Request, output: list[int]
) -> Tensor:
    """Logits [output, V] of a request behind its donor."""
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


def assert_is_dense(model: SpanModel, name: str, block_size: int, **spans: object) -> None:
    strategy = arm(name, None if name.startswith("block_hash") else block_size, **spans)
    result = run(model, strategy, requests())
    truth = expected(model, strategy.spans, *requests(), result.engine.outputs[1])
    assert apart(result.of(requests()[1]), truth) < 1e-5


@pytest.mark.parametrize(("name", "block_size"), in_turn(ARMS, (1, 16)))
def test_random_weights(name, block_size):
    assert_is_dense(make_small(layers=6), name, block_size)


def test_raw_keys_of_documents_as_seen():
    assert_is_dense(make_small(layers=6), "as_seen", 1, **KERNELS["rotate_keys"])


@pytest.mark.parametrize("name", ARMS)
def test_trained_weights(stories, name):
    assert_is_dense(stories, name, 1)


def test_old_positions_are_worse_and_repair_is_better_than_plain_reuse(stories):
    shuffled, loss = questions(permutations(3), (20, 7, 33)), {}
    for name in ("pic", "old_positions", "lego_link_16", "cache_blend_15"):
        result = run(stories, arm(name), shuffled)
        divergences = [divergence(dense(stories, r, [0], blocks=False), result.of(r)) for r in shuffled[1:]]
        loss[name] = sum(divergences) / len(divergences)
    assert loss["old_positions"] > loss["pic"] > loss["lego_link_16"] > 0
    assert loss["pic"] > loss["cache_blend_15"]


# -- gold answers of a trained model ----------------------------------------------------------------------------------

HEAD_TEXT = "<|im_start|>user\nAnswer from the passages.\n\n"
PASSAGES = (
    "The mill at Orrin was built in 1911 by two sisters. They sold it to the town after the flood of 1936.\n\n",
    "Its wheel came from a shipyard in Belfast. The miller, Hanna Voss, had it painted green every spring.\n\n",
    "When Hanna left for the coast, her nephew Piet took over. He kept bees behind the mill and sold the honey.\n\n",
)
QUESTION = "Which colour did the wheel have?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def trained() -> tuple[SpanModel, list[Request]]:
    """A trained model, and two requests over the same passages in another order, the second with its gold answer."""
    folder = os.environ.get(TRAINED)
    if not folder:
        pytest.skip(f"needs {TRAINED}")
    encode = AutoTokenizer.from_pretrained(folder)

    def span(words: str, independent: bool = False) -> Span:
        return Span(np.array(encode(words, add_special_tokens=False).input_ids, np.int32), independent=independent)

    passages = [span(words, independent=True) for words in PASSAGES]
    gold = span("The wheel was painted green every spring.").tokens
    donor = make_request(0, span(HEAD_TEXT), *passages, span("Who built the mill?"))
    asked = make_request(
        1, span(HEAD_TEXT), passages[2], passages[0], passages[1], span(QUESTION), output=len(gold), at=APART
    )
    model = wrap("trained", AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    return model, [donor, replace(asked, output=gold)]


def loss(logits: Tensor, gold: np.ndarray) -> float:
    """Mean negative log-likelihood of a gold answer."""
    return float(torch.nn.functional.cross_entropy(logits.double(), torch.from_numpy(gold.astype(np.int64))))


@pytest.mark.slow
@pytest.mark.parametrize("name", ARMS)
def test_gold_loss_of_a_trained_model(trained, name):
    model, given = trained
    gold = given[1].output
    result = run(model, arm(name), given)
    truth = expected(model, arm(name).spans, *given, gold.tolist())
    assert arm(name).spans is None or result.records[1].reused_tokens > 0
    assert abs(loss(result.of(given[1]), gold) - loss(truth, gold)) < 1e-3
    assert apart(result.of(given[1]), truth) < 1e-4
