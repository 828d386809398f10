"""A point of a plan: one store, one strategy, one load; and what a run of it says."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from spanlab.analysis.blocks import Estimate, block_estimates, number_of_blocks
from spanlab.records import Record, RunRow
from spanlab.settings import PlanSettings, SloSettings, StoreSettings, Strategy, Study
from spanlab.steady import SATURATED, Run, assess
from spanlab.study.execution.backends import Simulator
from spanlab.study.execution.jobs import Job
from spanlab.study.execution.worker import Worker
from spanlab.study.numbers import summary as sums
from spanlab.study.plan.arrivals import arrivals_of

FIELDS = (
    "arrived_s",
    "admitted_s",
    "first_token_s",
    "finished_s",
    "prompt_tokens",
    "reused_tokens",
    "output_tokens",
    "counted",
)
Served = dict[str, Any]


@dataclass(frozen=True)
class Point:
    """`load` is a multiple of the study's own; None: each request comes long after the one before.

    `replicas`  engines, each with a store of its own; None: as many as the study has
    """

    store: StoreSettings
    strategy: Strategy
    load: float | None = 1.0
    replicas: int | None = None

    @property
    def key(self) -> str:
        """A name that no other point of the study has."""
        return hashlib.sha256(orjson.dumps(asdict(self))).hexdigest()[:16]


def serve(worker: Worker, point: Point, replication: int) -> Served:
    """Simulate one run of a point; what is told of it fits one line."""
    study = _study_of(worker.study, point)
    requests = arrivals_of(study, worker.requests, replication, point.load)
    job = Job(
        strategy=point.strategy,
        requests=requests,
        rules=study.batch,
        seed=replication,
        rate_rps=None,
        warmup=int(study.warmup_fraction * len(requests)),
        max_tokens=max(request.num_tokens for request in requests),
        group=worker.requests[0].group_id,
        steps=Path(os.devnull),
        clients=study.arrivals.clients,
    )
    rows: list[tuple[Any, ...]] = []
    row = Simulator(study).run(job, lambda record: rows.append(_fields(record)))
    return _told({name: np.array(column) for name, column in zip(FIELDS, zip(*rows, strict=True), strict=True)}, row)


def _study_of(own: Study, point: Point) -> Study:
    """The study with a point's settings, as one that is served and summarised."""
    arms = {own.baseline: point.strategy}
    replicas = replace(own.replicas, count=point.replicas or own.replicas.count)
    return replace(
        own,
        store=point.store,
        arms=arms,
        replicas=replicas,
        analyses=["summary"],
        slo=SloSettings(),
        plan=PlanSettings(),
    )


def _fields(record: Record) -> tuple[Any, ...]:
    return tuple(getattr(record, name) for name in FIELDS)


def _told(every: sums.Columns, row: RunRow) -> Served:
    order = np.argsort(every["arrived_s"], kind="stable")
    every = {name: values[order] for name, values in every.items()}
    columns = sums.select(every, every["counted"])
    delays = {name.removesuffix("_s"): _plain(block_estimates(values)) for name, values in sums.delays(columns).items()}
    utilisation, grows = _load(every, row)
    return {
        "estimates": delays,
        "blocks": number_of_blocks(len(columns["arrived_s"])),
        "token_hit_rate": float(columns["reused_tokens"].sum() / columns["prompt_tokens"].sum()),
        "utilisation": utilisation,
        "grows": grows,
        "preemptions": row.preemptions,
        "cached_bytes": row.kv_resident_peak_bytes + row.state_resident_peak_bytes,
        "rate_rps": _rate(every["arrived_s"]),
    }


def _plain(found: Mapping[str, Estimate] | None) -> dict[str, list[float | None]] | None:
    """Estimates as JSON has them: value and error."""
    return None if found is None else {name: list(estimate) for name, estimate in found.items()}


def _load(columns: sums.Columns, row: RunRow) -> tuple[float | None, bool]:
    """Offered work ÷ capacity, and whether the queue grows; requests that all come at once have no load."""
    if not np.ptp(columns["arrived_s"]):
        return None, False
    alike = columns | {"seed": np.zeros(len(columns["arrived_s"]), dtype=np.int64)}
    utilisation = sums.utilisation(alike, [asdict(row) | {"seed": 0}])
    state = assess([Run(columns["arrived_s"], columns["first_token_s"])], utilisation)
    return utilisation, state.verdict == SATURATED


def _rate(arrived: np.ndarray) -> float | None:
    """Requests per second; None where all come at once."""
    return float((len(arrived) - 1) / np.ptp(arrived)) if np.ptp(arrived) else None
