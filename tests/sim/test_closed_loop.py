"""Closed loops: arrivals at the moments when others finish."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spanlab.core.admission import BatchRules
from spanlab.core.request import Request, Span
from spanlab_sim.arrivals import ClosedLoop
from spanlab_sim.timing import ConstantTiming

from .serving import serve_cold


def requests(lengths: list[tuple[int, int]]) -> list[Request]:
    """Requests of (prompt, output) tokens without anything in common, two to a group."""
    ends = np.cumsum([0, *(prompt for prompt, _ in lengths)])
    spans = [Span(np.arange(start, stop, dtype=np.int32)) for start, stop in itertools.pairwise(ends)]
    return [
        Request(index, index // 2, (span,), output_len=output)
        for index, (span, (_, output)) in enumerate(zip(spans, lengths, strict=True))
    ]


def served(asked: list[Request], clients: int | None):
    records = serve_cold(asked, BatchRules(max_num_seqs=8), ConstantTiming(0.001, 0.002), clients=clients)
    return sorted(records, key=lambda record: record.arrived_s)


@given(lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 6)), min_size=2, max_size=12))
@settings(max_examples=40, deadline=None)
def test_one_client_sends_after_its_last_answer(lengths):
    records = served(requests(lengths), 1)
    for before, after in itertools.pairwise(records):
        assert after.arrived_s == before.finished_s
        assert after.admitted_s == after.arrived_s


def test_without_clients_nothing_waits():
    records = served(requests([(10, 2)] * 4), None)
    assert {record.arrived_s for record in records} == {0.0}


def test_groups_are_shuffled_and_keep_their_order():
    issued = requests([(4, 1)] * 20)
    arriving = ClosedLoop(clients=1).arrive(issued, np.random.default_rng(3))
    assert sorted(request.id for request in arriving) == list(range(20))
    assert [request.id for request in arriving] != list(range(20))
    assert all(second.id == first.id + 1 for first, second in zip(arriving[::2], arriving[1::2], strict=True))
    assert all(request.arrived_at == 0 for request in arriving)


def test_refuses_no_clients():
    with pytest.raises(ValueError, match="clients"):
        ClosedLoop(clients=0).arrive(requests([(4, 1)]), np.random.default_rng(0))
