"""Settings of entries that run no study, and the schemas of all entries and config groups."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from spanlab.checks import REQUIRED
from spanlab.core.batch_rules import BatchRules
from spanlab.core.tiers.rules import TierRules
from spanlab.model_spec import ModelSpec
from spanlab.settings.arms import Strategy
from spanlab.settings.export import Export
from spanlab.settings.output import OutputSettings, TrackingSettings
from spanlab.settings.server import ExecutorSettings, StoreSettings, TimingSettings
from spanlab.settings.study import Study
from spanlab.settings.workload import ArrivalSettings
from spanlab.workloads.load import WorkloadSettings
from spanlab.workloads.source import WORKLOADS
from spanlab_sim.hardware import HardwareSpec


@dataclass
class MakeShape:
    """Measure the shape of a workload from its text, and write the shape without the text.

    `kind`            as `workload.kind`
    `path`            the text: file or folder
    `out`             the shape: a file, or a folder for NAME.npz
    `tokenizer`       a tokenizer.json or its folder; null for a trace
    `queries_path`    user queries; system_prompts only
    `questions_path`  table of questions; narrativeqa only
    `words_path`      table of document lengths; narrativeqa only
    """

    kind: str = REQUIRED
    path: str = REQUIRED
    out: str = REQUIRED
    tokenizer: str | None = None
    queries_path: str | None = None
    questions_path: str | None = None
    words_path: str | None = None

    def __post_init__(self) -> None:
        local = f"{self.kind}/local"
        if self.tokenizer is None and (local not in WORKLOADS or WORKLOADS.takes(local, "tokenizer")):
            raise ValueError(f"tokenizer is not set with kind={self.kind}: expected a tokenizer.json, or its folder")


@dataclass
class Compare:
    """Compare finished runs: the differences of each arm with intervals, and the settings that differ.

    `runs`    folders of finished studies; the others are compared with the first
    `output`  output folder of the comparison
    """

    runs: list[str] = REQUIRED
    output: OutputSettings = field(default_factory=OutputSettings)

    def __post_init__(self) -> None:
        if len(self.runs) < 2:
            raise ValueError(f"runs={self.runs}: expected two folders or more")


@dataclass
class Schedule:
    """Run the scheduler on given requests, and write its decisions step by step.

    `cases`   JSON file of requests by case
    `out`     JSON file of decisions by case
    `preset`  the scheduler to use: vllm_0_32
    """

    cases: str = REQUIRED
    out: str = REQUIRED
    preset: str = "vllm_0_32"


def schemas() -> dict[tuple[str | None, str], type[Any]]:
    """Return every schema by (config group, name), for the ConfigStore."""
    return {
        (None, "base_study"): Study,
        (None, "base_make_shape"): MakeShape,
        (None, "base_schedule"): Schedule,
        (None, "base_compare"): Compare,
        (None, "base_export"): Export,
        ("model", "base_model"): ModelSpec,
        ("hardware", "base_hardware"): HardwareSpec,
        ("workload", "base_workload"): WorkloadSettings,
        ("arrivals", "base_arrivals"): ArrivalSettings,
        ("timing", "base_timing"): TimingSettings,
        ("batch", "base_batch"): BatchRules,
        ("store", "base_store"): StoreSettings,
        ("strategy", "base_strategy"): Strategy,
        ("tier", "base_tier"): TierRules,
        ("tracking", "base_tracking"): TrackingSettings,
        ("executor", "base_executor"): ExecutorSettings,
    }
