"""Finished runs, read from their folders for `compare`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from spanlab.steady import SATURATED
from spanlab.study.numbers import summary as sums
from spanlab.study.output.config import read_settings
from spanlab.study.output.folder import CONFIG, SUMMARY
from spanlab.study.output.results import check_keys, read_summary

_NEEDED = ("commit", "machine", "caveats", "failed", "model", "workload.detail")  # of a summary, for a comparison
_NEEDED_OF_ARM = ("token_hit_rate", "ttft_s.mean", "stationarity.verdict", "seeds")


@dataclass(frozen=True)
class FinishedRun:
    """A finished study: its folder, and its name in the comparison."""

    folder: Path
    name: str

    @cached_property
    def summary(self) -> dict[str, Any]:
        """Contents of `summary.json`."""
        summary = read_summary(self.folder, *_NEEDED)
        path = self.folder / SUMMARY
        arms, rows = summary.get("arms", {}), summary.get("serving", [])
        if not isinstance(arms, dict) or not isinstance(rows, list):
            raise ValueError(f"{path}: arms or serving: expected the folder of a run that this version finished")
        for name in arms:
            check_keys(path, arms[name], _NEEDED_OF_ARM)
        for row in rows:
            check_keys(path, row, ("arm", "rate_rps", "metrics"))
        return summary

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Settings, fingerprint of the requests, commit and machine."""
        origin = {name: self.summary[name] for name in ("commit", "machine")}
        path = self.folder / CONFIG
        try:
            settings = read_settings(path.read_text())
        except (ValueError, TypeError, YAMLError, OmegaConfBaseException) as error:
            raise ValueError(f"{path}: expected the settings of a finished run, as YAML") from error
        check_keys(path, settings, ("arrivals.rate_rps",))
        return settings | origin

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
