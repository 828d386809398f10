"""Schemas of entries and of config groups."""

from __future__ import annotations

from typing import Any

from spanlab.core.admission import BatchRules
from spanlab.core.tiers import TierRules
from spanlab.model_spec import HardwareSpec, ModelSpec
from spanlab.registry import ENTRIES
from spanlab.settings.arms import Strategy
from spanlab.settings.server import ExecutorSettings, StoreSettings, TrackingSettings
from spanlab.workloads.load import WorkloadSettings
from spanlab_sim.arrivals import Arrivals
from spanlab_sim.timings import Timing

_GROUPS: dict[tuple[str | None, str], type[Any]] = {
    ("model", "base_model"): ModelSpec,
    ("hardware", "base_hardware"): HardwareSpec,
    ("workload", "base_workload"): WorkloadSettings,
    ("arrivals", "base_arrivals"): Arrivals,
    ("timing", "base_timing"): Timing,
    ("batch", "base_batch"): BatchRules,
    ("store", "base_store"): StoreSettings,
    ("strategy", "base_strategy"): Strategy,
    ("tier", "base_tier"): TierRules,
    ("tracking", "base_tracking"): TrackingSettings,
    ("executor", "base_executor"): ExecutorSettings,
}


def schemas() -> dict[tuple[str | None, str], type[Any]]:
    """Return every schema by (config group, name), for the ConfigStore: those of entries, and those of groups."""
    return {(None, f"base_{name}"): entry.schema for name, entry in ENTRIES.items()} | _GROUPS
