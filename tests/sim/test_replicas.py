"""Several engines behind one router: assignment of requests, queues with known answers, conservation."""

import heapq
import math
from collections import Counter, defaultdict, deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spanlab.core.admission import BatchRules
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.request import Budget, Request, Span
from spanlab.core.rules import ReuseRules
from spanlab.records import LOSS_CAUSES, RoutedRecord, RunRow
from spanlab.stats import Interval, t_interval
from spanlab_sim import routing
from spanlab_sim.routing import ROUTERS
from spanlab_sim.run import Run, RunSpec, modelled
from spanlab_sim.timing import ConstantTiming

from ..support.policies import make_tree_policy
from ..support.queues import mg1_wait, mmc_wait
from .serving import ONE_SERVER, SECOND, WORD, Scripted, agree, check_little, ns, poisson, serve
from .test_random_runs import seen_by_hand

TIMING = ConstantTiming(0.001, 0.002, 0.003)
KEYS = ("cache_weight", "load_weight", "events_delay_s", "events_lost")
EXACT = ("round_robin", "random", "least_loaded", "prefix_aware", "session_sticky", "weighted")


def cache(tokens: int | None = None, keeps: bool = True) -> TreePolicy:
    """A tree of blocks of four tokens, one byte each."""
    budget = Budget() if tokens is None else Budget(kv_bytes=tokens)
    return make_tree_policy(ReuseRules(keeps=keeps), budget=budget, block_size=4)


def served(requests, routing: str, count: int, **options) -> tuple[dict[int, RoutedRecord], RunRow]:
    """Records by request, and the row of the run."""
    keys = {key: options.pop(key) for key in KEYS if key in options}
    rules, timing = options.pop("rules", BatchRules(max_num_seqs=4)), options.pop("timing", TIMING)
    policies = options.pop("policies", None) or [cache() for _ in range(count)]
    router = ROUTERS.of("replicas", {"routing": routing, "count": count, **keys})
    route = lambda replicas: router.route(replicas, np.random.default_rng(5))  # noqa: E731
    records: list[RoutedRecord] = []
    run_options = {key: options.pop(key) for key in ("on_step", "loads") if key in options}
    engines = modelled(policies, rules, timing, options.pop("jump", True))
    row = Run(RunSpec(requests, rules, **options), engines, records.append, route=route, **run_options).serve()
    return {record.request_id: record for record in records}, row


@st.composite
def workloads(draw) -> list[Request]:
    """Sessions over few documents, open and closed, in order of their earliest arrival."""
    requests: list[Request] = []
    for i in range(draw(st.integers(1, 24))):
        group, time = draw(st.integers(0, 4)), draw(st.integers(0, 40)) * 500_000
        tokens = np.arange(draw(st.integers(1, 30)), dtype=np.int32) + 100 * draw(st.integers(0, 2))
        before = [one.id for one in requests if one.group_id == group]
        after = (before[-1],) if before and draw(st.booleans()) else ()
        wait = draw(st.integers(0, 20)) * 500_000
        output = draw(st.integers(1, 12))
        requests.append(Request(i, group, (Span(tokens),), output, time, after=after, wait_ns=wait))
    return sorted(requests, key=lambda request: request.arrived_at)


# -- where requests go ------------------------------------------------------------------------------------------------


@given(requests=workloads(), routing=st.sampled_from(EXACT), count=st.integers(2, 4))
@settings(max_examples=80, deadline=None)
def test_jumping_and_stepping_agree_on_several_replicas(requests, routing, count):
    jumped, stepped = (served(requests, routing, count, jump=jump) for jump in (True, False))
    assert jumped[0] == stepped[0]
    assert [replica_row.busy_s for replica_row in jumped[1].replicas] == [
        replica_row.busy_s for replica_row in stepped[1].replicas
    ]


@pytest.mark.parametrize("jump", [True, False])
def test_steps_that_end_at_an_arrival_precede_its_routing(jump):
    requests = [Request(0, 0, WORD, 9), Request(1, 1, WORD, 6)]
    records, _ = served(requests, "least_loaded", 2, jump=jump)
    late = Request(2, 2, WORD, 1, arrived_at=ns(records[1].finished_s))
    records, _ = served([*requests, late], "least_loaded", 2, jump=jump)
    assert records[2].arrived_s == records[1].finished_s < records[0].finished_s
    assert [records[i].replica for i in range(3)] == [0, 1, 1]


@given(requests=workloads(), routing=st.sampled_from(EXACT))
@settings(max_examples=40, deadline=None)
def test_one_replica_is_one_engine(requests, routing):
    alone = serve(requests, cache(), TIMING, BatchRules(max_num_seqs=4))
    assert served(requests, routing, 1) == alone


