"""The analysis `answers`: teacher forcing over the baseline's tokens, divergence, and accuracy of trained weights."""

import json

import numpy as np
import pytest

from spanlab.analyses.answers import _divergences
from spanlab.cli import compose
from spanlab.core.request import Request
from spanlab.study.numbers import Outputs, read_outputs
from spanlab.study.run import run_study

SMALL = (
    "tracking.kind=none",
    "output.figures=false",
    "workload.alias_questions.questions=2",
    "workload.output_tokens=4",
    "workload.alias_questions.words=20",
    "engine.threads=1",
)
ARMS = "only=[none,radix,pic]"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return run_study(compose("pic_agreement", [*SMALL, ARMS]), "pic_answers", tmp_path_factory.mktemp("a"), show=False)


def outputs(folder, arm: str):
    return read_outputs(folder / "steps" / f"{arm}-seed0-rateNone.npz")


def test_all_arms_follow_the_baseline(folder):
    baseline_tokens = outputs(folder, "none").tokens
    assert len(baseline_tokens) == 8
    for arm in ("radix", "pic"):
        arm_outputs = outputs(folder, arm)
        assert all(np.array_equal(arm_outputs.tokens[request], tokens) for request, tokens in baseline_tokens.items())
        assert all(len(arm_outputs.logits[request]) == len(tokens) for request, tokens in baseline_tokens.items())


def test_prefix_caching_is_exact_and_position_independent_caching_is_not(folder):
    entries = json.loads((folder / "summary.json").read_bytes())["answers"]
    assert {(entry["arm"], entry["order"]) for entry in entries} == {
        (arm, order) for arm in ("none", "radix", "pic") for order in ("same", "shuffled")
    }
    for entry in entries:
        assert entry["n"] == 2
        assert entry["accuracy"] is None  # random weights answer nothing
        assert entry["floor"]["kl"][0] < 1e-9
    kl = {(entry["arm"], entry["order"]): entry["agreement"]["kl"][0] for entry in entries if entry["arm"] != "none"}
    assert max(kl["radix", "same"], kl["radix", "shuffled"]) < 1e-9
    assert min(kl["pic", "same"], kl["pic", "shuffled"]) > 1e-4


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("only=[radix]", r"engine\.teacher=baseline with .*: expected baseline=none among the arms"),
        ("engine.record=nothing", r"engine\.teacher=baseline with engine\.record=nothing"),
        ("engine.record=scores", r"engine\.teacher=baseline with engine\.record=scores: expected engine\.teacher=gold"),
        ("engine={teacher: gold, record: tokens}", r"engine\.teacher=gold .*: expected logits or scores"),
        ("engine.teacher=radix", r"engine\.teacher=radix: expected one of baseline, gold"),
        ("engine.record=first_logits", r"analyses=answers with engine\.record=first_logits"),
        ("engine.record=tokens", r"engine\.record=tokens with engine\.weights=random: expected logits, or trained"),
        ("judge={base_url: 'http://host', model: m}", r"judge\.base_url=.* expected engine\.teacher=null and trained"),
        ("workload.popularity.requests=9", r"requests=9 with analyses=answers: expected null"),
        ("repeats=2", r"repeats=2 with analyses=answers: expected repeats=1"),
    ],
)
def test_refuses_what_cannot_be_compared(override, sentence):
    with pytest.raises(ValueError, match=sentence):
        compose("pic_agreement", [*SMALL, ARMS, override])


def outputs_of(tokens: list[int], logits: np.ndarray) -> Outputs:
    return Outputs({0: np.array(tokens, np.int32)}, {0: logits.astype(np.float32)})


def test_divergence_ends_with_the_answer():
    logits = np.eye(4)
    moved = logits.copy()
    moved[2:] = moved[2:, ::-1]  # after token 3, which ends the answer
    requests = [Request(0, 0, (), answer="7")]
    base, arm = outputs_of([1, 3, 0, 0], logits), outputs_of([1, 3, 0, 0], moved)
    (ended,), (full,) = (_divergences(base, arm, requests, stop) for stop in (3, None))
    assert (ended.predictions, ended.kl, ended.greedy) == (2, 0.0, True)
    assert (full.predictions, full.greedy) == (4, False)
    assert full.kl > 0


def test_different_texts_have_no_divergence():
    requests = [Request(0, 0, (), answer="7")]
    assert _divergences(outputs_of([1, 2], np.eye(2)), outputs_of([1, 1], np.eye(2)), requests, None) == ()


def test_spans_of_a_hybrid_are_composed_in_a_study(tmp_path):
    """Composed spans differ from full recompute, since they are computed alone; prefix caching is exact."""
    hybrid = ["model=tiny-hybrid", "arms=hybrid_pic", "only=[none,boundary,pic_exact]"]
    hybrid += ["workload.alias_questions.orders=[shuffled]"]
    folder = run_study(compose("pic_agreement", [*SMALL, *hybrid]), "pic_answers", tmp_path, show=False)
    entries = json.loads((folder / "summary.json").read_bytes())["answers"]
    kl = {entry["arm"]: entry["agreement"]["kl"][0] for entry in entries if entry["arm"] != "none"}
    assert kl["boundary"] < 1e-9
    assert kl["pic_exact"] > 1e-6
