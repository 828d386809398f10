"""Bounds are the roofline of what a request computes and moves, reckoned by hand."""

from __future__ import annotations

import pytest
import torch

from spanlab.bench import rates
from spanlab.bench.rates import Rates
from spanlab.pic_bench.rows import Cell
from spanlab.pic_bench.timing import make_trial, run_cell

SYSTEM, DOCUMENT, QUESTION = 13, 15, 12
PROMPT = SYSTEM + 4 * DOCUMENT + QUESTION
LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 3, 256, 704, 8, 2, 32, 4265
WEIGHTS = LAYERS * (HIDDEN * (2 * HEADS + 2 * KV_HEADS) * HEAD_DIM + 3 * HIDDEN * INNER)
HEAD = VOCABULARY * HIDDEN
KV = LAYERS * 2 * KV_HEADS * HEAD_DIM * 4
PAIR = 4 * LAYERS * HEADS * HEAD_DIM
MEASURE = rates.measure  # as it is before the other tests are told what it finds


def causal(n: int) -> int:
    return n * (n + 1) // 2


@pytest.fixture
def bounds(ground, settings):
    """The bound of the cold and of the warm request of an arm."""

    def run(arm: str):
        toy = settings("repeats=1")
        trial = make_trial(toy, ground, "xs", 0)
        return list(run_cell(toy, ground, Cell("tiny", "xs", 0, arm, "shuffled"), trial))

    return run


def check(row, tokens: int, pairs: int, kv_tokens: int) -> None:
    """FLOPs and bytes, at the rates that the ground was told: 1e11 FLOP/s and 1e10 B/s."""
    compute = (2 * WEIGHTS * tokens + PAIR * pairs + 2 * HEAD) / 1e11
    memory = (4 * (WEIGHTS + HEAD) + KV * kv_tokens) / 1e10
    assert row.compute_s == pytest.approx(compute, abs=2e-9)
    assert row.memory_s == pytest.approx(memory, abs=2e-9)
    assert row.bound_s == max(row.compute_s, row.memory_s)


def test_a_cold_request_computes_every_pair(bounds):
    cold, again = bounds("none")
    check(cold, PROMPT, causal(PROMPT), PROMPT)
    check(again, PROMPT, causal(PROMPT), PROMPT)


def test_a_warm_span_cache_computes_the_question_and_reads_all_keys(bounds):
    cold, warm = bounds("pic")
    check(warm, QUESTION, causal(PROMPT) - causal(PROMPT - QUESTION), PROMPT)
    alone = causal(SYSTEM) + 4 * causal(DOCUMENT)  # and its question reads what was just written
    check(cold, PROMPT, alone + causal(PROMPT) - causal(PROMPT - QUESTION), PROMPT + PROMPT - QUESTION)


def test_a_copy_is_read_and_written(bounds):
    _, turned = bounds("pic_turned")
    check(turned, QUESTION, causal(PROMPT) - causal(PROMPT - QUESTION), PROMPT + 2 * 4 * DOCUMENT)


def test_cache_blend_pays_one_layer_and_the_projections_of_another_for_what_it_leaves_out(bounds):
    _, warm = bounds("cache_blend_15")
    spans, before = 4 * DOCUMENT, PROMPT - QUESTION
    chosen = int(0.15 * before)
    left, reach = spans - chosen, (SYSTEM + before + 1) // 2  # of a row in the middle of the spans
    projections = HIDDEN * (HEADS + 2 * KV_HEADS) * HEAD_DIM
    flops = 2 * WEIGHTS * (chosen + QUESTION) + left * (2 * WEIGHTS // LAYERS + 2 * projections)
    flops += PAIR * (chosen * (SYSTEM + before + 1) // 2 + causal(PROMPT) - causal(before)) + 2 * HEAD
    flops += PAIR // LAYERS * left * reach
    assert warm.compute_s == pytest.approx(flops / 1e11, abs=3e-9)


def test_a_request_of_several_steps_is_bound_by_the_sum_of_its_steps(ground, settings):
    toy = settings("repeats=1", "token_budget=50")
    trial = make_trial(toy, ground, "xs", 0)
    cold, _ = run_cell(toy, ground, Cell("tiny", "xs", 0, "none", "shuffled"), trial)
    compute = (2 * WEIGHTS * PROMPT + PAIR * causal(PROMPT) + 2 * HEAD) / 1e11
    memory = (4 * (2 * WEIGHTS + HEAD) + KV * (50 + PROMPT)) / 1e10
    assert cold.compute_s == pytest.approx(compute, abs=4e-9)
    assert cold.memory_s == pytest.approx(memory, abs=4e-9)
    assert cold.bound_s >= max(cold.compute_s, cold.memory_s)


def test_rates_are_those_of_the_fastest_round(monkeypatch):
    took = iter([0.5, 0.25, 1.0] * 10)
    monkeypatch.setattr(rates, "_once", lambda call, device: next(took))
    monkeypatch.setattr(rates, "_ROUNDS", 3)
    found = MEASURE(torch.float32, torch.device("cpu"))
    assert found == Rates(2 * 2048**3 / 0.25, 2 * (1 << 28) / 0.25)
