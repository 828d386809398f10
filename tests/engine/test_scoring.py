"""Scores of known answers: equal to a dense forward for every method, and all tokens of an answer in one step."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from spanlab.core.admission import BatchRules
from spanlab.core.request import Request
from spanlab.engine.load import wrap
from spanlab.engine.model import SpanModel
from spanlab.engine.outputs import Recording, Scorer, token_score
from spanlab.model_files import MODELS, is_ready, packaged_folder
from spanlab.study.numbers import read_options, read_scores
from spanlab.study.prepare import gold_tokens
from spanlab.workloads.load import load_workload
from spanlab.workloads.queries import tokenizer_of
from spanlab.workloads.questions import Questions, QuestionsWorkload
from spanlab_sim.run import serve

from .factories import arm, permutations, questions, random_tokens, start
from .oracles import divergence, truth_of

METHODS = ("none", "radix", "pic", "pic_raw", "pic_turned", "lego_link_16", "cache_blend_15", "ape", "random_16")
ALONE = BatchRules(max_num_batched_tokens=4096, max_num_seqs=1)


def given(output: int = 5) -> list[Request]:
    """Three documents in any order, each prompt with another answer."""
    return [
        replace(request, output=random_tokens(70 + request.id, output), arrived_at=0)
        for request in questions(permutations(3)[:4], (20, 7, 33), output=output)
    ]


def scored(
    model: SpanModel, name: str, requests: list[Request], tmp_path, *, reference: bool, budget=None, page: int = 16
):
    """Scores of one run by request, and the steps that it took; `budget` is in tokens."""
    logits = tmp_path / "none.logits.npy"
    recording = Recording("scores", Scorer(requests, model.vocab_size, logits, reference))
    begun = start(model, arm(name, page), requests, rules=ALONE, at_once=True, budget=budget)
    begun.engine._tokens._on_logits, begun.engine._on_finished = recording.note, recording.finished
    row = serve(requests, begun.engine.policy, ALONE, begun.engine, lambda record: None, clients=1)
    begun.engine.policy.check()
    recording.write(tmp_path / f"{name}.npz", begun.engine.outputs)
    return read_scores(tmp_path / f"{name}.npz"), begun.engine.steps, row


def dense_loss(model: SpanModel, name: str, request: Request) -> float:
    """Mean −log p of the answer, by a forward of transformers' own attention, or of plain loops, without a cache."""
    strategy, output = arm(name, 16), request.output.tolist()
    repair = strategy.spans.repair if strategy.spans else arm("pic").spans.repair
    logits = truth_of(strategy, repair, model, request, output)
    return loss_of(logits, output)


def loss_of(logits: Tensor, output: list[int]) -> float:
    log_p = logits.double().log_softmax(-1)
    return -float(log_p[torch.arange(len(output)), torch.tensor(output)].mean())


@pytest.mark.parametrize("name", METHODS)
def test_gold_loss_is_that_of_a_dense_forward(make_model, tmp_path, name):
    model, requests = make_model("tiny"), given()
    scored(model, "none", requests, tmp_path, reference=True)
    scores, _, _ = scored(model, name, requests, tmp_path, reference=name == "none")
    for request in requests:
        assert scores[request.id]["nll"] == pytest.approx(dense_loss(model, name, request), abs=1e-4)


def test_answers_are_scored_where_the_store_is_full(make_model, tmp_path):
    """The rest of an answer takes one step per token if its pages hold entries that must be evicted first."""
    model, requests = make_model("tiny"), given(output=9)
    scored(model, "none", requests, tmp_path, reference=True)
    free, steps, _ = scored(model, "pic", requests, tmp_path, reference=False, page=1)
    longest = max(request.num_tokens + request.output_len for request in requests)
    full, many, _ = scored(model, "pic", requests, tmp_path, reference=False, budget=longest, page=1)
    assert many > steps
    for request in requests:
        assert full[request.id]["nll"] == pytest.approx(free[request.id]["nll"], abs=1e-4)


