"""Finished runs, read from their folders for `compare`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from spanlab.steady import SATURATED
from spanlab.study.numbers import summary as sums
from spanlab.study.output.config import read_settings
from spanlab.study.output.folder import CONFIG


@dataclass(frozen=True)
class FinishedRun:
    """A finished study: its folder, and its name in the comparison."""

    folder: Path
    name: str

    @cached_property
    def summary(self) -> dict[str, Any]:
        """Contents of `summary.json`."""
        summary: dict[str, Any] = orjson.loads((self.folder / "summary.json").read_bytes())
        return summary

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Settings, fingerprint of the requests, commit and machine."""
        origin = {name: self.summary[name] for name in ("commit", "machine")}
        return read_settings((self.folder / CONFIG).read_text()) | origin

    def records(self, arm: str) -> sums.Columns:
        """Records of an arm at the study's load."""
        path = self.folder / "records" / f"{arm}.jsonl"
        try:
            columns = sums.read_records(path)
        except (ValueError, OSError) as error:
            raise ValueError(f"{path}: expected records of this version: {error}") from error
        rows = sums.at_rate(columns, self.settings["arrivals"]["rate_rps"])
        seeds = self.summary["arms"][arm]["seeds"] if "arms" in self.summary else self.summary["seeds"]
        return sums.select(columns, rows & np.isin(columns["seed"], seeds))

    @cached_property
    def serving(self) -> dict[str, dict[str, Any]]:
        """Serving metrics of each arm at the study's load; empty where the study did not compute them."""
        rate = self.settings["arrivals"]["rate_rps"]
        rows = self.summary.get("serving", ())
        return {row["arm"]: row["metrics"] for row in rows if row["rate_rps"] == rate}

    def saturated(self, arm: str) -> bool:
        """Whether the arm's queue grows."""
        return bool(self.summary["arms"][arm]["stationarity"]["verdict"] == SATURATED)


def finished_runs(paths: Sequence[str]) -> list[FinishedRun]:
    """Return the runs in these folders; a run's name is the folder's name, or its path where names are equal."""
    folders = [Path(text) for text in paths]
    counts = Counter(folder.resolve().name for folder in folders)
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ValueError(f"runs={paths}: expected different runs")
    runs = []
    for folder in folders:
        if not (folder / "summary.json").is_file():
            raise ValueError(f"runs={folder}: expected the folder of a finished run")
        run = FinishedRun(folder, str(folder) if counts[folder.resolve().name] > 1 else folder.resolve().name)
        if "arms" not in run.summary and not run.serving:
            raise ValueError(f"runs={folder}: expected a study; compare the points of a sweep one by one")
        runs.append(run)
    return runs
