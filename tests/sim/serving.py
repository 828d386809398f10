"""Runs of the simulator that several tests make, and what they hold of the jobs served."""

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import pytest

from spanlab.core.admission import BatchRules
from spanlab.core.protocol import Policy
from spanlab.core.request import Request, Span
from spanlab.core.rules import ReuseRules
from spanlab.core.step import StepFeatures
from spanlab.records import Record, RunRow
from spanlab.stats import Interval
from spanlab_sim.run import simulate
from spanlab_sim.timing import TimingModel

from ..support.policies import make_tree_policy

SECOND = 1_000_000_000
WORD = (Span(np.array([1], dtype=np.int32)),)
ONE_SERVER = BatchRules(max_num_seqs=1, enable_chunked_prefill=False)


def serve(
    requests: Sequence[Request], policy: Policy, timing: TimingModel, batch: BatchRules | None = None, **options
) -> tuple[dict[int, Record], RunRow]:
    """Records by request, in the order in which they finished, and the row of the run."""
    records: dict[int, Record] = {}
    note = lambda record: records.update({record.request_id: record})  # noqa: E731
    row = simulate(requests, policy, batch or BatchRules(), timing, note, **options)
    return records, row


def serve_cold(requests: Sequence[Request], batch: BatchRules, timing: TimingModel, **options) -> list[Record]:
    """Records in the order of the requests, without any reuse."""
    records, _ = serve(requests, make_tree_policy(ReuseRules(keeps=False)), timing, batch, **options)
    return [records[request.id] for request in requests]


class Scripted:
    """Each step, on whichever replica, takes the next of the given times: one job after another on one server."""

    def __init__(self, services: Iterable[int]) -> None:
        self._services = iter(services)

    def step(self, features: StepFeatures) -> int:
        return next(self._services)

    def span(self, features: StepFeatures, k: int):
        raise AssertionError("jobs of one step have nothing to jump")


def ns(seconds: float) -> int:
    return round(seconds * SECOND)


def poisson(rng: np.random.Generator, rate: float, n: int) -> np.ndarray:
    """Times of n arrivals at random, in nanoseconds."""
    return np.rint(np.cumsum(rng.standard_exponential(n)) * SECOND / rate).astype(np.int64)


def agree(measured: Interval, theory: float, within: float, allowance: float = 0.0) -> None:
    """Theory lies in the interval, and the interval is narrower than `within` times theory on either side."""
    half = measured.mean - measured.low
    print(f"theory {theory:.5g}, found {measured.mean:.5g} ± {half:.2g} ({half / theory:.1%})")
    assert half <= within * theory, "too few jobs to say anything"
    assert measured.low - allowance <= theory <= measured.high + allowance


def check_little(records: Iterable[Record]) -> None:
    """From empty to empty, the area under the number of requests in the system is the sum of their stays."""
    records = list(records)
    stays = [(ns(record.arrived_s), ns(record.finished_s)) for record in records]
    times = sorted([(arrived, 1) for arrived, _ in stays] + [(finished, -1) for _, finished in stays])
    present, area = 0, 0
    for (time, change), (until, _) in itertools.pairwise(times):
        present += change
        area += present * (until - time)
    mean_stay = np.mean([record.finished_s - record.arrived_s for record in records])
    assert area / SECOND == pytest.approx(len(records) * mean_stay, rel=1e-9)
