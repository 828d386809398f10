"""Queues with known answers, served by the real scheduler and server: theory must lie inside the interval found."""

import heapq
import math
from collections.abc import Callable

import numpy as np
import pytest

from spanlab.core.admission import BatchRules
from spanlab.core.request import Request
from spanlab.core.step import ScheduledStep, StepResult
from spanlab.records import Record
from spanlab.stats import t_interval
from spanlab_sim.timing import ConstantTiming

from ..support.queues import erlang_c, mg1_wait, mmc_wait
from .serving import ONE_SERVER, SECOND, WORD, Scripted, agree, check_little, poisson, serve_cold

RUNS, LEVEL = 20, 0.999
NO_CAP = 1 << 30


def serve(arrivals, outputs, rules, timing, **options) -> list[Record]:
    """Records in order of arrival."""
    requests = [
        Request(i, 0, WORD, int(n), int(time)) for i, (time, n) in enumerate(zip(arrivals, outputs, strict=True))
    ]
    return serve_cold(requests, rules, timing, **options)


def ns(seconds: list[float]) -> np.ndarray:
    return np.rint(np.array(seconds) * SECOND).astype(np.int64)


def generators(*key: int) -> list[np.random.Generator]:
    return [np.random.default_rng(child) for child in np.random.SeedSequence(key).spawn(RUNS)]


# -- one server -------------------------------------------------------------------------------------------------------

SPLIT = (1 + math.sqrt(3 / 5)) / 2  # hyperexponential with balanced means and a squared coefficient of variation of 4
RATES = np.array([2 * SPLIT, 2 * (1 - SPLIT)])
Draw = Callable[[np.random.Generator, int], np.ndarray]
#: Service of mean 1: E[S²], a draw, and a draw of the residual service.
SERVICES: dict[str, tuple[float, Draw, Draw]] = {
    "M/M/1": (2.0, lambda rng, n: rng.standard_exponential(n), lambda rng, n: rng.standard_exponential(n)),
    "M/D/1": (1.0, lambda rng, n: np.ones(n), lambda rng, n: rng.random(n)),
    "M/G/1": (
        5.0,
        lambda rng, n: rng.standard_exponential(n) / RATES[(rng.random(n) > SPLIT).astype(int)],
        lambda rng, n: rng.standard_exponential(n) / RATES[rng.integers(0, 2, n)],
    ),
}


