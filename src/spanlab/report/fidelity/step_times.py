"""Predicted and measured step times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from spanlab.analysis.points import Point
from spanlab.core.step_features import StepFeatures
from spanlab.report.drawing import scales, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Kinds of steps: prompts, prompts while other requests decode, or decoding alone.
KINDS: dict[str, tuple[Callable[[StepFeatures], bool | int], str, str]] = {
    "prefill": (lambda step: not step.num_decodes, "#0072b2", "o"),
    "prefill and decode": (lambda step: step.num_prefills and step.num_decodes, "#e69f00", "^"),
    "decode": (lambda step: not step.num_prefills, "#d55e00", "s"),
}


def draw(points: Sequence[Point], errors: NDArray[np.float64], footer: str) -> Figure:
    """Draw one point per step, predicted by coefficients fitted without its shape, with a line of equality."""
    figure, [[ax]] = style.framed_with(
        footer,
        "Time of a step, predicted without its shape and measured",
        margins=style.margins_for([*KINDS, "±10 %"]),
    )
    measured = np.array([point.mean_ns for point in points]) * 1e-9
    predicted = measured * (1 + errors)
    unit = scales.time_unit(float(measured.max()))
    for name, (is_kind, colour, marker) in KINDS.items():
        mask = np.array([bool(is_kind(point.features)) for point in points])
        ax.plot(
            measured[mask] * unit.factor,
            predicted[mask] * unit.factor,
            color=colour,
            marker=marker,
            markersize=4,
            alpha=0.6,
            markeredgewidth=0,
            linestyle="",
            label=name,
        )
    low, high = scales.positive_range(np.concatenate([measured, predicted]) * unit.factor)
    line = np.array([low / 1.2, high * 1.2])
    ax.plot(line, line, color=style.INK, linewidth=1.0, label="equal")
    ax.fill_between(line, line * 0.9, line * 1.1, color=style.INK, alpha=0.08, linewidth=0, label="±10 %")
    for axis in (ax.xaxis, ax.yaxis):
        scales.log_scale(axis, low, high)
    ax.set_xlim(*line)
    ax.set_ylim(*line)
    style.label(ax, f"measured, mean of repeats ({unit.name})", f"predicted ({unit.name})")
    style.legend_right(ax)
    return figure
