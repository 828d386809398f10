"""What a study's folder says: the summary that is written, and the data that figures are drawn from."""

from __future__ import annotations

from typing import Any

import numpy as np

from spanlab.report.data import ArmData, LoadPoint, StudyData
from spanlab.settings import StoreSettings, Strategy, Study
from spanlab.study import summary as sums
from spanlab.study.folder import RunFolder
from spanlab.study.provenance import commit
from spanlab.workloads import Workload


def gather(study: Study, name: str, folder: RunFolder, workload: Workload) -> tuple[StudyData, dict[str, Any]]:
    """Read every arm's files back; returns what the report draws and what `summary.json` holds."""
    every: dict[str, sums.Columns] = {}
    runs: dict[str, list[dict[str, Any]]] = {}
    for arm in study.chosen():
        columns = sums.read_records(folder.records(arm))
        every[arm] = sums.select(columns, columns["counted"].astype(bool))
        runs[arm] = sums.read_runs(folder.runs(arm))
    own = {arm: sums.select(columns, _own(study, columns)) for arm, columns in every.items()}
    own_runs = {arm: [run for run in rows if _is_own(study, run)] for arm, rows in runs.items()}
    arms = _summaries(study, own, own_runs)
    load = _load_points(study, every, runs)
    data = StudyData(
        title=name,
        footer=_footer(study, workload),
        arms=[ArmData(arm, arms[arm]["family"], own[arm], own_runs[arm], arms[arm]) for arm in own],
        load=load,
        store=describe_store(study.store),
    )
    return data, _summary(study, name, workload, arms, load)


def _own(study: Study, columns: sums.Columns) -> Any:
    return sums.at_rate(columns, study.arrivals.rate_rps) & np.isin(columns["seed"], study.seeds)


def _is_own(study: Study, run: dict[str, Any]) -> bool:
    return bool(run["rate_rps"] == study.arrivals.rate_rps and run["seed"] in study.seeds)


def family(strategy: Strategy) -> str:
    """The name that colours an arm."""
    return strategy.family or strategy.placement.kind


def _summaries(
    study: Study, columns: dict[str, sums.Columns], runs: dict[str, list[dict[str, Any]]]
) -> dict[str, dict[str, Any]]:
    arms = {arm: sums.summarise(family(study.arms[arm]), columns[arm], runs[arm], study.hit) for arm in columns}
    last = any(study.arms[arm].last_token == "reuse" for arm in columns)
    bound = max(sums.bound_tokens(one, last) for one in columns.values())
    for arm, values in arms.items():
        values["bound_tokens"] = bound
        values["share_of_bound"] = values["tokens"]["reused"] / bound if bound else None
        values["speedup"] = sums.speedup(columns[study.baseline], columns[arm]) if study.baseline in columns else None
    return arms


def _load_points(
    study: Study, columns: dict[str, sums.Columns], runs: dict[str, list[dict[str, Any]]]
) -> list[LoadPoint]:
    points = []
    for arm in (arm for arm in study.load.arms if arm in columns):
        for rate in sorted({*study.load.rates_rps, study.arrivals.rate_rps or 0.0} - {0.0}):
            kept = sums.select(columns[arm], sums.at_rate(columns[arm], rate))
            delays = sums.delays(kept)
            busy = [run["busy_s"] / run["makespan_s"] for run in runs[arm] if run["rate_rps"] == rate]
            points.append(
                LoadPoint(
                    arm=arm,
                    family=family(study.arms[arm]),
                    rate_rps=rate,
                    utilisation=float(np.mean(busy)),
                    queue_s=_band(delays["queue_s"], kept["seed"]),
                    ttft_s=_band(delays["ttft_s"], kept["seed"]),
                )
            )
    return points


def _band(values: Any, seeds: Any) -> dict[str, float | None]:
    points, intervals = sums.spread(values, seeds)
    low, high = intervals["mean"] or (None, None)
    return {"mean": points["mean"], "low": low, "high": high, "p99": points["p99"]}


def _summary(
    study: Study, name: str, workload: Workload, arms: dict[str, Any], load: list[LoadPoint]
) -> dict[str, Any]:
    provenance = workload.provenance
    return {
        "study": name,
        "workload": {
            "name": workload.name,
            "kind": study.workload.kind,
            "source": study.workload.source,
            "provenance": provenance.kind,
            "detail": provenance.detail,
            "requests": len(workload.requests),
            "documents_cut": provenance.documents_cut,
            "documents_dropped": provenance.documents_dropped,
        },
        "model": study.model.name,
        "hardware": study.hardware.name,
        "timing": study.timing.kind,
        "store": describe_store(study.store),
        "seeds": study.seeds,
        "warmup_fraction": study.warmup_fraction,
        "hit_means": f"at least one {study.hit} token",
        "arms": arms,
        "load": [
            {
                "arm": p.arm,
                "rate_rps": p.rate_rps,
                "utilisation": p.utilisation,
                "queue_s": p.queue_s,
                "ttft_s": p.ttft_s,
            }
            for p in load
        ],
    }


def describe_store(store: StoreSettings) -> str:
    """The store's budget in words."""
    parts = [
        f"{value:g} {what}"
        for value, what in (
            (store.total_gib, "GiB for KV and states together"),
            (store.kv_gib, "GiB of KV"),
            (store.state_gib, "GiB of states"),
            (store.entries, "entries"),
        )
        if value is not None
    ]
    return ", ".join(parts) or "unlimited"


def _footer(study: Study, workload: Workload) -> str:
    timing = (
        "constant timing" if study.timing.kind == "constant" else f"roofline on {study.hardware.name}, uncalibrated"
    )
    rate = f"{study.arrivals.kind} {study.arrivals.rate_rps:g}/s" if study.arrivals.rate_rps else study.arrivals.kind
    seeds = f"{len(study.seeds)} seed" + ("s" if len(study.seeds) > 1 else "")
    return (
        f"{workload.provenance.line()} · {study.model.name} · {timing} · {rate} · "
        f"store {describe_store(study.store)} · {seeds} · simulated · commit {commit()}"
    )


def flat_table(summary: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    """The arms as one flat table: column names and rows."""
    picks = {
        "token_hit_rate": lambda arm: arm["token_hit_rate"],
        "request_hit_rate": lambda arm: arm["request_hit_rate"],
        "reused_tokens": lambda arm: arm["tokens"]["reused"],
        "computed_tokens": lambda arm: arm["tokens"]["computed"],
        "ttft_mean_s": lambda arm: arm["ttft_s"]["mean"],
        "ttft_p99_s": lambda arm: arm["ttft_s"]["p99"],
        "kv_resident_mean_bytes": lambda arm: arm["bytes"]["kv_resident_mean"],
        "state_resident_mean_bytes": lambda arm: arm["bytes"]["state_resident_mean"],
        "share_of_bound": lambda arm: arm["share_of_bound"],
    }
    rows = [[name, *(pick(arm) for pick in picks.values())] for name, arm in summary["arms"].items()]
    return ["arm", *picks], rows
