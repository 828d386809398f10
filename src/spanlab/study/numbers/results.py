"""What the files of one arm say: its summary, and the columns that figures are drawn from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spanlab.analysis.bars import judged
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


class LimitError(ValueError):
    """A result is beyond the limit that the user set; the study itself is complete."""


def raise_limit(fail_on: str | None, summary: dict[str, Any]) -> None:
    """End with a sentence where the explained arm is beyond the limit; to be called when everything is written."""
    if fail_on is None:
        return
    limit, name = parse_limit(fail_on), summary["baseline"]
    numbers = summary["presets"].get(name)
    if numbers is None:
        raise LimitError(f"fail_on={fail_on}: the log holds lengths only; expected a log that tells what prompts share")
    if limit.holds(numbers):
        raise LimitError(f"fail_on={fail_on}: {limit.metric} of {name} is {numbers[limit.metric]:.4f}")


class BarMissedError(ValueError):
    """A number misses a bar; the study itself is complete."""


def raise_missed(summary: dict[str, Any]) -> None:
    """End with a sentence where a bar is missed; to be called when everything is written."""
    missed = [judged(told) for told in summary.get("bars", ())]
    sentences = [verdict.sentence() for verdict in missed if not verdict.holds]
    if sentences:
        raise BarMissedError("; ".join(sentences))


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
    summary = sums.summarise(family(strategy), own, own_runs, study.count_hit_as, load)
    summary["bytes"]["copied_mean"] = sums.copied_mean_bytes(every, own_runs, study.model.kv_bytes_per_token)
    summary["bounds"] = bounds.of_arm(arm, every)
    summary["bounds"]["served_alone"] = served_alone(every)
    summary["finds"] = PREFIXES if strategy.spans is None and strategy.passages.order == "given" else ANYWHERE
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
