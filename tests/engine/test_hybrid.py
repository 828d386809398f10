"""A hybrid resumes from stored states with the results of a full computation, for any chunks, packing and eviction."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

from spanlab.core.admission import BatchRules
from spanlab.core.request import Request, Span
from spanlab.engine.load import load_model, named_config
from spanlab.engine.model import spec_of
from spanlab.engine.oracle import causal_attend
from spanlab.engine.recurrent import Recurrence, StateScan
from spanlab.engine.settings import EngineSettings
from spanlab.engine.slots import StatePool
from spanlab.model_files import find_spec

from ..support.products import in_turn
from .factories import (
    APART,
    Run,
    checkpoint,
    least_budget,
    make_hybrid,
    make_request,
    nothing_leaks,
    random_tokens,
    run,
    start,
    text,
)
from .oracles import apart, dense

GRID = 64
KINDS = ("qwen3_5_text", "qwen3_next")
LENGTH = 5 * GRID + 23


def fork(id: int, depth: int, tail: int = 9, output: int = 1, at: int | None = None) -> Request:
    """The first `depth` tokens of one long text, then another question."""
    spans = (Span(random_tokens(1, 2 * LENGTH)[:depth]), text(-100 - id, tail))
    return make_request(id, *spans, output=output, at=id * APART if at is None else at)


def forward_in_pieces(model, ids: Tensor, cuts: Sequence[int], fill=None) -> tuple[Tensor, StatePool, int]:
    """Logits of all rows, with the state put down and taken up at each cut; `fill` sets the state to begin with."""
    pool = StatePool(model.state_shape, model.dtype, "cpu")
    slot = pool.allocate()
    if fill is not None:
        fill(pool, slot)
    edges = [0, *cuts, len(ids)]
    pieces = [StateScan(a, b, slot, a) for a, b in pairwise(edges) if a < b]
    rows, recurrence = torch.arange(len(ids)), Recurrence(pool, [pieces], model.device)
    logits = model.forward(ids, rows, causal_attend(model), rows, recur=recurrence.run)
    recurrence.finish()
    return logits, pool, slot


def random_state(pool: StatePool, slot: int) -> None:
    """A state that no prefix of zeros could leave."""
    generator = torch.Generator().manual_seed(5)
    for layer in range(pool.shape.layers):
        pool.recurrent(layer, slot).copy_(torch.randn(pool.recurrent(layer, slot).shape, generator=generator))
        pool.conv(layer, slot).copy_(torch.randn(pool.conv(layer, slot).shape, generator=generator))


def off(result: Run, *requests: Request) -> float:
    """Difference between a run's logits and dense forwards of prompts and outputs, as a share of the largest logit."""
    model, outputs = result.engine.model, result.engine.outputs
    return max(apart(result.of(r), dense(model, r, outputs[r.id], blocks=False)) for r in requests)


