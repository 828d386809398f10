"""Retrieval follows its formula, and labels give the position of the gold passage."""

import math
import re

import numpy as np
import pytest

from spanlab.queries import builtin_tokenizer
from spanlab.workloads.questions import Query, bm25, rank_as_given
from spanlab.workloads.rag import ORDERS

PASSAGES = ("red fox den", "red red owl night", "pond winter", "fox pond fox winter night")
K1, B = 1.5, 0.75


def okapi(passages: tuple[str, ...], query: str) -> list[float]:
    """Scores by the formula of Robertson and Zaragoza with Lucene's inverse document frequency."""
    texts = [passage.split() for passage in passages]
    mean = sum(map(len, texts)) / len(texts)
    scores = [0.0] * len(passages)
    for term in query.split():
        holding = sum(term in passage for passage in texts)
        idf = math.log(1 + (len(texts) - holding + 0.5) / (holding + 0.5))
        for index, passage in enumerate(texts):
            count = passage.count(term)
            scores[index] += idf * count / (count + K1 * (1 - B + B * len(passage) / mean))
    return scores


@pytest.mark.parametrize("query", ["fox", "red night", "winter pond fox", "fox fox owl", "unheard"])
def test_bm25_ranks_by_the_formula(query):
    (ranking,) = bm25(PASSAGES, [Query(query)])
    expected = np.argsort(-np.array(okapi(PASSAGES, query)), kind="stable")
    assert ranking.tolist() == expected.tolist()


def test_bm25_score_is_the_one_by_hand():
    # Four passages of 3.5 words in the mean; "owl" stands once in one of them, of four words.
    by_hand = math.log(1 + 3.5 / 1.5) * 1 / (1 + 1.5 * (0.25 + 0.75 * 4 / 3.5))
    assert okapi(PASSAGES, "owl") == pytest.approx([0, by_hand, 0, 0])
    import bm25s

    index = bm25s.BM25()
    index.index([passage.split() for passage in PASSAGES], show_progress=False)
    assert index.get_scores(["owl"]).tolist() == pytest.approx([0, by_hand, 0, 0], abs=1e-6)


def test_bm25_leaves_out_cases_and_stop_words():
    (ranking,) = bm25(("the day and the night", "this OWL"), [Query("Is this the owl?")])
    assert ranking.tolist() == [1, 0]


def test_bm25_ranks_passages_in_order_for_a_question_of_stop_words():
    rankings = bm25(PASSAGES, [Query("Is it?"), Query("unheard")])
    assert [ranking.tolist() for ranking in rankings] == [[0, 1, 2, 3]] * 2


def test_given_keeps_the_ranking_of_a_file():
    (ranking,) = rank_as_given(PASSAGES, [Query("fox", gold=(0,), ranking=(2, 0))], np.random.default_rng(0))
    assert ranking.tolist() == [2, 0]


def test_given_draws_others_behind_the_gold_passages():
    rankings = [
        rank_as_given(PASSAGES, [Query("fox", gold=(3, 0))], np.random.default_rng(seed))[0] for seed in range(20)
    ]
    assert {tuple(ranking[:2].tolist()) for ranking in rankings} == {(3, 0)}
    assert {tuple(ranking[2:].tolist()) for ranking in rankings} == {(1, 2), (2, 1)}


def test_given_without_gold_is_refused():
    with pytest.raises(
        ValueError, match=r"^workload.questions.retrieval=given: expected bm25 or dense, because the task"
    ):
        rank_as_given(PASSAGES, [Query("fox")], np.random.default_rng(0))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("search", ["corpus", "document"])
@pytest.mark.parametrize("k", [1, 3])
def test_labels_point_at_the_gold_passage(load, order, search, k):
    workload = load(task="facts", order=order, search=search, k=k, requests=60)
    positions, tokens = workload.labels["gold_position"], workload.labels["gold_tokens"]
    tokenizer, hits = builtin_tokenizer(), 0
    for index, request in enumerate(workload.requests):
        texts = [tokenizer.decode(span.tokens) for span in request.spans[1:-1]]
        item = re.search(r"[Tt]he (\w+)", workload.labels["opening"][index])[1]
        stating = [position for position, text in enumerate(texts) if f" the {item} in {request.answer}." in text]
        assert stating == [positions[index]] * (positions[index] >= 0)
        assert list(request.gold[: len(stating)]) == [1 + position for position in stating] or not stating
        hits += bool(stating)
        if stating:
            assert tokens[index] == len(request.spans[1 + positions[index]].tokens)
    assert hits > 10
    assert k > 1 or hits < 60


def test_orders_hold_the_same_passages(load):
    loaded = [load(task="facts", order=order, requests=30) for order in ORDERS]
    for requests in zip(*(workload.requests for workload in loaded), strict=True):
        assert len({frozenset(span.tokens.tobytes() for span in request.spans) for request in requests}) == 1
