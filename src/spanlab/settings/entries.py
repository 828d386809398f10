"""Schemas of entries and of config groups, and the choices that need no file of conf/."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

from spanlab.compiled import CONF
from spanlab.core.admission import BatchRules
from spanlab.core.placement.rules import PLACEMENTS
from spanlab.core.tiers import TierRules
from spanlab.kinds import kinds_of
from spanlab.model_spec import HardwareSpec, ModelSpec
from spanlab.registry import ENTRIES
from spanlab.settings.arms import Strategy
from spanlab.settings.server import EXECUTORS, TRACKERS, ExecutorSettings, StoreSettings, TrackingSettings
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


#: Choices that are the defaults of their schema.
_DEFAULTS = {
    ("store", "unlimited"): "No limit.",
    ("tier", "own"): "Your own tier: store.tiers.NAME.gib=SIZE store.tiers.NAME.bandwidth_gb_s=RATE.",
}


class Choice(NamedTuple):
    """A choice that no file of conf/ describes.

    `content`  what it sets, as a file would
    `meaning`  the first line of the docstring of what it chooses
    """

    content: dict[str, Any]
    meaning: str


def choices_without_file() -> dict[tuple[str | None, str], Choice]:
    """Return the choices that have no file, by (group, name); entries have the group None.

    An entry without further settings, a kind with its own defaults, and a strategy that sets its
    placement alone: a file would repeat the name.
    """
    made: dict[tuple[str | None, str], Choice] = {}
    for name in ENTRIES.keys() - {"study"}:  # which config.yaml completes
        content = {"defaults": [f"base_{name}", {"hydra": "default"}, "_self_"]}
        made[None, name] = Choice(content, _first_line(ENTRIES[name].schema))
    for (group, _), schema in _GROUPS.items():
        kinds: Any = kinds_of(schema) or {}
        made |= {(group, name): Choice({"kind": name}, _first_line(kinds[name])) for name in kinds}
    for group, texts in {"executor": EXECUTORS, "tracking": TRACKERS}.items():
        made |= {(group, name): Choice({"kind": name}, text) for name, text in texts.items()}
    made |= {at: Choice({}, text) for at, text in _DEFAULTS.items()}
    for name in PLACEMENTS:
        if not PLACEMENTS.needs_options(name):
            text = _first_line(PLACEMENTS[name]).removeprefix(f"`{name}`: ")
            made["strategy", name] = Choice({"placement": {"kind": name}}, text[0].upper() + text[1:])
    return {at: choice for at, choice in made.items() if not (CONF / (at[0] or "") / f"{at[1]}.yaml").is_file()}


def _first_line(documented: Any) -> str:
    return (inspect.getdoc(documented) or "").partition("\n")[0]