def one_server(kind: str, rho: float, rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Arrivals and services of n jobs behind a first one, which brings the work of a server in steady state:
    a geometric number of residual services. So there is no warm-up and no bias."""
    _, draw, residual = SERVICES[kind]
    work = residual(rng, rng.geometric(1 - rho) - 1).sum()
    arrivals = np.concatenate([[0], poisson(rng, rho, n)])
    return arrivals, np.rint(np.concatenate([[work], draw(rng, n)]) * SECOND).astype(np.int64)


def lindley(arrivals: np.ndarray, services: np.ndarray) -> np.ndarray:
    """Waits by the recursion W(n + 1) = max(0, W(n) + S(n) - gap), in nanoseconds."""
    walk = np.concatenate([[0], np.cumsum(services[:-1] - np.diff(arrivals))])
    return walk - np.minimum.accumulate(walk)


@pytest.mark.parametrize("rho", [0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("kind", SERVICES)
def test_every_job_waits_as_lindley_says(kind, rho):
    arrivals, services = one_server(kind, rho, np.random.default_rng(5), 700)
    records = serve(arrivals, [1] * len(arrivals), ONE_SERVER, Scripted(services.tolist()))
    measured = ns([record.admitted_s for record in records]) - arrivals
    assert measured.tolist() == lindley(arrivals, services).tolist()
    assert (ns([record.finished_s for record in records]) - arrivals - measured).tolist() == services.tolist()


@pytest.mark.parametrize(("rho", "n"), [(0.3, 20_000), (0.5, 40_000), (0.7, 60_000), (0.9, 120_000)])
@pytest.mark.parametrize("kind", SERVICES)
def test_one_server_waits_as_pollaczek_and_khinchine_say(kind, rho, n):
    """Of the recursion that served jobs follow to the nanosecond, so that there may be as many as it takes."""
    means = [lindley(*one_server(kind, rho, rng, n))[1:].mean() / SECOND for rng in generators(1, int(10 * rho))]
    agree(t_interval(means, LEVEL), mg1_wait(rho, 1.0, SERVICES[kind][0]), within=0.10 if kind == "M/G/1" else 0.06)


# -- a batch that is filled at step boundaries ------------------------------------------------------------------------


def batch_times(arrivals: np.ndarray, outputs: np.ndarray, seats: int, step_ns: int, token_ns: int) -> np.ndarray:
    """Admissions and ends, in nanoseconds [2, jobs], of jobs in a batch of up to `seats`, first come, first served.

    A step gives each job in it a token. It takes `step_ns`, and `token_ns` for each of them.
    """
    times, running, now, steps, following = np.zeros((2, len(arrivals)), np.int64), [], 0, 0, 0
    arrivals, outputs = [*arrivals.tolist(), math.inf], outputs.tolist()
    while running or following < len(outputs):
        now = now if running else max(now, arrivals[following])
        while len(running) < seats and (arrivals[following] < now or (arrivals[following] == now and not running)):
            heapq.heappush(running, (steps + outputs[following], following))
            times[0, following] = now
            following += 1
        duration = step_ns + token_ns * len(running)
        equal = running[0][0] - steps
        if len(running) < seats and following < len(outputs):
            equal = min(equal, (arrivals[following] - now) // duration + 1)
        now, steps = now + equal * duration, steps + equal
        while running and running[0][0] == steps:
            times[1, heapq.heappop(running)[1]] = now
    return times


#: Output lengths of mean 200.
LENGTHS: dict[str, Draw] = {
    "geometric": lambda rng, n: rng.geometric(1 / 200, n),
    "equal": lambda rng, n: np.full(n, 200),
    "two_sizes": lambda rng, n: np.where(rng.random(n) < 0.9, 40, 1_640),
}


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(
    ("seats", "step_ms", "token_ms"), [(1, 5, 0), (2, 5, 0), (8, 3, 1), (1 << 30, 5, 0), (1 << 30, 0, 5)]
)
def test_every_job_is_served_as_the_batch_says(seats, step_ms, token_ms, lengths):
    """The models below are those of served jobs, to the nanosecond."""
    rng, n = np.random.default_rng(8), 400
    arrivals, outputs = poisson(rng, min(seats, 20) * 0.8 if step_ms else 0.7, n), LENGTHS[lengths](rng, n)
    rules = BatchRules(max_num_batched_tokens=1 << 40, max_num_seqs=seats)
    records = serve(arrivals, outputs, rules, ConstantTiming(token_ms / 1e3, seconds_per_step=step_ms / 1e3))
    expected = batch_times(arrivals, outputs, seats, step_ms * 1_000_000, token_ms * 1_000_000)
    measured = [ns([getattr(record, key) for record in records]) for key in ("admitted_s", "finished_s")]
    assert np.array_equal(measured, expected)


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
def test_batch_wait_of_one_seat_equals_geometric_queue(rho):
    steps = 50
    second_moment = (2 - 1 / steps) / steps**-2 / steps**2  # of steps, over their squared mean
    assert batch_wait(rho, 1 / steps, steps, 1) == pytest.approx(mg1_wait(rho, 1.0, second_moment), rel=1e-7)


@pytest.mark.parametrize("seats", [2, 8])
def test_batch_wait_minus_half_a_step_approximates_erlang_c(seats):
    rate, step = 0.8 * seats, 1 / 50
    assert erlang_c(seats, rate) > 0.4
    assert batch_wait(rate, step, 50, seats) - step / 2 == pytest.approx(mmc_wait(rate, 1.0, seats), rel=0.02)
    assert batch_wait(rate, step / 40, 2_000, seats) == pytest.approx(mmc_wait(rate, 1.0, seats), rel=0.002)


@pytest.mark.parametrize("seats", [1, 2, 8])
def test_seats_of_constant_steps_are_servers(seats):
    n, step, mean_steps, means = 40_000, 1 / 50, 50, []
    for rng in generators(2, seats):
        arrivals, outputs = poisson(rng, 0.8 * seats, n), rng.geometric(1 / mean_steps, n)
        admitted, _ = batch_times(arrivals, outputs, seats, round(step * SECOND), 0)
        means.append((admitted - arrivals)[n // 5 :].mean() / SECOND)
    interval = t_interval(means, LEVEL)
    agree(interval, batch_wait(0.8 * seats, step, mean_steps, seats), within=0.08)
    boundary = step / 2 if seats > 1 else 0.0  # a single server is idle or full: no job waits for a step boundary alone
    agree(interval, mmc_wait(0.8 * seats, 1.0, seats) + boundary, within=0.08)


# -- steps that take as long as their batch is large: processor sharing -----------------------------------------------


@pytest.mark.parametrize("lengths", LENGTHS)
def test_steps_as_long_as_their_batch_share_the_processor(lengths):
    n, rho, token = 20_000, 0.7, 1 / 200
    by_size: dict[int, list[float]] = {0: []}
    for rng in generators(3):
        outputs = LENGTHS[lengths](rng, n)
        arrivals = poisson(rng, rho, n)
        _, finished = batch_times(arrivals, outputs, NO_CAP, 0, round(token * SECOND))
        time = (finished - arrivals)[n // 5 :] / SECOND
        by_size[0].append(time.mean())
        if lengths == "two_sizes":
            for size in (40, 1_640):
                by_size.setdefault(size, []).append(time[outputs[n // 5 :] == size].mean())
    for size, means in by_size.items():
        # Service comes a token at a time: sooner or later by up to the mean step, token / (1 − ρ).
        agree(t_interval(means, LEVEL), (size or 200) * token / (1 - rho), within=0.1, allowance=token / (1 - rho))


# -- no cap: no job waits for a seat ----------------------------------------------------------------------------------


def test_without_a_cap_the_number_in_system_is_poisson():
    rate, step, n = 20.0, 1 / 50, 2_400
    means, variances, delays = [], [], []
    for rng in generators(4):
        outputs = np.where(rng.random(n) < 0.5, 20, 80)
        arrivals = poisson(rng, rate, n)
        admitted, finished = batch_times(arrivals, outputs, NO_CAP, round(step * SECOND), 0)
        # Further apart than the longest stay, so that the counts are independent.
        times = np.arange(5.0, arrivals[-1] / SECOND, 80 * step + 2 * step) * SECOND
        present = np.searchsorted(arrivals, times, "right") - np.searchsorted(np.sort(finished), times, "right")
        means.append(present.mean())
        variances.append(present.var(ddof=1))
        delays.append((admitted - arrivals).mean() / SECOND)
    agree(t_interval(delays, LEVEL), step / 2, within=0.05)  # of a step that somebody else has begun
    agree(t_interval(means, LEVEL), rate * (1.0 + step / 2), within=0.05)
    agree(t_interval(variances, LEVEL), rate * (1.0 + step / 2), within=0.2)


# -- saturation and conservation of time ------------------------------------------------------------------------------


@pytest.mark.parametrize("seats", [1, 7, 64])
def test_a_full_batch_has_the_throughput_of_its_step(seats):
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
    check_little(records)
