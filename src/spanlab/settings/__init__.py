"""Configuration schemas for Hydra: dataclasses that check their values when they are created.

The dataclasses are not frozen, because OmegaConf makes a frozen schema read-only. Every error names
the key, the value and what was expected. Sizes are GiB, times seconds, rates requests per second;
None: "no limit" or "not set".
"""

from __future__ import annotations

from spanlab.core.admission import BatchRules
from spanlab.engine.settings import EngineSettings
from spanlab.settings.analyses import PlanSettings, SloSettings
from spanlab.settings.arms import PlacementSettings, Strategy
from spanlab.settings.composition import schemas
from spanlab.settings.server import ExecutorSettings, LoadSweep, StoreSettings, TrackingSettings
from spanlab.settings.study import Study, worker_count
from spanlab.workloads.load import WorkloadSettings

__all__ = [
    "BatchRules",
    "EngineSettings",
    "ExecutorSettings",
    "LoadSweep",
    "PlacementSettings",
    "PlanSettings",
    "SloSettings",
    "StoreSettings",
    "Strategy",
    "Study",
    "TrackingSettings",
    "WorkloadSettings",
    "schemas",
    "worker_count",
]
