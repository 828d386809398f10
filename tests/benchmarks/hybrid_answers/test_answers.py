"""Arms of the comparison, and their scores."""

import numpy as np
import pytest
import torch
from hybrid_answers import EXACT, FULL_VIEW, answer, arms, head_norms
from probe_report import Answers, scores, summarise
from probe_settings import HybridAnswers, NormSettings
from transformers import PreTrainedModel

from .conftest import TASK

SMALL = HybridAnswers(
    weights="none", task=TASK, cases=["2x13"], facts=4, sequences=5, batch=2, norms=NormSettings([13, 20], 2)
)


@pytest.fixture
def answers(model: PreTrainedModel) -> dict[str, Answers]:
    return answer(model, SMALL, 2, 13)


def test_every_arm_answers_every_question(answers: dict[str, Answers]):
    assert list(answers) == list(arms(SMALL))
    assert {arm_answers.correct.shape for arm_answers in answers.values()} == {(5, TASK.questions)}
    assert (answers["no documents"].loss > 0).all()


def test_one_document_needs_no_transition(model: PreTrainedModel):
    """Every form gives the state of the full view."""
    by_arm = answer(model, SMALL, 1, 13)
    for arm in ("exact", "exact, bf16", "rank 2", "norm > 0.3", "decay only", "sum", "last", FULL_VIEW):
        np.testing.assert_allclose(by_arm[arm].loss, by_arm[EXACT].loss, atol=1e-3)
    assert not np.allclose(by_arm["KV only"].loss, by_arm[EXACT].loss, atol=1e-2)


def test_documents_shorter_than_the_convolution_are_refused(model: PreTrainedModel):
    short = HybridAnswers(**vars(SMALL) | {"facts": 1, "cases": ["2x3"], "repaired": [1]})
    with pytest.raises(ValueError, match=r"^cases=2x3: expected documents of 4 tokens or more, as many as the convol"):
        answer(model, short, 2, 3)


def test_full_rank_equals_exact(model: PreTrainedModel):
    full = HybridAnswers(**vars(SMALL) | {"ranks": [16]})
    by_arm = answer(model, full, 3, 13)
    np.testing.assert_allclose(by_arm["rank 16"].loss, by_arm[EXACT].loss, atol=1e-3)
    assert not np.allclose(by_arm["last"].loss, by_arm[EXACT].loss, atol=1e-2)


def test_bytes_are_those_of_one_document(answers: dict[str, Answers], model: PreTrainedModel):
    heads, width = 12, 16
    assert answers["exact"].nbytes == heads * width * width * 4
    assert answers["exact, bf16"].nbytes == heads * width * width * 2
    assert answers["rank 2"].nbytes == heads * (4 + 2 * 2 * width * 4)
    assert answers[FULL_VIEW].nbytes is None


def test_scores_are_means_over_questions():
    random = np.random.default_rng(0)
    updated, first = random.random((2, 30, 4)) < 0.4
    exact, full = (
        Answers(random.random((30, 4)) < p, random.random((30, 4)), updated, first, None) for p in (0.3, 0.7)
    )
    score = scores({"own": exact, "full": full}, "full", "own")[0]
    assert score.accuracy.mean == pytest.approx(exact.correct.mean())
    assert score.updated.mean == pytest.approx(exact.correct[updated].mean())
    assert score.first.mean == pytest.approx(exact.correct[first].mean())
    assert score.loss.mean == pytest.approx(exact.loss.mean())
    assert score.minus_full.mean == pytest.approx(exact.correct.mean() - full.correct.mean())
    assert score.minus_full.low < score.minus_full.mean < score.minus_full.high < 0
    assert (score.minus_exact.mean, score.minus_exact.low, score.minus_exact.high) == (0, 0, 0)


def test_scores_without_updated_keys_say_so():
    nothing = np.zeros((3, 2), bool)
    exact = Answers(nothing, np.ones((3, 2)), nothing, nothing, None)
    (score,) = scores({"own": exact}, "own", "own")
    assert score.updated is score.first is None


def test_published_decay_empties_states_and_slow_does_not(model: PreTrainedModel):
    heads = list(head_norms(model, SMALL))
    assert len(heads) == 3 * 2 * 6 * 2
    summaries = {(row.source, row.tokens): row for row in summarise(heads)}
    assert summaries["published", 20].median < 1e-3 < 0.1 < summaries["trained", 20].median
    assert summaries["published", 20].median < summaries["slow", 20].median
    assert all(row.largest <= 1 + 1e-5 for row in summaries.values())
    assert all(head.norm <= 1.001 * head.decay + 1e-6 for head in heads if head.tokens < 16)


def test_norms_of_random_tokens_need_no_task(model: PreTrainedModel):
    random = HybridAnswers(**vars(SMALL) | {"norms": NormSettings([3], 2, "random", False, False)})
    heads = list(head_norms(model, random))
    assert len(heads) == 12
    assert torch.tensor([head.norm for head in heads]).isfinite().all()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"cases": ["4*31"]}, "cases=4*31: expected documents x tokens"),
        ({"cases": ["4x5"]}, "cases=4x5: expected one document or more, of 9 tokens"),
        ({"cases": ["9x13"]}, "task.keys=25: expected 36"),
        ({"sequences": 1}, "sequences=1: expected 2 or more"),
        ({"ranks": [0]}, "ranks=0: expected a number above zero"),
        ({"drop": [0.0]}, "drop=0.0: expected norms above 0 and below 1"),
        ({"drop": [0.1, 1.0]}, "drop=1.0: expected norms above 0 and below 1"),
        ({"repaired": [13]}, "repaired=13: expected 1 to 12, a part of a document of 2x13"),
        ({"separator": -1}, "separator=-1: expected"),
    ],
)
def test_cases_that_cannot_be_drawn_are_refused(changes: dict[str, object], expected: str):
    with pytest.raises(ValueError, match="expected") as refused:
        HybridAnswers(**vars(SMALL) | changes)
    assert str(refused.value).startswith(expected)
