"""Queues with known answers, served by the real scheduler and server: theory must lie inside the interval found."""

import math
from collections.abc import Callable, Iterable

import numpy as np
import pytest

from spanlab.core import placement
from spanlab.core.backend import StepResult
from spanlab.core.batch_rules import BatchRules
from spanlab.core.budget import Budget
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.prefix_index import SharedIndex
from spanlab.core.request import Request, Span
from spanlab.core.reuse_rules import ReuseRules
from spanlab.core.scheduled import ScheduledStep
from spanlab.core.step_features import StepFeatures
from spanlab.core.store import Store
from spanlab.core.tree import PrefixTree
from spanlab.records import Record
from spanlab.stats import Interval, t_interval
from spanlab_sim.run import simulate
from spanlab_sim.timing import ConstantTiming

from ..support.queues import erlang_c, mg1_wait, mmc_wait

RUNS, LEVEL = 20, 0.999
SECOND = 1_000_000_000
PROMPT = (Span(np.array([1], dtype=np.int32)),)
ONE_SERVER = BatchRules(max_num_seqs=1, enable_chunked_prefill=False)
NO_CAP = BatchRules(max_num_batched_tokens=1 << 40, max_num_seqs=1 << 30)


class Scripted:
    """Each step takes the next of the given times: one job of one step after another, first come, first served."""

    def __init__(self, services: Iterable[int]) -> None:
        self._services = iter(services)

    def step(self, features: StepFeatures) -> int:
        return next(self._services)

    def span(self, features: StepFeatures, k: int):
        raise AssertionError("jobs of one step have nothing to jump")


def cold() -> TreePolicy:
    tree = PrefixTree()
    store = Store(tree, 1, 0, Budget(), "lru")
    return TreePolicy(ReuseRules(keeps=False), store, SharedIndex(tree), placement.no_states())


def serve(arrivals, outputs, rules, timing, **options) -> list[Record]:
    """Records in order of arrival."""
    requests = [
        Request(i, 0, PROMPT, int(n), int(time)) for i, (time, n) in enumerate(zip(arrivals, outputs, strict=True))
    ]
    records: list[Record] = []
    simulate(requests, cold(), rules, timing, records.append, **options)
    return sorted(records, key=lambda record: record.request_id)


def poisson(rng: np.random.Generator, rate: float, n: int) -> np.ndarray:
    return np.rint(np.cumsum(rng.standard_exponential(n)) * SECOND / rate).astype(np.int64)


def ns(seconds: list[float]) -> np.ndarray:
    return np.rint(np.array(seconds) * SECOND).astype(np.int64)


def waits(records: list[Record]) -> np.ndarray:
    return np.array([record.admitted_s - record.arrived_s for record in records])


def sojourns(records: list[Record]) -> np.ndarray:
    return np.array([record.finished_s - record.arrived_s for record in records])


def generators(*key: int) -> list[np.random.Generator]:
    return [np.random.default_rng(child) for child in np.random.SeedSequence(key).spawn(RUNS)]


def agree(found: Interval, theory: float, within: float, allowance: float = 0.0) -> None:
    """Theory lies in the interval, and the interval is narrower than `within` times theory on either side."""
    half = found.mean - found.low
    print(f"theory {theory:.5g}, found {found.mean:.5g} ± {half:.2g} ({half / theory:.1%})")
    assert half <= within * theory, "too few jobs to say anything"
    assert found.low - allowance <= theory <= found.high + allowance


# -- one server -------------------------------------------------------------------------------------------------------

SPLIT = (1 + math.sqrt(3 / 5)) / 2  # hyperexponential with balanced means and a squared coefficient of variation of 4
RATES = np.array([2 * SPLIT, 2 * (1 - SPLIT)])
Draw = Callable[[np.random.Generator, int], np.ndarray]
#: Service of mean 1: E[S²], a draw, and a draw of what is left of a service that is found going on.
SERVICES: dict[str, tuple[float, Draw, Draw]] = {
    "M/M/1": (2.0, lambda rng, n: rng.standard_exponential(n), lambda rng, n: rng.standard_exponential(n)),
    "M/D/1": (1.0, lambda rng, n: np.ones(n), lambda rng, n: rng.random(n)),
    "M/G/1": (
        5.0,
        lambda rng, n: rng.standard_exponential(n) / RATES[(rng.random(n) > SPLIT).astype(int)],
        lambda rng, n: rng.standard_exponential(n) / RATES[rng.integers(0, 2, n)],
    ),
}


