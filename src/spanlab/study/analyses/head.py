"""Metadata of a study: the head of its summary, and the provenance line under its figures."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from spanlab.settings import Study
from spanlab.settings.twin import TWIN
from spanlab.study.analyses.caveats import load_words
from spanlab.study.findings import Finished
from spanlab.study.output.provenance import commit


def head(finished: Finished) -> dict[str, Any]:
    """Return settings and data source of a study, for `summary.json`."""
    study, workload, provenance = finished.study, finished.workload, finished.workload.provenance
    return {
        "study": finished.name,
        "workload": {
            "name": workload.name,
            "kind": study.workload.kind,
            "source": study.workload.source,
            "provenance": provenance.kind,
            "detail": provenance.detail,
            "requests": workload.size,
            "documents_cut": provenance.documents_cut,
            "documents_dropped": provenance.documents_dropped,
        },
        "model": study.model.name,
        "hardware": study.hardware.name,
        "timing": study.timing.kind if study.base_url is None else None,
        "backend": study.backend,
        "engine": asdict(finished.facts) if finished.facts else None,
        "store": describe_store(study),
        "seeds": study.seeds,
        "repeats": study.repeats,
        "warmup_fraction": study.warmup_fraction,
        "hit_means": f"at least one {study.count_hit_as} token",
        "baseline": study.baseline,
        "offered_load": load_words(study),
        "failed": finished.failed,
    }


def footer(finished: Finished) -> str:
    """Return the provenance of a study in one line."""
    study = finished.study
    seeds = f"{len(study.seeds)} seed" + ("s" if len(study.seeds) > 1 else "")
    repeats = f" · {study.repeats} repeats" if study.repeats > 1 else ""
    timed = _timing(study) if finished.facts is None else finished.facts.line()
    failed = f" · failed: {', '.join(finished.failed)}" if finished.failed else ""
    store = f"store {describe_store(study)} · " if study.base_url is None else ""  # unknown for a real server
    return (
        f"{finished.workload.provenance.line()} · {study.model.name} · {timed} · {_load(finished)} · "
        f"{store}{seeds}{repeats} · commit {commit()}{failed}"
    )


def _load(finished: Finished) -> str:
    arrivals = finished.study.arrivals
    if finished.shares:
        return f"{arrivals.kind} at {', '.join(f'{share:g}' for share in finished.shares.values())} of saturation"
    return f"{arrivals.kind} {arrivals.rate_rps:g}/s" if arrivals.rate_rps else arrivals.kind


def describe_store(study: Study) -> str:
    """Return a description of the store's budget."""
    store = study.store
    total_label = "for KV and states together" if study.model.is_hybrid else "for KV"
    kv_gib, state_gib = store.pools_gib
    budgets = ((store.total_gib, total_label), (kv_gib, "of KV"), (state_gib, "of states"))
    labels = [f"{_gib(value)} {label}" for value, label in budgets if value is not None]
    if store.entries is not None:
        labels.append(f"{store.entries} entries")
    labels += [f"{name} {rules.gib:g} GiB at {rules.bandwidth_gb_s:g} GB/s" for name, rules in store.tiers.items()]
    per_replica = f" in each of {study.replicas.count} replicas" if study.replicas.count > 1 else ""
    return (", ".join(labels) or "unlimited") + per_replica


def _gib(value: float) -> str:
    return f"{value:g} GiB" if value >= 1 else f"{1024 * value:g} MiB"


def _timing(study: Study) -> str:
    if study.base_url is not None:
        return f"measured at {study.base_url}"
    if TWIN in study.chosen_analyses():
        return f"step times fitted to the log, on {study.hardware.name}"
    if study.timing.kind == "fitted":
        return f"simulated, step times fitted to a server's log, on {study.hardware.name}"
    if study.timing.kind == "calibrated":
        return f"simulated, step times calibrated for {study.model.name} on this machine"
    if study.timing.kind == "roofline":
        return f"simulated, roofline on {study.hardware.name}, uncalibrated"
    return f"simulated, {study.timing.kind} timing"
