"""Figure of `tail_replay`: divergence by the length of the gap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from spanlab.probe.recovery_scores import RecoveryResult
from spanlab.report import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = ("#0072b2", "#d55e00", "#aa4499", "#56b4e9", "#222222")
_LEAST = 1e-8  # a smaller divergence is drawn here
_PANELS = 4  # side by side


def draw_recoveries(measurements: Sequence[RecoveryResult], footer: str) -> Figure:
    """Draw a panel per model: KL to recompute by gap, a line for each recovery."""
    models = list(dict.fromkeys(row.source for row in measurements))
    rows = -(-len(models) // _PANELS)
    figure, grid = style.framed_with(
        footer,
        "Divergence of the next token from exact recompute",
        rows,
        min(len(models), _PANELS),
        height=2.3 + 2.2 * rows,
        share=("all", "all"),
        margins=style.Margins(right=2.1, top=1.0),
        wspace=0.15,
        hspace=0.45,
    )
    panels = [ax for row in grid for ax in row]
    for ax, model in zip(panels, models, strict=False):
        _draw_model(ax, [row for row in measurements if row.source == model])
        ax.set_title(f"{model.name}\n{max(model.below)} attention below", fontsize=8, loc="left", color=style.INK)
    for ax in panels[len(models) :]:
        ax.set_axis_off()
    most = max(row.kl.mean for row in measurements)
    style.log_scale(panels[0].yaxis, _LEAST, max(most, 1.0))
    for row in grid:
        row[0].set_ylabel(f"KL (nats), from {_LEAST:g}", fontsize=8, color=style.INK)
    for ax in grid[-1]:
        ax.set_xlabel("gap (tokens)", fontsize=8, color=style.INK)
    style.legend_right(grid[0][-1], title="instead of recompute")
    return figure


def _draw_model(ax: Axes, measurements: Sequence[RecoveryResult]) -> None:
    for arm, colour in zip(dict.fromkeys(row.arm for row in measurements), _COLOURS, strict=True):
        arm_rows = [row for row in measurements if row.arm == arm]
        gaps = [row.gap for row in arm_rows]
        ax.plot(
            gaps,
            [max(row.kl.mean, _LEAST) for row in arm_rows],
            "o-",
            color=colour,
            markersize=3.5,
            label=arm.replace(", ", ",\n"),
        )
    style.log_scale(ax.xaxis, min(gaps), max(gaps))
    ax.set_xticks(gaps, list(map(str, gaps)), fontsize=8)
