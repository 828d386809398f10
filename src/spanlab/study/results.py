"""What a study's folder says: the summary that is written, and the data that figures are drawn from."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spanlab.report import measures
from spanlab.report.data import ArmData, LoadPoint, StudyData
from spanlab.settings import Strategy, Study
from spanlab.steady import SATURATED
from spanlab.study import summary as sums
from spanlab.study.arm_files import ArmFiles, Cell
from spanlab.study.bounds import StudyBounds
from spanlab.study.caveats import caveats, load_words
from spanlab.study.cells import cells
from spanlab.study.device import EngineFacts
from spanlab.study.load import load_of, load_point
from spanlab.study.provenance import commit
from spanlab.workloads import Workload

# What figures read; whole records would cost more to hand from process to process than to draw.
REPORTED = ("seed", "arrived_s", "first_token_s", "prompt_tokens", "seen_tokens", "reused_tokens")

#: How the tokens that an arm could reuse are counted: as its prompts' beginnings, or wherever their spans stand.
PREFIXES, ANYWHERE = "prefixes", "spans anywhere"

WAY_OUT = "expected more memory, or a smaller store, batch or workload; output.if_exists=resume tries again"


@dataclass(frozen=True)
class ArmFailure:
    """An arm that could not be run to its end, and why, in one sentence."""

    arm: str
    sentence: str


class ArmsFailedError(ValueError):
    """Some arms of a study failed; its folder is complete for the others."""


def raise_failures(failed: dict[str, str], arms: int) -> None:
    """End with a sentence where some of so many arms failed; to be called when everything else is written."""
    if failed:
        lost = f"{len(failed)} of {arms} arms failed, the others are reported"
        raise ArmsFailedError(f"{lost}: {'; '.join(failed.values())}; {WAY_OUT}")


@dataclass(frozen=True)
class ArmResult:
    """What one arm's files say, before arms are compared.

    bound        tokens that an infinite cache would have saved
    ttft_sums    seconds of TTFT by seed and group, shape (seeds, groups)
    """

    data: ArmData
    load: list[LoadPoint]
    bound: int
    ttft_sums: NDArray[np.float64]

    @property
    def saturated(self) -> bool:
        """Whether the arm's queue grows at the study's own load."""
        return bool(self.data.summary["stationarity"]["verdict"] == SATURATED)


def read_arm(study: Study, arm: str, files: ArmFiles, bounds: StudyBounds) -> ArmResult:
    """Read one arm's records and runs back and summarise them."""
    columns, runs = _of_study(study, arm, files)
    every = sums.select(columns, sums.at_rate(columns, study.arrivals.rate_rps) & np.isin(columns["seed"], study.seeds))
    own = sums.select(every, every["counted"].astype(bool))
    own_runs = [run for run in runs if run["rate_rps"] == study.arrivals.rate_rps and run["seed"] in study.seeds]
    strategy = study.arms[arm]
    load = load_of(every, own_runs, study.arrivals.clients)
    summary = sums.summarise(family(strategy), own, own_runs, study.hit, load)
    summary["bytes"]["copied_mean"] = sums.copied_mean_bytes(every, own_runs, study.model.kv_bytes_per_token)
    summary["bounds"] = bounds.of_arm(arm, every)
    summary["finds"] = PREFIXES if strategy.spans is None else ANYWHERE
    return ArmResult(
        data=ArmData(arm, summary["family"], {name: own[name] for name in REPORTED}, own_runs, summary),
        load=_load_points(study, arm, columns, runs),
        bound=sums.bound_tokens(own, strategy.last_token == "reuse"),
        ttft_sums=sums.ttft_sums(own),
    )


def _of_study(study: Study, arm: str, files: ArmFiles) -> tuple[sums.Columns, list[dict[str, Any]]]:
    """Records and runs of the study's cells; files that were resumed may have more."""
    columns, runs = sums.read_records(files.records), sums.read_runs(files.runs)
    wanted = set(cells(study, arm))
    kept = np.repeat([Cell.of(run) in wanted for run in runs], [run["requests"] for run in runs])
    return sums.select(columns, kept), [run for run in runs if Cell.of(run) in wanted]


@dataclass(frozen=True)
class Outcome:
    """What became of a study's arms: those that ran, in the order of the settings, and a sentence for each that failed.

    `facts`  what the engine ran on; None for a simulation
    """

    results: list[ArmResult]
    failed: dict[str, str]
    facts: EngineFacts | None

    @staticmethod
    def of(ends: list[ArmResult | ArmFailure], facts: EngineFacts | None) -> Outcome:
        """Sort arms by how they ended; ValueError where none ran to its end."""
        failed = {end.arm: end.sentence for end in ends if isinstance(end, ArmFailure)}
        if len(failed) == len(ends):
            raise ValueError(f"no arm ran to its end, the first for this: {ends[0].sentence}; {WAY_OUT}")
        return Outcome([end for end in ends if isinstance(end, ArmResult)], failed, facts)


