"""Configuration schemas for Hydra: dataclasses that check their values when they are created.

The dataclasses are not frozen, because OmegaConf makes a frozen schema read-only. Every error names the key, the
value and what was expected. Sizes are GiB, times seconds, rates requests per second; None: "no limit" or "not set".
"""

from __future__ import annotations

from spanlab.checks import refuse_unknown_keys
from spanlab.core.batch_rules import BatchRules
from spanlab.core.placement import Dp
from spanlab.core.spans import SpanSettings
from spanlab.engine.settings import EngineSettings
from spanlab.settings.arms import Strategy
from spanlab.settings.design import DesignSettings
from spanlab.settings.entries import Compare, MakeShape, Schedule, schemas
from spanlab.settings.load_sweep import LoadSweep
from spanlab.settings.output import OutputSettings, TrackingSettings
from spanlab.settings.placement import PlacementSettings
from spanlab.settings.plan import PlanSettings
from spanlab.settings.pool import PoolSettings
from spanlab.settings.server import ExecutorSettings, StoreSettings, TimingSettings
from spanlab.settings.slo import SloSettings
from spanlab.settings.study import Study, worker_count
from spanlab.settings.twin import TwinSettings
from spanlab.settings.workload import ArrivalSettings
from spanlab.workloads.load import Popularity, WorkloadSettings

__all__ = [
    "ArrivalSettings",
    "BatchRules",
    "Compare",
    "DesignSettings",
    "Dp",
    "EngineSettings",
    "ExecutorSettings",
    "LoadSweep",
    "MakeShape",
    "OutputSettings",
    "PlacementSettings",
    "PlanSettings",
    "PoolSettings",
    "Popularity",
    "Schedule",
    "SloSettings",
    "SpanSettings",
    "StoreSettings",
    "Strategy",
    "Study",
    "TimingSettings",
    "TrackingSettings",
    "TwinSettings",
    "WorkloadSettings",
    "refuse_unknown_keys",
    "schemas",
    "worker_count",
]
