"""Novel requests of the workload rag, and their arrival stream."""

import numpy as np
import pytest

from spanlab.core.protocol import novel_requests
from spanlab.core.request import Request, Span
from spanlab.workloads import load_workload
from spanlab.workloads.rag import Rag, RagWorkload
from spanlab_sim.arrivals import NovelStream

RAG = {"requests": 60, "k": 3}


def loaded(**options):
    return load_workload(RagWorkload(documents=3, rag=Rag(**RAG, **options)))


def test_novel_requests_share_their_opening_alone():
    plain, grown = loaded(), loaded(novel=20)
    existing, novel = grown.requests[:60], grown.requests[60:]
    assert [request.tokens.tolist() for request in existing] == [request.tokens.tolist() for request in plain.requests]
    assert [request.id for request in novel] == list(range(60, 80))
    lengths = {tuple(len(span.tokens) for span in request.spans) for request in existing}
    for request in novel:
        assert request.spans[0] is existing[0].spans[0]
        assert tuple(len(span.tokens) for span in request.spans) in lengths
    fresh = [set(np.concatenate([span.tokens for span in request.spans[1:]]).tolist()) for request in novel]
    assert sum(map(len, fresh)) == len(set().union(*fresh))
    assert not set().union(*fresh) & {token for request in existing for token in request.tokens.tolist()}
    assert len({request.group_id for request in novel} | {request.group_id for request in existing}) == 20 + len(
        {request.group_id for request in existing}
    )


def test_novel_requests_are_found_by_their_passages():
    grown = loaded(novel=20)
    assert novel_requests(grown.requests) >= set(range(60, 80))
    passage, other = (Span(np.arange(start, start + 4, dtype=np.int32), independent=True) for start in (0, 10))
    copy = Span(passage.tokens.copy(), independent=True)
    requests = [Request(0, 0, (passage,)), Request(1, 1, (other,)), Request(2, 2, (copy,)), Request(3, 3, ())]
    assert novel_requests(requests) == {1}


def test_stream_begins_with_known_requests():
    requests = loaded(novel=20).requests
    novel = novel_requests(requests)
    streams = [
        NovelStream(clients=1, known_first=25).arrive(requests, np.random.default_rng(seed)) for seed in range(3)
    ]
    for stream in streams:
        assert sorted(request.id for request in stream) == list(range(80))
        assert not novel & {request.id for request in stream[:25]}
        assert novel & {request.id for request in stream[25:50]}
    assert len({tuple(request.id for request in stream) for stream in streams}) == 3


def test_stream_without_novel_requests_is_refused():
    requests = [request for request in loaded().requests if request.id not in novel_requests(loaded().requests)]
    with pytest.raises(
        ValueError, match=r"^arrivals\.known_first=5 with \d+ known and 0 novel requests: expected fewer"
    ):
        NovelStream(clients=1, known_first=5).arrive(requests, np.random.default_rng(0))


def test_negative_number_of_novel_requests_is_refused():
    with pytest.raises(ValueError, match=r"^workload\.rag\.novel=-1: expected zero or more"):
        Rag(novel=-1)
