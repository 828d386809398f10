"""Cache content over time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from spanlab.report.data import ArmData, StudyData
from spanlab.report.drawing import scales
from spanlab.report.figures import FIGURES, multiples
from spanlab.report.figures.representatives import best_of_families
from spanlab.report.measures import holds_states, is_full_recompute

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ARMS = 8
_COLS = 4
_KV, _STATES = "#0072b2", "#e69f00"


@FIGURES.register("cache_content")
def draw(study: StudyData) -> Figure | None:
    """Draw stacked KV and state bytes over the run of the first seed, one panel per arm with shared axes."""
    from matplotlib.patches import Patch

    candidates = (arm for arm in study.arms if not is_full_recompute(arm) and _holds_bytes(arm))
    arms = best_of_families(candidates, _ARMS)
    if not arms:
        return None
    figure, panels = multiples.small_multiples(
        study, f"Cache content over time · store: {study.store}", [arm.name for arm in arms], _COLS
    )
    longest = max(arm.runs[0]["timeline_s"][-1] for arm in arms)
    unit = scales.time_unit(longest)
    byte_unit = scales.byte_unit(max(_most_bytes(arm.runs[0]) for arm in arms))
    for ax, arm in zip(panels, arms, strict=True):
        _draw_arm(ax, arm.runs[0], unit.factor, byte_unit.factor)
    panels[0].set_xlim(0, longest * unit.factor or 1)
    panels[0].set_ylim(bottom=0)
    multiples.label_outer(figure, f"time since start ({unit.name})", f"bytes held ({byte_unit.name})")
    states = [Patch(color=_STATES, label="states")] if any(map(holds_states, arms)) else []
    multiples.legend_top(figure, [*states, Patch(color=_KV, label="KV")])
    return figure


def _holds_bytes(arm: ArmData) -> bool:
    run = arm.runs[0] if arm.runs else {}
    return any(run.get("timeline_kv_bytes", ())) or any(run.get("timeline_state_bytes", ()))


def _most_bytes(run: dict[str, Any]) -> float:
    return float(np.max(np.asarray(run["timeline_kv_bytes"]) + np.asarray(run["timeline_state_bytes"])))


def _draw_arm(ax: Axes, run: dict[str, Any], per_second: float, per_byte: float) -> None:
    time = np.asarray(run["timeline_s"]) * per_second
    kv = np.asarray(run["timeline_kv_bytes"]) * per_byte
    total = kv + np.asarray(run["timeline_state_bytes"]) * per_byte
    ax.fill_between(time, 0, kv, color=_KV, linewidth=0, step="post")
    ax.fill_between(time, kv, total, color=_STATES, linewidth=0, step="post")
