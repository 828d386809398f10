"""Settings of the two RAG workloads."""

import re

import pytest

from spanlab.build import build_workload
from spanlab.workloads import WORKLOADS, Rag, RagPulse
from spanlab.workloads.load import Popularity
from spanlab.workloads.rag import RagPulseWorkload, RagWorkload


def test_rag_settings_reach_the_workload():
    rag = Rag(k=3, requests=7, zipf=0.5, passage_zipf=0.25, noise=0.1, order="ranked", system_tokens=99, seed=4)
    workload = build_workload(RagWorkload(documents=5, output_tokens=9, rag=rag), "unused")
    assert [len(request.spans) for request in workload.requests] == [5] * 7
    assert {(request.boundaries, request.output_len) for request in workload.requests} == {((99,), 9)}
    detail = "7 requests of 3 passages in ranked order, document Zipf 0.5, passage Zipf 0.25, noise 0.1, seed 4; "
    assert detail in workload.provenance.line()


def test_ragpulse_settings_reach_the_workload():
    settings = RagPulse(requests=5, rate_rps=2.0, independent="all")
    workload = build_workload(RagPulseWorkload(ragpulse=settings), "unused")
    assert len(workload.requests) == 5
    assert workload.requests[-1].arrived_at == 2 * 10**9
    assert "gaps stretched to 2 requests a second, every component independent" in workload.provenance.line()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"kind": "rag", "rag": None}, "workload.kind=rag needs workload.rag: expected its keys (Rag)"),
        (
            {"kind": "quality", "ragpulse": {"requests": 3}},
            "workload.ragpulse.requests=3 with workload.kind=quality: expected workload.ragpulse.requests=null, "
            "for it goes with ragpulse",
        ),
        ({"kind": "rag", "rag": {"k": "six"}}, "workload.rag.k=six: expected a whole number"),
        ({"kind": "rag", "rag": 3}, "workload.rag=3: expected its keys, k, requests, zipf"),
        ({"kind": "rag", "rag": {"bogus": 3}}, "workload.rag.bogus: no such key; expected one of k, requests"),
        (
            {"kind": "rag", "rag": Rag(), "popularity": Popularity(requests=3)},
            "workload.popularity.requests=3 with workload.kind=rag: expected workload.popularity.requests=null, for it "
            "goes with alias_questions, chat_sessions, conversation, forked_sequence, log, narrativeqa, quality, "
            "queries, repeated_documents, synthetic, system_prompts, tokenised (did you mean workload.rag.requests?)",
        ),
        (
            {"kind": "ragpulse", "ragpulse": RagPulse(), "popularity": Popularity(requests=3)},
            "workload.popularity.requests=3 with workload.kind=ragpulse: expected",
        ),
        (
            {"kind": "ragpulse", "ragpulse": RagPulse(), "source": "local", "path": "x", "tokenizer": "y"},
            "workload.tokenizer=y with workload.kind=ragpulse: expected workload.tokenizer=null",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(options: dict, sentence: str):
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        WORKLOADS.of("workload", options)
