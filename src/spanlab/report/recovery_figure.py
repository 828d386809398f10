"""Figure of `tail_replay`: divergence by the length of the gap."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spanlab.analysis.recovery import Measured
from spanlab.report import scales, style

_COLOURS = ("#0072b2", "#d55e00", "#aa4499", "#56b4e9", "#222222")
_LEAST = 1e-8  # a smaller divergence is drawn here


def draw_recoveries(found: Sequence[Measured], footer: str) -> Figure:
    """A panel per model: KL to recompute by gap, a line for each recovery."""
    models = list(dict.fromkeys(row.source for row in found))
    figure, [axes] = style.framed_with(
        footer,
        "Divergence of the next token from exact recompute",
        1,
        len(models),
        share=("all", "all"),
        margins=style.Margins(right=2.4),
        wspace=0.12,
    )
    for ax, model in zip(axes, models, strict=True):
        _draw_model(ax, [row for row in found if row.source == model])
        ax.set_title(f"{model.name}\n{max(model.below)} attention below", fontsize=8, loc="left", color=style.INK)
        style.label(ax, "gap (tokens)", size=8)
    most = max(row.kl.mean for row in found)
    scales.log_scale(axes[0].yaxis, _LEAST, max(most, 1.0))
    style.label(axes[0], "gap (tokens)", f"KL (nats), smaller ones at {_LEAST:g}", size=8)
    style.legend_right(axes[-1], title="instead of recompute")
    return figure


def _draw_model(ax: Axes, found: Sequence[Measured]) -> None:
    for arm, colour in zip(dict.fromkeys(row.arm for row in found), _COLOURS, strict=True):
        own = [row for row in found if row.arm == arm]
        gaps = [row.gap for row in own]
        ax.plot(gaps, [max(row.kl.mean, _LEAST) for row in own], "o-", color=colour, markersize=3.5, label=arm)
    scales.log_scale(ax.xaxis, min(gaps), max(gaps))
    ax.set_xticks(gaps, list(map(str, gaps)))
