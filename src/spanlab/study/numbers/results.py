"""Results of one arm from its files: the summary, and the columns that figures use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spanlab.analysis.bars import verdict_of
from spanlab.report.data import ArmData, LoadPoint
from spanlab.settings import Strategy, Study
from spanlab.settings.limit import parse_limit
from spanlab.steady import SATURATED
from spanlab.study.execution.cells import cells
from spanlab.study.numbers import summary as sums
from spanlab.study.numbers.bounds import StudyBounds
from spanlab.study.numbers.clairvoyants import served_alone
from spanlab.study.numbers.load import load_of, load_point
from spanlab.study.output.arm_files import ArmFiles, Cell

# Columns that figures use; sending complete records between processes would cost more than drawing.
REPORTED = ("seed", "arrived_s", "first_token_s", "prompt_tokens", "seen_tokens", "reused_tokens")

#: How reusable tokens are counted: as prefixes of prompts, or as spans at any position.
PREFIXES, ANYWHERE = "prefixes", "spans anywhere"

REMEDY = "expected more memory, or a smaller store, batch or workload; rerun with output.if_exists=resume"


@dataclass(frozen=True)
class ArmFailure:
    """An arm that failed, with the reason in one sentence."""

    arm: str
    sentence: str


class ArmsFailedError(ValueError):
    """Some arms of a study failed; its folder is complete for the others."""


def raise_failures(failed: dict[str, str], arms: int) -> None:
    """Raise where some of `arms` arms failed; call it after all files are written."""
    if failed:
        lost = f"{len(failed)} of {arms} arms failed, the others are reported"
        raise ArmsFailedError(f"{lost}: {'; '.join(failed.values())}; {REMEDY}")


class LimitError(ValueError):
    """A result exceeds the limit `fail_on`; the study is complete."""


def raise_limit(fail_on: str | None, summary: dict[str, Any]) -> None:
    """Raise where the explained arm exceeds the limit; call it after all files are written."""
    if fail_on is None:
        return
    limit, name = parse_limit(fail_on), summary["baseline"]
    numbers = summary["presets"].get(name)
    if numbers is None:
        raise LimitError(f"fail_on={fail_on}: the log has only lengths; expected a log that shows what prompts share")
    if limit.holds(numbers):
        raise LimitError(f"fail_on={fail_on}: {limit.metric} of {name} is {numbers[limit.metric]:.4f}")


class BarMissedError(ValueError):
    """A result misses a bar; the study is complete."""


def raise_missed(summary: dict[str, Any]) -> None:
    """Raise where a result misses a bar; call it after all files are written."""
    verdicts = [verdict_of(bar) for bar in summary.get("bars", ())]
    sentences = [verdict.sentence() for verdict in verdicts if not verdict.holds]
    if sentences:
        raise BarMissedError("; ".join(sentences))


@dataclass(frozen=True)
class ArmResult:
    """Summary of one arm, before arms are compared.

    bound        tokens that an infinite cache would have reused
    ttft_sums    seconds of TTFT by seed and group, shape (seeds, groups)
    """

    data: ArmData
    load: list[LoadPoint]
    bound: int
    ttft_sums: NDArray[np.float64]

    @property
    def saturated(self) -> bool:
        """Whether the arm's queue grows at the study's load."""
        return bool(self.data.summary["stationarity"]["verdict"] == SATURATED)


def read_arm(study: Study, arm: str, files: ArmFiles, bounds: StudyBounds) -> ArmResult:
    """Read and summarize one arm's records and runs."""
    columns, runs = _read_study_cells(study, arm, files)
    records = sums.select(
        columns, sums.at_rate(columns, study.arrivals.rate_rps) & np.isin(columns["seed"], study.seeds)
    )
    counted = sums.select(records, records["counted"].astype(bool))
    base_runs = [run for run in runs if run["rate_rps"] == study.arrivals.rate_rps and run["seed"] in study.seeds]
    strategy = study.arms[arm]
    load = load_of(records, base_runs, study.arrivals.clients)
    summary = sums.summarise(family(strategy), counted, base_runs, study.count_hit_as, load)
    summary["bytes"]["copied_mean"] = sums.copied_mean_bytes(records, base_runs, study.model.kv_bytes_per_token)
    summary["bounds"] = bounds.of_arm(arm, records)
    summary["bounds"]["served_alone"] = served_alone(records)
    summary["finds"] = PREFIXES if strategy.spans is None and strategy.passages.order == "given" else ANYWHERE
    return ArmResult(
        data=ArmData(arm, summary["family"], {name: counted[name] for name in REPORTED}, base_runs, summary),
        load=_load_points(study, arm, columns, runs),
        bound=_infinite_cache(summary, counted, strategy.last_token == "reuse"),
        ttft_sums=sums.ttft_sums(counted),
    )


def _infinite_cache(summary: dict[str, Any], counted: sums.Columns, hit_last: bool) -> int:
    """Return the tokens that a cache without limit reuses at the positions where the arm looks."""
    if summary["finds"] == PREFIXES:
        return sums.bound_tokens(counted, hit_last)
    return int(summary["bounds"]["infinite_any_position_tokens"])


def _read_study_cells(study: Study, arm: str, files: ArmFiles) -> tuple[sums.Columns, list[dict[str, Any]]]:
    """Read the records and runs of the study's cells; files of a resumed run may have more cells."""
    columns, runs = sums.read_records(files.records), files.finished()
    study_cells = set(cells(study, arm))
    selected = np.repeat([Cell.of(run) in study_cells for run in runs], [run["requests"] for run in runs])
    return sums.select(columns, selected), [run for run in runs if Cell.of(run) in study_cells]


def family(strategy: Strategy) -> str:
    """Family of an arm, which decides its colour in figures."""
    return strategy.family or strategy.placement.kind


def _load_points(study: Study, arm: str, columns: sums.Columns, runs: list[dict[str, Any]]) -> list[LoadPoint]:
    if arm not in study.load.arms:
        return []
    points = []
    for rate in sorted({*study.load.rates_rps, study.arrivals.rate_rps or 0.0} - {0.0}):
        rate_runs = [run for run in runs if run["rate_rps"] == rate]
        rate_columns = sums.select(columns, sums.at_rate(columns, rate))
        points.append(load_point(arm, family(study.arms[arm]), rate_columns, rate_runs))
    return points
