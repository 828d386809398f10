"""Metrics of serving of finished runs beside the first of them: a real server and its twin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from spanlab.analysis.pairs import UnpairedError, paired
from spanlab.report.runs_table import ServingDifference, serving_differences
from spanlab.report.tables import Table
from spanlab.study.entries.finished_runs import FinishedRun


def compare_serving(runs: Sequence[FinishedRun]) -> Table:
    """Every metric that the first run and another one have, by arm, and how far off single requests are."""
    first, *others = runs
    rows = [
        row for other in others for arm in first.serving if arm in other.serving for row in _rows(first, other, arm)
    ]
    if not rows:
        raise ValueError(f"runs={[one.name for one in runs]}: expected an arm that two runs share")
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
    """Median and p95 over requests of |other − first| ÷ first; empty where requests cannot be paired."""
    try:
        pairs = paired(first.records(arm), other.records(arm))
    except UnpairedError:
        return {}
    ours, theirs = (_delays(columns) for columns in (pairs.first, pairs.other))
    found = {}
    for name, values in ours.items():
        known = values > 0
        if known.any():
            error = np.abs(theirs[name][known] - values[known]) / values[known]
            found[name] = (float(np.median(error)), float(np.percentile(error, 95)))
    return found


def _delays(columns: dict[str, Any]) -> dict[str, Any]:
    """Delays that a client sees, by the names of their means."""
    arrived, first, last = (columns[f"{name}_s"] for name in ("arrived", "first_token", "finished"))
    return {"mean_ttft_ms": first - arrived, "mean_e2el_ms": last - arrived}