def compare(study: Study, name: str, workload: Workload, outcome: Outcome) -> tuple[StudyData, dict[str, Any]]:
    """Lay the arms side by side; returns what the report draws and what `summary.json` holds."""
    results = outcome.results
    baseline = next((result for result in results if result.data.name == study.baseline), None)
    bound = max(result.bound for result in results)
    for result in results:
        values = result.data.summary
        values["own_bound_tokens"] = result.bound
        values["bound_tokens"] = bound
        values["share_of_bound"] = values["tokens"]["reused"] / bound if bound else None
        values["speedup"] = _speedup(baseline, result)
    load = [point for result in results for point in result.load]
    arms = [result.data for result in results]
    data = StudyData(
        title=name,
        footer=_footer(study, workload, outcome),
        arms=arms,
        load=load,
        store=describe_store(study),
        baseline=study.baseline,
        hit=study.hit,
        caveats=caveats(study, arms, outcome.failed),
        failed=outcome.failed,
        load_words=load_words(study),
    )
    return data, _summary(study, name, workload, data, outcome)


def _speedup(baseline: ArmResult | None, result: ArmResult) -> dict[str, Any] | None:
    """None without a baseline, and where either queue grows: that ratio tells the length of the run."""
    if baseline is None or baseline.saturated or result.saturated:
        return None
    return sums.speedup(baseline.ttft_sums, result.ttft_sums)


def family(strategy: Strategy) -> str:
    """The name that colours an arm."""
    return strategy.family or strategy.placement.kind


def _load_points(study: Study, arm: str, columns: sums.Columns, runs: list[dict[str, Any]]) -> list[LoadPoint]:
    if arm not in study.load.arms:
        return []
    points = []
    for rate in sorted({*study.load.rates_rps, study.arrivals.rate_rps or 0.0} - {0.0}):
        own = [run for run in runs if run["rate_rps"] == rate]
        kept = sums.select(columns, sums.at_rate(columns, rate))
        points.append(load_point(arm, family(study.arms[arm]), kept, own))
    return points


def _summary(study: Study, name: str, workload: Workload, data: StudyData, outcome: Outcome) -> dict[str, Any]:
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
        "backend": study.backend,
        "engine": asdict(outcome.facts) if outcome.facts else None,
        "store": data.store,
        "seeds": study.seeds,
        "warmup_fraction": study.warmup_fraction,
        "hit_means": f"at least one {study.hit} token",
        "baseline": study.baseline,
        "offered_load": data.load_words,
        "intervals": measures.interval_words(data.arms),
        "caveats": list(data.caveats),
        "failed": data.failed,
        "arms": {arm.name: arm.summary for arm in data.arms},
        "load": [asdict(point) for point in data.load],
    }


def describe_store(study: Study) -> str:
    """The store's budget in words."""
    store = study.store
    whole = "for KV and states together" if study.model.is_hybrid else "for KV"
    budgets = ((store.total_gib, whole), (store.kv_gib, "of KV"), (store.state_gib, "of states"))
    parts = [f"{_gib(value)} {what}" for value, what in budgets if value is not None]
    if store.entries is not None:
        parts.append(f"{store.entries} entries")
    return ", ".join(parts) or "unlimited"


def _gib(value: float) -> str:
    return f"{value:g} GiB" if value >= 1 else f"{1024 * value:g} MiB"


def _footer(study: Study, workload: Workload, outcome: Outcome) -> str:
    rate = f"{study.arrivals.kind} {study.arrivals.rate_rps:g}/s" if study.arrivals.rate_rps else study.arrivals.kind
    seeds = f"{len(study.seeds)} seed" + ("s" if len(study.seeds) > 1 else "")
    timed = _timing(study) if outcome.facts is None else outcome.facts.line()
    failed = f" · failed: {', '.join(outcome.failed)}" if outcome.failed else ""
    return (
        f"{workload.provenance.line()} · {study.model.name} · {timed} · {rate} · "
        f"store {describe_store(study)} · {seeds} · commit {commit()}{failed}"
    )


def _timing(study: Study) -> str:
    if study.timing.kind == "constant":
        return "simulated, constant timing"
    if study.timing.kind == "calibrated":
        return f"simulated, step times calibrated for {study.model.name} on this machine"
    return f"simulated, roofline on {study.hardware.name}, uncalibrated"
