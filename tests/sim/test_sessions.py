"""Requests that wait for others: turns of sessions after think times, joins of agents, closed queues."""

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spanlab.core.admission import BatchRules
from spanlab.core.request import Request, Span
from spanlab.records import Record
from spanlab.stats import t_interval
from spanlab_sim.arrivals import Sessions, resample
from spanlab_sim.server import Source
from spanlab_sim.timing import ConstantTiming

from .serving import ONE_SERVER, SECOND, WORD, Scripted, agree, check_little, ns, serve_cold

TIMING = ConstantTiming(0.001, 0.002, 0.003)


def served(requests, rules=None, timing=TIMING, **options) -> dict[int, Record]:
    """Records by request, without any reuse."""
    records = serve_cold(requests, rules or BatchRules(max_num_seqs=4), timing, **options)
    return {record.request_id: record for record in records}


def chains(clients: int, turns: int, waits: Sequence[int], output: int = 1) -> list[Request]:
    """`clients` sessions that all start at zero; `waits` are those of all turns, session by session."""
    return [
        Request(i, i // turns, WORD, output, after=(i - 1,) if i % turns else (), wait_ns=waits[i])
        for i in range(clients * turns)
    ]


# -- order ------------------------------------------------------------------------------------------------------------


@st.composite
def graphs(draw) -> list[Request]:
    """Requests that wait for some of those before them, or for none, with times of their own."""
    count = draw(st.integers(1, 20))
    requests = []
    for i in range(count):
        after = draw(st.sets(st.integers(0, i - 1), max_size=3)) if i else set()
        wait, time = draw(st.integers(0, 30)) * 1_000_000, draw(st.integers(0, 60)) * 1_000_000
        prompt = (Span(np.arange(draw(st.integers(1, 20)), dtype=np.int32)),)
        requests.append(Request(i, 0, prompt, draw(st.integers(1, 8)), time, after=tuple(after), wait_ns=wait))
    return sorted(requests, key=lambda request: request.arrived_at)


@given(requests=graphs(), seats=st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_a_request_waits_for_all_that_it_names(requests, seats):
    rules = BatchRules(max_num_seqs=seats)
    records = served(requests, rules)
    assert records == served(requests, rules, jump=False)
    for request in requests:
        ends = [ns(records[other].finished_s) + request.wait_ns for other in request.after]
        assert ns(records[request.id].arrived_s) == max([request.arrived_at, *ends])


@given(requests=graphs(), clients=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_clients_limit_requests_that_wait_too(requests, clients):
    records = list(served(requests, clients=clients).values())
    assert len(records) == len(requests)
    for record in records:
        inside = [other for other in records if other.arrived_s <= record.arrived_s < other.finished_s]
        assert len(inside) <= clients


def test_warm_up_is_the_first_that_arrive():
    requests = chains(2, 3, [0, 10 * SECOND, 0, 0, 0, 0])
    records = served(requests, warmup=3)
    early = sorted(records.values(), key=lambda record: record.arrived_s)[:4]
    assert [record.counted for record in early] == [False, False, False, True]
    assert [record.counted for record in records.values()].count(False) == 3


@pytest.mark.parametrize(
    ("after", "wait", "said"),
    [
        ({1: (7,)}, 0, r"^request\.after=\(7,\) of request 1: expected ids of requests, there is no request 7$"),
        ({1: (0,)}, -1, r"^request\.wait_ns=-1 of request \d: expected 0 or more$"),
        ({0: (2,), 1: (0,), 2: (1,)}, 0, r"^request\.after of request \d waits for \d waits for \d waits for \d: exp"),
        ({1: (1,)}, 0, r"^request\.after of request 1 waits for 1: expected requests that finish before it$"),
    ],
)
def test_refuses_what_could_never_arrive(after, wait, said):
    requests = [replace(one, after=after.get(one.id, ()), wait_ns=wait) for one in chains(3, 1, [0] * 3)]
    with pytest.raises(ValueError, match=said):
        Source(requests)


def test_refuses_to_draw_requests_that_wait():
    with pytest.raises(ValueError, match="requests wait for others"):
        resample(chains(2, 2, [0] * 4), 3, 0.0, np.random.default_rng(0))


# -- the arrival process ----------------------------------------------------------------------------------------------


def turns_of(groups: int, turns: int) -> list[Request]:
    return [Request(i, i // turns, WORD, 2, arrived_at=(i // turns) * 1_000) for i in range(groups * turns)]


def drawn(requests, seed=0, **options) -> dict[int, Request]:
    return {request.id: request for request in Sessions(**options).arrive(requests, np.random.default_rng(seed))}


def test_each_turn_follows_the_one_before_it():
    requests = drawn(turns_of(5, 4), think_s=2.0)
    assert all(requests[i].after == ((i - 1,) if i % 4 else ()) for i in range(20))
    assert [requests[4 * group].arrived_at for group in range(5)] == [0, 1_000, 2_000, 3_000, 4_000]
    assert 0.5 < np.mean([requests[i].wait_ns for i in range(20) if i % 4]) / (2 * SECOND) < 2.0


def test_constant_think_times_are_constant():
    requests = drawn(turns_of(3, 3), think_s=1.5, think="constant")
    assert {request.wait_ns for request in requests.values()} == {1_500_000_000}


def test_another_rate_stretches_starts_alone():
    slow, fast = (drawn(turns_of(6, 2), rate_rps=rate, think_s=1.0) for rate in (1.0, 2.0))
    for i in range(12):
        assert slow[i].arrived_at == pytest.approx(2 * fast[i].arrived_at, abs=1)
        assert slow[i].wait_ns == fast[i].wait_ns
    assert len({request.arrived_at for request in slow.values()}) == 6


def test_recorded_think_times_are_used():
    recorded = [replace(request, wait_ns=1_000 * request.id) for request in turns_of(2, 3)]
    assert [request.wait_ns for request in drawn(recorded).values()] == [1_000 * i for i in range(6)]
    with pytest.raises(ValueError, match=r"^arrivals\.think_s=1\.0: expected null"):
        drawn(recorded, think_s=1.0)


def test_unknown_think_times_are_refused():
    with pytest.raises(ValueError, match=r"^arrivals\.think_s=null: expected a mean think time"):
        drawn(turns_of(2, 3))


def test_agents_that_join_keep_their_order():
    fork = [
        Request(0, 0, WORD),
        Request(1, 0, WORD, after=(0,)),
        Request(2, 0, WORD, after=(0,)),
        Request(3, 0, WORD, after=(1, 2)),
    ]
    requests = drawn(fork, think_s=0.0, rate_rps=1.0)
    assert [requests[i].after for i in range(4)] == [(), (0,), (0,), (1, 2)]


# -- closed queues ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("clients", "think"), [(1, 3 * SECOND), (7, SECOND // 3), (20, 0)])
def test_throughput_of_equal_clients_is_n_over_r_plus_z(clients, think):
    turns = 12
    requests = chains(clients, turns, [think] * clients * turns, output=30)
    records = served(requests, BatchRules(max_num_seqs=64))
    response = np.mean([record.finished_s - record.arrived_s for record in records.values()])
    horizon = max(record.finished_s for record in records.values()) + think / SECOND
    assert len(records) / horizon == pytest.approx(clients / (response + think / SECOND), rel=1e-9)


@pytest.mark.parametrize("seats", [1, 3, 64])
def test_each_client_obeys_the_response_time_law(seats):
    rng, clients, turns = np.random.default_rng(3), 6, 25
    waits = ns(1) * rng.standard_exponential(clients * turns)
    requests = chains(clients, turns, np.rint(waits).astype(int).tolist(), output=9)
    records = served(requests, BatchRules(max_num_seqs=seats))
    for group in range(clients):
        client_records = [records[i] for i in range(group * turns, (group + 1) * turns)]
        responses = sum(ns(record.finished_s) - ns(record.arrived_s) for record in client_records)
        thought = sum(requests[record.request_id].wait_ns for record in client_records[1:])
        assert ns(client_records[-1].finished_s) - ns(client_records[0].arrived_s) == responses + thought
        assert all(a.finished_s <= b.arrived_s for a, b in itertools.pairwise(client_records))


def repairman(clients: int, think_s: float, service_s: float) -> float:
    """Throughput of M/M/1//N: machines that break after a mean of `think_s`, and one repairman."""
    weights = [math.perm(clients, k) * (service_s / think_s) ** k for k in range(clients + 1)]
    return (1 - weights[0] / sum(weights)) / service_s


def drawn_turns(rng: np.random.Generator, clients: int, think_s: float, turns: int) -> tuple[list[int], list[int]]:
    """Think times, session by session, and services, all exponential; services have a mean of one second."""
    waits, services = (
        np.rint(SECOND * mean * rng.standard_exponential(clients * turns)).astype(np.int64) for mean in (think_s, 1.0)
    )
    return waits.tolist(), services.tolist()


def ends_of(clients: int, waits: list[int], services: list[int]) -> list[int]:
    """Ends of the turns of `clients` sessions at one server, first come, first served, in nanoseconds."""
    turns, now, ends = len(waits) // clients, 0, [0] * len(waits)
    due = [(0, client * turns) for client in range(clients)]
    for service in services:
        arrived, turn = heapq.heappop(due)
        now = ends[turn] = max(now, arrived) + service
        if (turn + 1) % turns:
            heapq.heappush(due, (now + waits[turn + 1], turn + 1))
    return ends


def test_every_turn_ends_as_its_queue_says():
    """The queues below are those of served sessions, to the nanosecond."""
    waits, services = drawn_turns(np.random.default_rng(9), 7, 6.0, 100)
    records = served(chains(7, 100, waits), ONE_SERVER, Scripted(services))
    assert [ns(records[i].finished_s) for i in range(700)] == ends_of(7, waits, services)


@pytest.mark.parametrize(("clients", "think_s"), [(4, 6.0), (12, 6.0)])
def test_throughput_is_that_of_machines_and_a_repairman(clients, think_s):
    turns, expected, measured = 1_000, repairman(clients, think_s, 1.0), []
    for seed in np.random.SeedSequence([8, clients]).spawn(20):
        ends = np.array(ends_of(clients, *drawn_turns(np.random.default_rng(seed), clients, think_s, turns))) / SECOND
        start, stop = 0.15 * turns * clients / expected, 0.7 * turns * clients / expected
        assert all(ends[turns - 1 :: turns] > stop), "all still ask"
        measured.append(((start < ends) & (ends <= stop)).sum() / (stop - start))
    agree(t_interval(measured, 0.999), expected, within=0.02)


def test_little_holds_where_requests_wait_for_others():
    rng, clients, turns = np.random.default_rng(11), 9, 40
    waits = np.rint(SECOND * rng.standard_exponential(clients * turns) * 0.2).astype(int).tolist()
    batch = 0

    def on_step(step, now, result) -> None:
        nonlocal batch
        batch += result.duration_ns * (len(step.chunks) + len(step.decodes))

    records = served(chains(clients, turns, waits, output=12), BatchRules(max_num_seqs=3), on_step=on_step).values()
    assert batch == sum(ns(record.finished_s) - ns(record.admitted_s) for record in records)
    check_little(records)
