"""A workload that is loaded once for studies that follow one another and ask for the same requests."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from spanlab import build
from spanlab.settings import WorkloadSettings
from spanlab.workloads import Workload


class LastWorkload:
    """`build_workload` that keeps what it returned last, and hands it out again where all arguments are equal."""

    def __init__(self) -> None:
        self._asked: Any = None
        self._last: Workload | None = None

    def __call__(self, settings: WorkloadSettings, cache_dir: str, serves: bool = True) -> Workload:
        """The workload of these settings."""
        asked = asdict(settings), cache_dir, serves
        if self._last is None or asked != self._asked:
            self._last = None  # or both would be in memory at once
            self._asked, self._last = asked, build.build_workload(settings, cache_dir, serves)
        return self._last