@pytest.mark.parametrize(
    "cuts", [(GRID,), (2 * GRID, 3 * GRID), (1,), (2, 3), (63,), (65,), (100, 101, 199), tuple(range(1, 40))], ids=str
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_in_pieces_is_that_in_one_go(kind, cuts):
    """Chunks of a prefill, and decodes, end anywhere."""
    model = make_hybrid(kind)
    ids = torch.from_numpy(random_tokens(8, 201).astype(np.int64))
    full, pool, slot = forward_in_pieces(model, ids, (), random_state)
    logits, other, other_slot = forward_in_pieces(model, ids, cuts, random_state)
    assert apart(logits, full) < 1e-5
    for layer in range(pool.shape.layers):
        assert torch.allclose(pool.recurrent(layer, slot), other.recurrent(layer, other_slot), atol=1e-5)
        assert torch.allclose(pool.conv(layer, slot), other.conv(layer, other_slot), atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_resuming_at_every_grid_position_equals_the_full_prefill(kind):
    depths = range(GRID, LENGTH + 1, GRID)
    requests = [fork(0, LENGTH), *(fork(1 + at, depth, output=3) for at, depth in enumerate(depths))]
    result = run(make_hybrid(kind), checkpoint("block_64"), requests)
    for depth, request in zip(depths, requests[1:], strict=True):
        assert result.records[request.id].reused_tokens == depth
        assert result.records[request.id].loaded_state_bytes == result.engine.policy.store.state_bytes
        assert off(result, request) < 1e-5
    assert nothing_leaks(result)


@pytest.mark.parametrize("past", [0, 1, 63])
def test_tokens_past_the_last_state_are_computed_again(past):
    requests = [fork(0, LENGTH), fork(1, 3 * GRID + past)]
    result = run(make_hybrid(), checkpoint("block_64", block_size=1), requests)
    record = result.records[1]
    assert (record.matched_tokens, record.reused_tokens) == (3 * GRID + past, 3 * GRID)
    assert off(result, requests[1]) < 1e-5


def test_a_prompt_asked_again_computes_at_least_its_last_token():
    prompt = fork(0, 4 * GRID, tail=0)
    again = Request(1, 0, prompt.spans, output_len=1, arrived_at=APART)
    result = run(make_hybrid(), checkpoint("block_64"), [prompt, again])
    assert result.records[1].reused_tokens == 3 * GRID
    assert off(result, again) < 1e-5


def test_states_are_taken_in_the_one_prefill_that_happens_anyway(forwarded):
    request = fork(0, LENGTH)
    result = start(make_hybrid(), checkpoint("block_64"), [request])
    forwarded.clear()
    result.serve([request])
    assert result.records[0].captured_states == request.num_tokens // GRID
    assert forwarded == [request.num_tokens]


def stored_states(result, request: Request) -> dict[int, int]:
    """Slots of the states on a prompt's path, by position."""
    node, _ = result.engine.policy.index.find(request, result.engine.policy.layout(request)[0])
    return {state.position: result.engine.memory.states[state] for step in node.path() for state in step.states}


def test_a_captured_state_equals_that_of_a_shorter_prefill():
    model, request = make_hybrid(), fork(0, LENGTH)
    result = run(model, checkpoint("block_64"), [request], rules=BatchRules(max_num_batched_tokens=100, max_num_seqs=4))
    stored, states = stored_states(result, request), result.engine.memory.states.pool
    assert sorted(stored) == list(range(GRID, request.num_tokens + 1, GRID))
    ids = torch.from_numpy(request.tokens.astype(np.int64))
    for position, slot in stored.items():
        _, pool, own = forward_in_pieces(model, ids[:position], ())
        states.check_position(slot, position)
        for layer in range(pool.shape.layers):
            assert torch.allclose(states.recurrent(layer, slot), pool.recurrent(layer, own), atol=1e-5)
            assert torch.allclose(states.conv(layer, slot), pool.conv(layer, own), atol=1e-5)


ARMS = ("none", "kv_only", "block_64", "balanced_3", "log", "dp_3", "last", "boundary", "branch", "block_hash_align")
RULES = {
    "chunked": BatchRules(max_num_batched_tokens=75, max_num_seqs=4),
    "whole prompts": BatchRules(max_num_batched_tokens=300, max_num_seqs=3, enable_chunked_prefill=False),
    "prefill first": BatchRules(max_num_batched_tokens=75, max_num_seqs=4, prefill_first=True),
}


def crowd(output: int, longest: int = 260, apart_ns: int = 2_500_000) -> list[Request]:
    """Prompts of three texts, together; some twice."""
    rng, requests = np.random.default_rng(3), []
    for id in range(10):
        name, depth = int(rng.integers(3)), int(rng.integers(40, longest))
        spans = (Span(random_tokens(name, 300)[:depth]), text(-id // 2, int(rng.integers(1, 20))))
        requests.append(make_request(id, *spans, output=int(rng.integers(1, output)), at=id * apart_ns))
    return requests


@pytest.mark.parametrize(("name", "rules"), in_turn(ARMS, RULES))
def test_packed_chunked_and_warm(name, rules):
    requests = crowd(6)
    strategy = checkpoint(name, block_size=1 if rules == "chunked" and name != "block_hash_align" else 16)
    result = start(make_hybrid(layers=2), strategy, requests, rules=RULES[rules])
    for _ in range(2):
        result.serve(requests)
        assert off(result, *requests) < 1e-5
        assert nothing_leaks(result)


@pytest.mark.parametrize("name", ARMS)
def test_preempted_and_evicted(name):
    requests, strategy, model = crowd(40, longest=100, apart_ns=0), checkpoint(name), make_hybrid(layers=2)
    budget = least_budget(model, strategy, requests)
    result = run(model, strategy, requests, rules=RULES["chunked"], budget=budget, states=6)
    assert result.rows[0].preemptions > 0
    assert off(result, *requests) < 1e-5
    assert nothing_leaks(result)


# -- a state of another depth -----------------------------------------------------------------------------------------


def test_a_state_cannot_stand_for_a_prefix_of_another_length():
    requests = [fork(0, LENGTH), fork(1, 3 * GRID + 5)]
    result = start(make_hybrid(), checkpoint("block_64"), requests)
    result.serve(requests[:1])
    slots = result.engine.memory.states._slots
    states = sorted(slots, key=lambda state: state.position)
    slots[states[2]], slots[states[1]] = slots[states[1]], slots[states[2]]
    with pytest.raises(AssertionError, match="a state of 128 tokens was used as one of 192"):
        result.serve(requests[1:])


def test_a_slot_checks_its_position():
    pool = StatePool(make_hybrid().state_shape, torch.float32, "cpu", poison=True)
    slot = pool.allocate()
    pool.advance(slot, 0, 64)
    pool.check_position(slot, 64)
    with pytest.raises(AssertionError, match="a state of 64 tokens was used as one of 128"):
        pool.check_position(slot, 128)
    with pytest.raises(AssertionError, match="a state of 64 tokens was used as one of 0"):
        pool.advance(slot, 0, 64)
    pool.free([slot])
    assert pool.used == 0
    assert pool.recurrent(0, slot).isnan().all()
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free([slot])
    assert not pool.recurrent(0, pool.allocate()).any()


def test_a_state_has_the_bytes_of_the_spec():
    for kind in KINDS:
        model = make_hybrid(kind)
        assert (
            StatePool(model.state_shape, model.dtype, "cpu").slot_bytes
            == spec_of(model.name, model.config, model.dtype).state_bytes
        )


# -- stored weights ---------------------------------------------------------------------------------------------------


def save_with_eyes(folder: Path) -> Tensor:
    """A saved Qwen3.5 as it is published, vision tower and all; returns its text model's logits of a few tokens."""
    text = named_config("tiny-hybrid")
    text.vocab_size, text.pad_token_id = 128, 0
    sizes = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 256}
    config = AutoConfig.for_model("qwen3_5", text_config=text.to_dict(), vision_config=sizes)
    torch.manual_seed(3)
    model = AutoModelForImageTextToText.from_config(config).eval()
    model.save_pretrained(folder)
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 83)[None]).logits[0]


def test_a_vision_model_loads_weights_of_its_text_model(tmp_path):
    truth = save_with_eyes(tmp_path)
    model = load_model(EngineSettings(weights="path", path=str(tmp_path), device="cpu"), find_spec(str(tmp_path)))
    logits, *_ = forward_in_pieces(model, torch.arange(3, 83), (GRID,))
    assert apart(logits, truth) < 1e-5
