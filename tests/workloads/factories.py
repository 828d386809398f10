"""Factories of workloads from settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spanlab import workloads
from spanlab.workloads import Rag, RagPulse, Synthetic, Workload, WorkloadSettings

OWN = {"rag": Rag, "ragpulse": RagPulse, "synthetic": Synthetic}


def load_workload(kind: str, source: str | None = None, *, cache_dir: Path | None = None, **keys: Any) -> Workload:
    """Load a workload with the default options of its kind."""
    if kind in OWN:
        keys.setdefault(kind, OWN[kind]())
    return workloads.load_workload(WorkloadSettings(kind, source, **keys), cache_dir)
