"""Time to first token by reused tokens, with its bound; one shade per prompt length."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from spanlab.report.drawing import scales, style
from spanlab.report.prefill.data import PrefillData

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LIGHTEST, _DARKEST = 0.82, 0.08


def draw(data: PrefillData) -> Figure | None:
    """Draw median (dot), quartiles and bound (cross) of every arm and kind of request."""
    from matplotlib.lines import Line2D

    if not all(entry["bound_s"] for entry in data.entries):
        return None
    lengths = data.lengths()
    names = [f"{length:,.0f} tokens" for length in lengths]
    figure, [[ax]] = style.framed_with(
        data.footer,
        "Time to first token by reused tokens",
        margins=style.margins_for([*names, "bound, measured rates"]),
    )
    unit = scales.time_unit(max(entry["ttft_s"]["p75"] for entry in data.entries))
    shades = _shades(len(lengths))
    for length, shade in zip(lengths, shades, strict=True):
        entries = [entry for entry in data.entries if entry["prompt_tokens"] == length]
        reused = [entry["reused_tokens"] for entry in entries]
        low, middle, high = (
            np.array([entry["ttft_s"][point] for entry in entries]) * unit.factor for point in ("p25", "p50", "p75")
        )
        spread = (middle - low, high - middle)
        ax.errorbar(reused, middle, spread, fmt="o", color=shade, markersize=4, elinewidth=0.8, alpha=0.8)
        ax.plot(reused, [entry["bound_s"] * unit.factor for entry in entries], "x", color=shade, markersize=4)
    times = [entry["bound_s"] for entry in data.entries]
    times += [entry["ttft_s"][point] for entry in data.entries for point in ("p25", "p75")]
    bottom, top = scales.positive_range(np.array(times) * unit.factor)
    scales.log_scale(ax.yaxis, bottom, top)
    ax.set_ylim(bottom / 1.4, top * 1.4)
    scales.count_ticks(ax.xaxis)
    style.label(ax, "reused tokens", f"TTFT ({unit.name})")
    keys = [Line2D([], [], color=shade, marker="o", linestyle="", markersize=5) for shade in shades]
    keys.append(Line2D([], [], color=style.INK, marker="x", linestyle="", markersize=4))
    labels = [*names, "bound, measured rates"]
    ax.legend(keys, labels, loc="upper left", bbox_to_anchor=(1.01, 1.02), fontsize=8.5, frameon=False)
    return figure


def _shades(count: int) -> list[str]:
    """Return a shade for each of `count` lengths, light to dark."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    step = (_LIGHTEST - _DARKEST) / max(count - 1, 1)
    return [to_hex(colormaps["viridis"](_LIGHTEST - step * index)) for index in range(count)]
