"""What a sequence takes up in the cache, by the states kept of it."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from spanlab.checkpoint_bench.figures.lengths import Entries, of_length, shades, states_axis
from spanlab.report import look, scales
from spanlab.report.data import StudyData

MIB = 1 << 20


def draw(study: StudyData, summary: dict[str, Entries]) -> Figure | None:
    """Dots: bytes of the tensors in use after the cold prompt; lines: KV per token and bytes per state of the model."""
    captures = summary["captures"]
    if not captures:
        return None
    figure, [[ax]] = look.framed(
        study, "Bytes that one sequence holds: KV and states", margins=look.margins_for(["by the model's sizes"])
    )
    colours = shades(captures)
    for length, colour in colours.items():
        _draw_length(ax, of_length(captures, length), colour, _state_bytes(captures))
    states_axis(ax, (entry["states"] for entry in captures))
    sizes = np.array([_allocated(entry) for entry in captures])
    scales.log_scale(ax.yaxis, sizes.min(), sizes.max())
    ax.set_ylim(sizes.min() / 1.5, sizes.max() * 1.5)
    look.label(ax, "states kept", "bytes held after the cold prompt (MiB)")
    keys = [Line2D([], [], color=colour, marker="o", linestyle="", markersize=5) for colour in colours.values()]
    keys.append(Line2D([], [], color=look.INK, linestyle=(0, (5, 2)), linewidth=1))
    labels = [*(f"{length:,} tokens" for length in colours), "by the model's sizes"]
    ax.legend(keys, labels, loc="upper left", bbox_to_anchor=(1.01, 1.02), fontsize=8.5, frameon=False)
    return figure


def _allocated(entry: dict[str, int]) -> float:
    return (entry["kv_allocated_bytes"] + entry["state_allocated_bytes"]) / MIB


def _state_bytes(captures: Entries) -> float:
    """Bytes of one state, as the model's sizes say."""
    return next((entry["state_formula_bytes"] / entry["states"] for entry in captures if entry["states"]), 0.0)


def _draw_length(ax: Axes, own: Entries, colour: str, state: float) -> None:
    states = np.linspace(0, max(entry["states"] for entry in own), 400)
    kv = max(entry["kv_formula_bytes"] for entry in own)
    ax.plot(states, (kv + states * state) / MIB, color=colour, linestyle=(0, (5, 2)), linewidth=1)
    ax.plot([entry["states"] for entry in own], [_allocated(entry) for entry in own], "o", color=colour, markersize=5)