def test_round_robin_takes_turns():
    requests = [Request(i, 0, WORD, 3, arrived_at=i) for i in range(7)]
    records, _ = served(requests, "round_robin", 3)
    assert [records[i].replica for i in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_least_loaded_counts_requests_then_tokens():
    lengths = (8, 4, 2, 2)
    spans = [(Span(np.arange(length, dtype=np.int32)),) for length in lengths]
    requests = [Request(i, 0, spans[i], 50, arrived_at=i) for i in range(4)]
    records, _ = served(requests, "least_loaded", 2)
    assert [records[i].replica for i in range(4)] == [0, 1, 1, 0]


def test_sessions_stay_where_they_began():
    rng = np.random.default_rng(2)
    requests = [Request(i, int(rng.integers(8)), WORD, 5, arrived_at=i * 1_000_000) for i in range(60)]
    records, _ = served(requests, "session_sticky", 3)
    places = defaultdict(set)
    for record in records.values():
        places[record.group_id].add(record.replica)
    assert {len(found) for found in places.values()} == {1}
    assert len(set.union(*places.values())) == 3


def test_prefix_aware_goes_where_most_is_cached():
    def prompt(*documents: int) -> tuple[Span, ...]:
        return tuple(Span(np.arange(8, dtype=np.int32) + 100 * document) for document in documents)

    spans = [(1,), (2,), (1, 3), (2, 4), (2, 4, 5), (1, 3, 6), (2,)]
    requests = [Request(i, i, prompt(*spans_of), 2, arrived_at=i * SECOND) for i, spans_of in enumerate(spans)]
    records, _ = served(requests, "prefix_aware", 2)
    # an idle system: nothing is cached of the first two, and the first replica is taken among equals
    assert {records[i].replica for i in (0, 2, 5)} == {0}
    assert [records[i].reused_tokens for i in range(7)] == [0, 0, 8, 8, 16, 16, 4]


def test_weights_of_zero_leave_the_other_term():
    rng = np.random.default_rng(4)
    spans = [Span(np.arange(20, dtype=np.int32) + 100 * document) for document in range(4)]
    requests = [Request(i, i, (spans[rng.integers(4)],), 6, arrived_at=i * 4_000_000) for i in range(80)]
    for weights, other in (((1.0, 0.0), "prefix_aware"), ((0.0, 1.0), "least_loaded")):
        keys = dict(zip(("cache_weight", "load_weight"), weights, strict=True))
        records, expected = served(requests, "weighted", 3, **keys)[0], served(requests, other, 3)[0]
        assert {i: record.replica for i, record in records.items()} == {
            i: record.replica for i, record in expected.items()
        }
    assert served(requests, "prefix_aware", 3)[0] != served(requests, "least_loaded", 3)[0]


def test_each_replica_has_a_store_of_its_own():
    spans = [(Span(np.arange(40, dtype=np.int32) + 100 * document),) for document in range(2)]
    requests = [Request(i, i % 2, spans[i % 2], 1, arrived_at=i * SECOND) for i in range(8)]
    alone, _ = served(requests, "round_robin", 1, policies=[cache(44)])
    assert sum(record.reused_tokens for record in alone.values()) == 0
    turns, row = served(requests, "round_robin", 2, policies=[cache(44), cache(44)])
    assert [turns[i].reused_tokens for i in range(8)] == [0, 0] + [36] * 6
    assert row.kv_resident_peak_bytes == 80


# -- conservation -----------------------------------------------------------------------------------------------------


@given(requests=workloads(), routing=st.sampled_from(EXACT), count=st.integers(2, 4))
@settings(max_examples=60, deadline=None)
def test_replicas_add_up_to_the_run(requests, routing, count):
    records, row = served(requests, routing, count)
    assert sorted(records) == sorted(request.id for request in requests)
    counted = Counter(record.replica for record in records.values())
    assert [replica_row.requests for replica_row in row.replicas] == [counted[number] for number in range(count)]
    assert sum(replica_row.busy_s for replica_row in row.replicas) == pytest.approx(row.busy_s, abs=1e-9)
    assert sum(replica_row.steps for replica_row in row.replicas) == row.steps
    for key in ("prompt_tokens", "reused_tokens", "preemptions"):
        assert sum(getattr(replica_row, key) for replica_row in row.replicas) == sum(
            getattr(r, key) for r in records.values()
        )
    for request in requests:
        ends = [ns(records[other].finished_s) + request.wait_ns for other in request.after]
        assert ns(records[request.id].arrived_s) == max([request.arrived_at, *ends])


@pytest.mark.parametrize("routing", EXACT)
def test_little_holds_on_each_replica(routing):
    rng = np.random.default_rng(9)
    at = np.cumsum(rng.standard_exponential(600) * 4_000_000).astype(int).tolist()
    requests = [Request(i, i % 40, WORD, int(rng.integers(1, 20)), at[i]) for i in range(600)]
    records, _ = served(requests, routing, 3)
    for number in range(3):
        check_little(record for record in records.values() if record.replica == number)


# -- queues -----------------------------------------------------------------------------------------------------------


def drawn_jobs(rng: np.random.Generator, count: int, rho: float, jobs: int) -> tuple[list[int], list[int]]:
    """Arrivals and services of exponential jobs for `count` servers."""
    arrivals = poisson(rng, rho * count, jobs)
    return arrivals.tolist(), np.rint(SECOND * rng.standard_exponential(jobs)).astype(np.int64).tolist()


def queued(routing: str, count: int, arrivals: list[int], services: list[int]) -> list[int]:
    """Waits of jobs in `count` queues, in nanoseconds; a service that starts takes the next of the given times."""
    queues: list[deque[int]] = [deque() for _ in range(count)]
    waits, ends, times, rng = [0] * len(arrivals), [], iter(services), np.random.default_rng(5)

    def start(server: int, now: int) -> None:
        waits[queues[server][0]] = now - arrivals[queues[server][0]]
        heapq.heappush(ends, (now + next(times), server))

    for job, now in enumerate([*arrivals, math.inf]):
        while ends and ends[0][0] <= now:
            end, server = heapq.heappop(ends)
            queues[server].popleft()
            if queues[server]:
                start(server, end)
        if job < len(arrivals):
            lengths = [len(queue) for queue in queues]
            server = int(rng.integers(count)) if routing == "random" else lengths.index(min(lengths))
            queues[server].append(job)
            if not lengths[server]:
                start(server, now)
    return waits


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("routing", ["random", "least_loaded"])
def test_every_job_waits_as_its_queue_says(routing, count):
    """The queues below are those of served jobs, to the nanosecond."""
    arrivals, services = drawn_jobs(np.random.default_rng(4), count, 0.8, 1_500)
    requests = [Request(i, i, WORD, 1, time) for i, time in enumerate(arrivals)]
    policies, timing = [cache(keeps=False) for _ in range(count)], Scripted(services)
    records, _ = served(requests, routing, count, policies=policies, rules=ONE_SERVER, timing=timing)
    measured = [ns(records[i].admitted_s) - arrivals[i] for i in range(len(arrivals))]
    assert measured == queued(routing, count, arrivals, services)


def waits(routing: str, count: int, rho: float, jobs: int, key: int) -> Interval:
    """Mean wait over 20 runs, the first fifth of each left out."""
    means = []
    for seed in np.random.SeedSequence([key, count]).spawn(20):
        times = queued(routing, count, *drawn_jobs(np.random.default_rng(seed), count, rho, jobs))
        means.append(np.mean(times[jobs // 5 :]) / SECOND)
    return t_interval(means, 0.999)


@pytest.mark.parametrize("count", [2, 4])
def test_random_routing_makes_independent_queues(count):
    agree(waits("random", count, 0.6, 10_000, 1), mg1_wait(0.6, 1.0, 2.0), within=0.1)


def test_the_shortest_queue_lies_between_one_queue_and_many():
    rho, count = 0.7, 4
    interval = waits("least_loaded", count, rho, 10_000, 2)
    assert mmc_wait(rho * count, 1.0, count) < interval.low
    assert interval.high < mg1_wait(rho, 1.0, 2.0)


def test_two_shortest_queues_wait_as_published():
    """Two servers, join the shortest queue, a load of 0.5: the chain of both queue lengths, solved."""
    agree(waits("least_loaded", 2, 0.5, 10_000, 3), shortest_of_two(0.5), within=0.1)


def shortest_of_two(rho: float, longest: int = 40) -> float:
    """Mean wait of join-the-shortest-queue with two servers of rate 1, cut off at `longest` jobs each."""
    states = [(a, b) for a in range(longest + 1) for b in range(longest + 1)]
    number = {state: index for index, state in enumerate(states)}
    rates = np.zeros((len(states), len(states)))
    for a, b in states:
        joins = [(a + 1, b)] * 2 if a < b else [(a, b + 1)] * 2 if b < a else [(a + 1, b), (a, b + 1)]
        moves = [(joined, rho) for joined in joins] + [((a - 1, b), 1.0), ((a, b - 1), 1.0)]
        for state, rate in moves:
            if state in number:
                rates[number[a, b], number[state]] += rate
    rates -= np.diag(rates.sum(axis=1))
    system = np.vstack([rates.T[1:], np.ones(len(states))])
    chance = np.linalg.solve(system, np.eye(len(states))[-1])
    jobs = sum(share * (a + b) for share, (a, b) in zip(chance, states, strict=True))
    return float(jobs / (2 * rho) - 1)


# -- an index that is fed by messages ---------------------------------------------------------------------------------


def conversations(sessions: int, gap_ns: int) -> list[Request]:
    """Turns with known answers, far enough apart that each finds the system idle."""
    rng, requests = np.random.default_rng(6), []
    history = {group: np.arange(8, dtype=np.int32) + 1_000 * (group % 2) for group in range(sessions)}
    for i in range(60):
        group, fresh = int(rng.integers(sessions)), 10_000 + 100 * i
        prompt = np.concatenate([history[group], np.arange(rng.integers(1, 9), dtype=np.int32) + fresh])
        output = np.arange(rng.integers(1, 12), dtype=np.int32) + fresh + 50
        history[group] = np.concatenate([prompt, output])
        requests.append(Request(i, group, (Span(prompt),), len(output), i * gap_ns, output=output))
    return requests


@pytest.mark.parametrize("tokens", [None, 300])
def test_messages_without_delay_tell_what_is_cached(tokens, monkeypatch):
    compared = []

    def checked(self, request, now):
        reported = honest(self, request, now)
        compared.append((reported, lines[id(self)].scheduler.policy.match(request, now).matched))
        return reported

    honest, lines, attach = routing.EventChannel.prefix_tokens, {}, routing.BlockEvents.__init__

    def attached(self, replica, line):
        lines[id(line)] = replica
        attach(self, replica, line)

    monkeypatch.setattr(routing.EventChannel, "prefix_tokens", checked)
    monkeypatch.setattr(routing.BlockEvents, "__init__", attached)
    served(conversations(7, SECOND), "prefix_events", 3, policies=[cache(tokens) for _ in range(3)])
    assert len(compared) == 180
    assert all(reported == matched for reported, matched in compared)
    assert sum(reported > 8 for reported, _ in compared) > 30


@pytest.mark.parametrize("keys", [{"events_delay_s": 1e6}, {"events_lost": 1.0}])
def test_without_messages_only_the_load_counts(keys):
    requests = conversations(7, 3_000_000)
    records, expected = (
        served(requests, name, 3, **options)[0] for name, options in (("prefix_events", keys), ("least_loaded", {}))
    )
    assert {i: record.replica for i, record in records.items()} == {i: record.replica for i, record in expected.items()}


def test_late_messages_cost_reuse():
    requests = conversations(7, 40_000_000)
    reused = [
        sum(record.reused_tokens for record in served(requests, "prefix_events", 3, events_delay_s=delay)[0].values())
        for delay in (0.0, 0.5, 5.0)
    ]
    assert reused[0] > reused[1] > reused[2]


def test_messages_need_a_tree(monkeypatch):
    monkeypatch.setattr(routing, "TreePolicy", int)
    with pytest.raises(ValueError, match=r"^replicas\.routing=prefix_events: expected arms that keep prefixes"):
        served(conversations(2, SECOND), "prefix_events", 2)


def test_every_replica_has_seen_what_arrived_anywhere():
    """Questions on two documents, each a turn behind the answer before it, in turn on one, two or three replicas."""
    draw, requests = np.random.default_rng(0), list[Request]()
    texts = [draw.integers(0, 9, 20, np.int32) for _ in range(2)]
    for number in range(24):
        which, answer = int(draw.integers(2)), draw.integers(0, 9, 5, np.int32)
        salt = "b" if number % 5 == 4 else ""
        requests.append(Request(number, 0, (Span(texts[which]),), 5, number // 2 * 20_000_000, salt, output=answer))
        texts[which] = np.concatenate([texts[which], answer[: draw.integers(6)], draw.integers(0, 9, 2, np.int32)])
    expected = seen_by_hand(tuple(requests))
    out_of_reach = []
    for count in (1, 2, 3):
        records, _ = served(requests, "round_robin", count)
        assert {number: record.seen_tokens for number, record in records.items()} == expected
        for record in records.values():
            lost = [getattr(record, f"lost_{cause}") for cause in LOSS_CAUSES]
            assert min(lost) >= 0
            assert record.reused_tokens + sum(lost) == record.prompt_tokens
            assert record.lost_never_seen == record.prompt_tokens - record.seen_tokens
        out_of_reach.append(sum(record.lost_out_of_reach for record in records.values()))
    assert out_of_reach[0] < out_of_reach[1] < out_of_reach[2], "the other replicas have computed it"
