"""The model in plain transformers, as the reference of times: its tokens, its steps, and that it keeps nothing."""

import numpy as np
import pytest

from spanlab.core.admission import BatchRules
from spanlab.engine.oracle import twin_of
from spanlab.engine.plain import PlainForward

from .factories import arm, make_hybrid, make_small, questions, start
from .oracles import dense
from .test_serve import serve_by

LENGTHS = (20, 9, 33)


def served(model, requests, **options):
    """The backend after it has served requests, and their records."""
    plain, records = PlainForward(twin_of(model, "sdpa")), []
    serve_by(start(model, arm("none"), requests, **options), requests, records.append, plain)
    return plain, sorted(records, key=lambda record: record.request_id)


@pytest.mark.parametrize("make", [make_small, make_hybrid])
def test_tokens_are_those_of_a_dense_forward(make):
    model, requests = make(), questions([(0, 1), (1, 0), (2,)], LENGTHS, output=4, at=0)
    plain, _ = served(model, requests)
    for request in requests:
        output = plain.outputs[request.id]
        assert output == dense(model, request, output, blocks=False).argmax(-1).tolist()


def test_a_prompt_in_chunks_is_computed_whole_in_its_last_step():
    model, requests = make_small(), questions([(0, 1, 2)], LENGTHS, output=2)
    lengths = []
    twin = twin_of(model, "sdpa")
    twin.register_forward_pre_hook(
        lambda module, given, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    plain = PlainForward(twin)
    serve_by(start(model, arm("none"), requests, rules=BatchRules(32, 4)), requests, backend=plain)
    assert lengths == [requests[0].num_tokens, 1]


def test_every_request_pays_for_its_whole_prompt():
    model, requests = make_small(), questions([(0, 1), (0, 1)], LENGTHS)
    _, records = served(model, requests)
    assert [record.reused_tokens for record in records] == [0, 0]
    assert all(record.finished_s > record.arrived_s for record in records)


def test_the_model_keeps_its_own_attention():
    model = make_small()
    twin = twin_of(model, "sdpa")
    assert twin.config._attn_implementation == "sdpa" != model.hf.config._attn_implementation
    pairs = zip(twin.parameters(), model.hf.parameters(), strict=True)
    assert all(ours.data_ptr() == theirs.data_ptr() for ours, theirs in pairs)
    assert np.isfinite(dense(model, questions([(0,)], LENGTHS)[0], [1], blocks=False).numpy()).all()
