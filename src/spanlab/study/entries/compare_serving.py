"""Serving metrics of finished runs compared with the first one, such as a real server and its simulated run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from spanlab.analysis.pairs import UnpairedError, paired
from spanlab.report.runs_table import ServingDifference, serving_differences
from spanlab.report.tables import Table
from spanlab.study.entries.finished_runs import FinishedRun


def compare_serving(runs: Sequence[FinishedRun]) -> Table:
    """Table of every metric that the first run and another run share, by arm, with errors of single requests."""
    first, *others = runs
    rows = [
        row for other in others for arm in first.serving if arm in other.serving for row in _rows(first, other, arm)
    ]
    if not rows:
        raise ValueError(f"runs={[run.name for run in runs]}: expected an arm that two runs share")
    title = f"Serving: {' and '.join(other.name for other in others)} beside {first.name}"
    return serving_differences(title, rows, several=len(others) > 1)


def _rows(first: FinishedRun, other: FinishedRun, arm: str) -> Iterator[ServingDifference]:
    ours, theirs = first.serving[arm], other.serving[arm]
    errors = _errors(first, other, arm)
    for name in ours:
        if name in theirs:
            values = ours[name]["mean"], theirs[name]["mean"]
            yield ServingDifference(arm, other.name, name, values, errors.get(name))


def _errors(first: FinishedRun, other: FinishedRun, arm: str) -> dict[str, tuple[float, float]]:
    """Median and p95 over requests of |other − first| ÷ first, by metric; empty where requests cannot be paired."""
    try:
        pairs = paired(first.records(arm), other.records(arm))
    except UnpairedError:
        return {}
    ours, theirs = (_delays(columns) for columns in (pairs.first, pairs.other))
    errors = {}
    for name, values in ours.items():
        positive = values > 0
        if positive.any():
            error = np.abs(theirs[name][positive] - values[positive]) / values[positive]
            errors[name] = (float(np.median(error)), float(np.percentile(error, 95)))
    return errors


def _delays(columns: dict[str, Any]) -> dict[str, Any]:
    """Client-side delays in seconds, by the name of their mean."""
    arrived, first, last = (columns[f"{name}_s"] for name in ("arrived", "first_token", "finished"))
    return {"mean_ttft_ms": first - arrived, "mean_e2el_ms": last - arrived}