@pytest.mark.parametrize("name", ["none", "pic_raw", "cache_blend_15", "ape"])
def test_option_losses_equal_a_dense_forward(make_model, tmp_path, name):
    """Shorter and longer than the answer, beyond its page; scores of answers are those of a run without options."""
    model, plain = make_model("tiny"), given()
    requests = [
        replace(request, options=tuple(random_tokens(90 + request.id, length) for length in (1, 3, 21)))
        for request in plain
    ]
    scored(model, "none", requests, tmp_path, reference=True)
    scores, steps, _ = scored(model, name, requests, tmp_path, reference=name == "none")
    losses = read_options(tmp_path / f"{name}.npz")
    for request in requests:
        truth = [dense_loss(model, name, replace(request, output=option)) for option in request.options]
        assert losses[request.id] == pytest.approx(truth, abs=1e-4)
    scored(model, "none", plain, tmp_path, reference=True)
    assert scored(model, name, plain, tmp_path, reference=name == "none")[:2] == (scores, steps)
    assert read_options(tmp_path / f"{name}.npz") == {}


def test_a_given_answer_takes_two_steps(make_model, tmp_path):
    """One for the prompt and the first token, one for all others."""
    requests = given(output=6)
    _, steps, row = scored(make_model("tiny"), "none", requests, tmp_path, reference=True)
    assert steps == 2 * len(requests)
    assert row.steps == 6 * len(requests)  # what the scheduler counts


def test_divergence_is_that_of_the_logits(make_model, tmp_path):
    model, requests = make_model("tiny"), given()
    reference_scores, _, _ = scored(model, "none", requests, tmp_path, reference=True)
    scores, _, _ = scored(model, "pic", requests, tmp_path, reference=False)
    for request in requests:
        output = request.output.tolist()
        repair = arm("pic").spans.repair
        full, apart = (truth_of(arm(name, 16), repair, model, request, output) for name in ("none", "pic"))
        expected = divergence(full, apart)
        assert expected > 1e-3
        assert scores[request.id]["kl"] == pytest.approx(expected, abs=1e-5)
        assert scores[request.id]["top1"] == float((full.argmax(-1) == apart.argmax(-1)).double().mean())
        assert reference_scores[request.id]["kl"] < 1e-12
        assert reference_scores[request.id]["top1"] == 1


def test_hybrid_scores_do_not_depend_on_steps(make_model, tmp_path):
    """Recurrent layers see an answer's tokens in one forward, or one by one."""
    model, requests = make_model("tiny-hybrid"), given()
    at_once, _, _ = scored(model, "none", requests, tmp_path, reference=True)
    begun = start(model, arm("none", 16), requests, rules=ALONE).serve(requests)
    for request in requests:
        assert at_once[request.id]["nll"] == pytest.approx(
            loss_of(begun.of(request), request.output.tolist()), abs=1e-4
        )


def test_scores_by_hand():
    row, reference = torch.tensor([1.0, 1.0]).log(), torch.tensor([3.0, 1.0]).log()
    scores = token_score(row, reference, 1)
    assert scores.nll == pytest.approx(np.log(2))
    assert scores.kl == pytest.approx(0.75 * np.log(1.5) + 0.25 * np.log(0.5))
    assert scores.top1 == 1
    assert token_score(row.flip(0), torch.tensor([1.0, 3.0]).log(), 1).top1 == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["none", "pic", "lego_link_16", "cache_blend_15", "ape"])
def test_packaged_model_scores_as_a_dense_forward(tmp_path, name):
    package = MODELS["smollm2-135m"]
    if not (is_ready(package) or package.is_installed):
        pytest.skip("needs the package of the model")
    folder = packaged_folder(package)
    model = wrap("smollm2-135m", AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    settings = QuestionsWorkload(tokenizer=str(folder), questions=Questions(retrieval="given", requests=4))
    workload, tokenizer = load_workload(settings, tmp_path), tokenizer_of(folder)
    answers = [gold_tokens(request.answer, "", tokenizer) for request in workload.requests]
    requests = [
        replace(request, output=tokens, output_len=len(tokens))
        for request, tokens in zip(workload.requests, answers, strict=True)
    ]
    scored(model, "none", requests, tmp_path, reference=True)
    scores, _, _ = scored(model, name, requests, tmp_path, reference=name == "none")
    for request in requests:
        assert scores[request.id]["nll"] == pytest.approx(dense_loss(model, name, request), abs=1e-3)
