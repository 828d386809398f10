"""Workloads for measurements: shared tokens and labels of their requests."""

import itertools

import numpy as np
import pytest

from spanlab.queries import builtin_tokenizer
from spanlab.workloads.alias import AliasQuestions, requests_of
from spanlab.workloads.synthetic import (
    ForkedSequence,
    RepeatedDocuments,
    requests_of_forked_sequence,
    requests_of_repeated_documents,
)


def labels_of(workload, number: int) -> dict[str, str | int]:
    return {name: values[number] for name, values in workload.labels.items()}


def common(first, second) -> int:
    """Leading tokens that two prompts share."""
    length = min(len(first.tokens), len(second.tokens))
    differ = np.flatnonzero(first.tokens[:length] != second.tokens[:length])
    return int(differ[0]) if len(differ) else length


def test_cold_requests_share_nothing_across_salts():
    workload = requests_of_repeated_documents(RepeatedDocuments(trials=3, repeats=2, document_tokens=20), 1)
    cold = [request for request in workload.requests if labels_of(workload, request.id)["kind"] == "cold"]
    assert len(cold) == 6
    assert len({request.cache_salt for request in cold}) == 6


def test_warm_requests_have_the_documents_of_the_cold_one():
    workload = requests_of_repeated_documents(RepeatedDocuments(trials=1, repeats=4, document_tokens=20), 1)
    for group in {request.group_id for request in workload.requests}:
        cold, *warm = [request for request in workload.requests if request.group_id == group]
        documents = [span for span in cold.spans if span.independent]
        for request in warm:
            own = [span for span in request.spans if span.independent]
            assert {id(span) for span in own} == {id(span) for span in documents}
            if labels_of(workload, request.id)["order"] == "same":
                assert own == documents
            assert request.num_tokens == cold.num_tokens == 9 + 4 * 20 + 64


def test_questions_are_the_same_in_both_orders():
    workload = requests_of_repeated_documents(RepeatedDocuments(trials=1, repeats=3), 1)
    by_order = [[r.spans[-1].tokens.tolist() for r in workload.requests if r.group_id == group] for group in (0, 1)]
    assert by_order[0] == by_order[1]


def test_prepare_asks_for_every_document_alone():
    workload = requests_of_repeated_documents(RepeatedDocuments(trials=1, orders=["same"], prepare=True), 5)
    alone = [request for request in workload.requests if labels_of(workload, request.id)["kind"] == "prepare"]
    assert [len(request.spans) for request in alone] == [2] * 4
    assert {request.output_len for request in alone} == {1}


def test_forks_share_their_depth_to_the_token():
    workload = requests_of_forked_sequence(
        ForkedSequence(prompt_tokens=400, depths=[0.25, 0.75], visits=2, families=2), 1
    )
    for family in (0, 1):
        cold, *forks = [request for request in workload.requests if request.group_id == family]
        assert [common(cold, fork) for fork in forks] == [100, 300, 100, 300]
        assert {request.num_tokens for request in (cold, *forks)} == {400}
        assert [labels_of(workload, fork.id)["visit"] for fork in forks] == ["visit 1"] * 2 + ["visit 2"] * 2
        assert cold.boundaries == (100, 300)


def test_families_share_nothing():
    workload = requests_of_forked_sequence(ForkedSequence(prompt_tokens=64, families=3), 1)
    first = [next(r for r in workload.requests if r.group_id == family) for family in range(3)]
    assert [common(a, b) for a, b in itertools.pairwise(first)] == [0, 0]


@pytest.mark.parametrize("depths", [[], [0.0], [1.0], [0.5, 0.5]])
def test_refuses_depths_that_are_no_forks(depths):
    with pytest.raises(ValueError, match=r"workload\.forked_sequence\.depths"):
        ForkedSequence(prompt_tokens=64, depths=depths)


def test_questions_follow_an_earlier_request_over_the_same_documents():
    workload = requests_of(AliasQuestions(questions=3), builtin_tokenizer(), 8)
    assert len(workload.requests) == 12
    for earlier, question in zip(workload.requests[::2], workload.requests[1::2], strict=True):
        texts = [
            {span.tokens.tobytes() for span in request.spans if span.independent} for request in (earlier, question)
        ]
        assert texts[0] == texts[1]
        assert earlier.cache_salt == question.cache_salt
        assert (earlier.answer, earlier.output_len) == (None, 1)
        assert question.answer is not None
        order = labels_of(workload, question.id)["order"]
        same = [s.tokens.tobytes() for s in earlier.spans if s.independent] == [
            s.tokens.tobytes() for s in question.spans if s.independent
        ]
        assert same == (order == "same")
