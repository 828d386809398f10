"""Waiting and running requests over time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from spanlab.analysis.serving import Queues
from spanlab.report.drawing import scales, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(queues: Mapping[str, Queues], families: Mapping[str, str], footer: str) -> Figure:
    """Draw one line per arm, of its first run: waiting requests above, running requests below."""
    figure, [[above], [below]] = style.framed_with(
        footer, "Requests that wait and that run", rows=2, margins=style.margins_for(queues), share=("col", "none")
    )
    unit = scales.time_unit(max(float(arm_queues.time_s[-1]) for arm_queues in queues.values()))
    for name, stroke in style.strokes(families.items()).items():
        arm_queues = queues[name]
        for ax, counts in ((above, arm_queues.waiting), (below, arm_queues.running)):
            options = {"color": stroke.colour, "linestyle": stroke.line, "linewidth": 1.0}
            ax.plot(arm_queues.time_s * unit.factor, counts, drawstyle="steps-post", label=name, **options)
    style.label(above, "", "waiting")
    style.label(below, f"time ({unit.name})", "running")
    for ax in (above, below):
        ax.set_ylim(bottom=0)
    style.legend_right(above)
    return figure