def one_server(kind: str, rho: float, rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray, list[Record]]:
    """Arrivals, services and records of n jobs behind a first one, which brings the work of a server in steady state:
    a geometric number of residual services. So there is no warm-up to drop and no bias to fear."""
    _, draw, residual = SERVICES[kind]
    work = residual(rng, rng.geometric(1 - rho) - 1).sum()
    arrivals = np.concatenate([[0], poisson(rng, rho, n)])
    services = np.rint(np.concatenate([[work], draw(rng, n)]) * SECOND).astype(np.int64)
    return arrivals, services, serve(arrivals, [1] * (n + 1), ONE_SERVER, Scripted(services.tolist()))


@pytest.mark.parametrize("rho", [0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("kind", SERVICES)
def test_every_job_waits_as_lindley_says(kind, rho):
    arrivals, services, records = one_server(kind, rho, np.random.default_rng(5), 2_000)
    waited, expected = 0, []
    for gap, service in zip(np.diff(arrivals, append=arrivals[-1]).tolist(), services.tolist(), strict=True):
        expected.append(waited)
        waited = max(0, waited + service - gap)
    measured = ns([record.admitted_s for record in records]) - arrivals
    assert measured.tolist() == expected
    assert (ns([record.finished_s for record in records]) - arrivals - measured).tolist() == services.tolist()


def check_one_server(kind: str, rho: float, n: int, within: float) -> None:
    means = [waits(one_server(kind, rho, rng, n)[2])[1:].mean() for rng in generators(1, int(10 * rho))]
    agree(t_interval(means, LEVEL), mg1_wait(rho, 1.0, SERVICES[kind][0]), within)


@pytest.mark.parametrize(("rho", "n"), [(0.3, 1_500), (0.5, 2_000)])  # higher loads need more jobs: below
@pytest.mark.parametrize("kind", SERVICES)
def test_one_server_waits_as_pollaczek_and_khinchine_say(kind, rho, n):
    check_one_server(kind, rho, n, within=0.2 if kind == "M/D/1" else 0.35)


@pytest.mark.slow
@pytest.mark.parametrize(("rho", "n"), [(0.3, 20_000), (0.5, 40_000), (0.7, 60_000), (0.9, 120_000)])
@pytest.mark.parametrize("kind", SERVICES)
def test_one_server_waits_as_pollaczek_and_khinchine_say_closely(kind, rho, n):
    check_one_server(kind, rho, n, within=0.10 if kind == "M/G/1" else 0.06)


# -- a batch of constant steps: c servers, seated at step boundaries --------------------------------------------------


def batch_wait(rate: float, step_s: float, mean_steps: float, seats: int, states: int = 600) -> float:
    """Mean wait where up to `seats` jobs share steps of `step_s` and each ends at a step's end with 1 / mean_steps.

    The Markov chain of the number in system at step boundaries, solved; an empty system starts a step at the next
    arrival, and whoever comes during a step waits for its end.
    """
    jobs = np.arange(states)
    counts = np.arange(states + 1)
    factorials = np.cumsum(np.log(np.maximum(counts, 1)))
    arrive = np.exp(counts * math.log(rate * step_s) - rate * step_s - factorials)
    move = np.zeros((states, states))
    for x in jobs.tolist():
        busy = min(max(x, 1), seats)
        for gone in range(busy + 1):
            weight = math.comb(busy, gone) * mean_steps**-gone * (1 - 1 / mean_steps) ** (busy - gone)
            remaining = max(x, 1) - gone
            move[x, remaining:] += weight * arrive[: states - remaining]
    move[:, -1] += 1 - move.sum(axis=1)
    system = np.vstack([(move.T - np.eye(states))[1:], np.ones(states)])
    chance = np.linalg.solve(system, np.eye(states)[-1])
    queued = (chance * np.maximum(np.maximum(jobs, 1) - seats, 0)).sum() * step_s + rate * step_s**2 / 2
    return float(queued / rate / (step_s + chance[0] / rate))


@pytest.mark.parametrize("rho", [0.5, 0.8])
def test_the_batch_wait_of_one_seat_is_that_of_a_queue_with_geometric_service(rho):
    steps = 50
    second_moment = (2 - 1 / steps) / steps**-2 / steps**2  # of steps, over their squared mean
    assert batch_wait(rho, 1 / steps, steps, 1) == pytest.approx(mg1_wait(rho, 1.0, second_moment), rel=1e-7)


@pytest.mark.parametrize("seats", [2, 8])
def test_the_batch_wait_less_half_a_step_is_close_to_erlang_c(seats):
    rate, step = 0.8 * seats, 1 / 50
    assert erlang_c(seats, rate) > 0.4
    assert batch_wait(rate, step, 50, seats) - step / 2 == pytest.approx(mmc_wait(rate, 1.0, seats), rel=0.02)
    assert batch_wait(rate, step / 40, 2_000, seats) == pytest.approx(mmc_wait(rate, 1.0, seats), rel=0.002)


def check_batch(seats: int, n: int, within: float) -> None:
    step, mean_steps = 1 / 50, 50
    timing, rules = ConstantTiming(0.0, seconds_per_step=step), BatchRules(max_num_seqs=seats)
    means = []
    for rng in generators(2, seats):
        records = serve(poisson(rng, 0.8 * seats, n), rng.geometric(1 / mean_steps, n), rules, timing)
        means.append(waits(records[n // 5 :]).mean())
    interval = t_interval(means, LEVEL)
    agree(interval, batch_wait(0.8 * seats, step, mean_steps, seats), within)
    boundary = step / 2 if seats > 1 else 0.0  # a lone server is idle or full: nobody waits for a mere boundary
    agree(interval, mmc_wait(0.8 * seats, 1.0, seats) + boundary, within)


@pytest.mark.parametrize("seats", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(8, marks=pytest.mark.slow)])
def test_seats_of_constant_steps_are_servers(seats):
    check_batch(seats, 3_000, within=0.3)


@pytest.mark.slow
@pytest.mark.parametrize("seats", [1, 2, 8])
def test_seats_of_constant_steps_are_servers_closely(seats):
    check_batch(seats, 40_000, within=0.08)


# -- steps that take as long as their batch is large: processor sharing -----------------------------------------------

#: Output lengths of mean 200.
LENGTHS: dict[str, Draw] = {
    "geometric": lambda rng, n: rng.geometric(1 / 200, n),
    "equal": lambda rng, n: np.full(n, 200),
    "two_sizes": lambda rng, n: np.where(rng.random(n) < 0.9, 40, 1_640),
}


def check_sharing(lengths: str, n: int, within: float) -> None:
    rho, token = 0.7, 1 / 200
    timing = ConstantTiming(token)
    by_size: dict[int, list[float]] = {0: []}
    for rng in generators(3):
        outputs = LENGTHS[lengths](rng, n)
        time = sojourns(serve(poisson(rng, rho, n), outputs, NO_CAP, timing))[n // 5 :]
        by_size[0].append(time.mean())
        if lengths == "two_sizes":
            for size in (40, 1_640):
                by_size.setdefault(size, []).append(time[outputs[n // 5 :] == size].mean())
    for size, means in by_size.items():
        # Service comes a token at a time: sooner or later by up to the mean step, token / (1 − ρ).
        agree(t_interval(means, LEVEL), (size or 200) * token / (1 - rho), within, allowance=token / (1 - rho))


@pytest.mark.parametrize("lengths", LENGTHS)
def test_steps_as_long_as_their_batch_share_the_processor(lengths):
    check_sharing(lengths, 2_000, within=0.25)


@pytest.mark.slow
@pytest.mark.parametrize("lengths", LENGTHS)
def test_steps_as_long_as_their_batch_share_the_processor_closely(lengths):
    check_sharing(lengths, 20_000, within=0.1)


# -- no cap: nobody waits for a seat ----------------------------------------------------------------------------------


def test_without_a_cap_the_number_in_system_is_poisson():
    rate, step, n = 20.0, 1 / 50, 2_400
    means, variances, delays = [], [], []
    for rng in generators(4):
        outputs = np.where(rng.random(n) < 0.5, 20, 80)
        records = serve(poisson(rng, rate, n), outputs, NO_CAP, ConstantTiming(0.0, seconds_per_step=step))
        arrived = np.array([record.arrived_s for record in records])
        gone = np.sort([record.finished_s for record in records])
        # Further apart than the longest stay, so that the counts are independent.
        times = np.arange(5.0, arrived[-1], 80 * step + 2 * step)
        present = np.searchsorted(arrived, times, side="right") - np.searchsorted(gone, times, side="right")
        means.append(present.mean())
        variances.append(present.var(ddof=1))
        delays.append(waits(records).mean())
    agree(t_interval(delays, LEVEL), step / 2, within=0.05)  # of a step that somebody else has begun
    agree(t_interval(means, LEVEL), rate * (1.0 + step / 2), within=0.05)
    agree(t_interval(variances, LEVEL), rate * (1.0 + step / 2), within=0.2)


# -- saturation and conservation of time ------------------------------------------------------------------------------


@pytest.mark.parametrize("seats", [1, 7, 64])
def test_a_full_batch_makes_b_tokens_per_step_of_a_plus_b_times_b(seats):
    timing = ConstantTiming(0.000_05, seconds_per_step=0.003)
    records = serve([0] * (5 * seats), [30] * (5 * seats), BatchRules(max_num_seqs=seats), timing)
    end = int(ns([max(record.finished_s for record in records)])[0])
    assert end == 5 * 30 * (3_000_000 + 50_000 * seats)
    tokens = sum(record.output_tokens for record in records)
    assert tokens / (end / SECOND) == pytest.approx(seats / (0.003 + 0.000_05 * seats), rel=1e-12)


def test_a_backlog_of_mixed_lengths_keeps_the_batch_full():
    rng, seats = np.random.default_rng(6), 8
    timing = ConstantTiming(0.000_05, seconds_per_step=0.003)
    steps: list[tuple[int, ScheduledStep]] = []
    records = serve(
        [0] * 200,
        rng.integers(1, 100, 200),
        BatchRules(max_num_seqs=seats),
        timing,
        on_step=lambda step, now, result: steps.append((now, step)),
    )
    last_admitted = int(ns([max(record.admitted_s for record in records)])[0])
    full = [step for now, step in steps if now < last_admitted]
    assert {len(step.chunks) + len(step.decodes) for step in full} == {seats}
    assert last_admitted == sum(step.repeats for step in full) * 3_400_000


@pytest.mark.parametrize("seats", [3, 1 << 30])
def test_little_holds_from_empty_to_empty(seats):
    rng, n = np.random.default_rng(7), 3_000
    timing = ConstantTiming(0.002, seconds_per_step=0.01, seconds_per_decode_token=0.001)
    served = 0

    def on_step(step: ScheduledStep, now: int, result: StepResult) -> None:
        nonlocal served
        served += result.duration_ns * (len(step.chunks) + len(step.decodes))

    rules = BatchRules(max_num_batched_tokens=1 << 40, max_num_seqs=seats)
    records = serve(poisson(rng, 2.0, n), rng.integers(1, 60, n), rules, timing, on_step=on_step)
    admitted, finished = (ns([getattr(record, key) for record in records]) for key in ("admitted_s", "finished_s"))
    assert served == (finished - admitted).sum()  # the area under the batch size is the time spent in the batch
    arrived = ns([record.arrived_s for record in records])
    ends = np.sort(np.concatenate([arrived, finished]))
    present = np.searchsorted(np.sort(arrived), ends, "right") - np.searchsorted(np.sort(finished), ends, "right")
    horizon = float(ends[-1])
    mean_number = (present[:-1] * np.diff(ends)).sum() / horizon
    assert mean_number == pytest.approx(n / horizon * (finished - arrived).mean(), rel=1e-9)
    assert present[-1] == 0
