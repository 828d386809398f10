"""A point of a plan: one store, one strategy, one load; and the result of a run of it."""

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
RunResult = dict[str, Any]


@dataclass(frozen=True)
class Point:
    """A combination of settings that a plan tries.

    `load`      multiple of the study's own; None: no request waits for another
    `replicas`  number of engines, each with its own store; None: as in the study
    """

    store: StoreSettings
    strategy: Strategy
    load: float | None = 1.0
    replicas: int | None = None

    @property
    def key(self) -> str:
        """A hash of the point, unique in the study."""
        return hashlib.sha256(orjson.dumps(asdict(self))).hexdigest()[:16]


def serve(worker: Worker, point: Point, replication: int) -> RunResult:
    """Simulate one run of a point, and return its result, which fits one line of a file."""
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
    row = Simulator(study).simulate(job, lambda record: rows.append(_fields(record)))
    return _run_result(
        {name: np.array(column) for name, column in zip(FIELDS, zip(*rows, strict=True), strict=True)}, row
    )


def _study_of(study: Study, point: Point) -> Study:
    """Return the study with a point's settings, and with the analysis `summary` only."""
    arms = {study.baseline: point.strategy}
    replicas = replace(study.replicas, count=point.replicas or study.replicas.count)
    return replace(
        study,
        store=point.store,
        arms=arms,
        replicas=replicas,
        analyses=["summary"],
        slo=SloSettings(),
        plan=PlanSettings(),
    )


def _fields(record: Record) -> tuple[Any, ...]:
    return tuple(getattr(record, name) for name in FIELDS)


def _run_result(all_columns: sums.Columns, row: RunRow) -> RunResult:
    order = np.argsort(all_columns["arrived_s"], kind="stable")
    all_columns = {name: values[order] for name, values in all_columns.items()}
    columns = sums.select(all_columns, all_columns["counted"])
    delays = {name.removesuffix("_s"): _plain(block_estimates(values)) for name, values in sums.delays(columns).items()}
    utilisation, grows = _load(all_columns, row)
    return {
        "estimates": delays,
        "blocks": number_of_blocks(len(columns["arrived_s"])),
        "token_hit_rate": float(columns["reused_tokens"].sum() / columns["prompt_tokens"].sum()),
        "utilisation": utilisation,
        "grows": grows,
        "preemptions": row.preemptions,
        "cached_bytes": row.kv_resident_peak_bytes + row.state_resident_peak_bytes,
        "rate_rps": _rate(all_columns["arrived_s"]),
    }


def _plain(estimates: Mapping[str, Estimate] | None) -> dict[str, list[float | None]] | None:
    """Return estimates as lists of value and error, for JSON."""
    return None if estimates is None else {name: list(estimate) for name, estimate in estimates.items()}


def _load(columns: sums.Columns, row: RunRow) -> tuple[float | None, bool]:
    """Return offered work ÷ capacity, and whether the queue grows; simultaneous requests have no load."""
    if not np.ptp(columns["arrived_s"]):
        return None, False
    one_seed = columns | {"seed": np.zeros(len(columns["arrived_s"]), dtype=np.int64)}
    utilisation = sums.utilisation(one_seed, [asdict(row) | {"seed": 0}])
    state = assess([Run(columns["arrived_s"], columns["first_token_s"])], utilisation)
    return utilisation, state.verdict == SATURATED


def _rate(arrived: np.ndarray) -> float | None:
    """Return requests per second; None where all arrive at once."""
    return float((len(arrived) - 1) / np.ptp(arrived)) if np.ptp(arrived) else None
