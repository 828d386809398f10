"""Prompt tokens by category: reused, or computed for one of the loss causes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spanlab.records import LOSS_CAUSES
from spanlab.report.data import ArmData, StudyData
from spanlab.report.drawing import style
from spanlab.report.figures import FIGURES
from spanlab.report.measures import category_tokens

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CATEGORIES = ("reused", *LOSS_CAUSES)
_ROW_IN = 0.19


@FIGURES.register("loss_by_cause")
def draw(study: StudyData) -> Figure | None:
    """Draw one bar per arm in percent of its prompt tokens, most reused on top; categories sum to 100 %."""
    arms = sorted(study.arms, key=lambda arm: (share_percent(arm, "reused"), arm.name))
    if not arms:
        return None
    margins = style.Margins(left=0.4 + 0.07 * max(len(_title(arm)) for arm in arms), right=1.8)
    height = margins.top + margins.bottom + max(_ROW_IN * len(arms), 1.6)
    figure, [[ax]] = style.framed_with(
        study.provenance, f"Prompt tokens by cause · store: {study.store}", height=height, margins=margins
    )
    starts = [0.0] * len(arms)
    for category in _CATEGORIES:
        starts = _draw_category(ax, arms, category, starts)
    ax.set_yticks(range(len(arms)), [_title(arm) for arm in arms])
    ax.set_xlim(0, 100)
    ax.set_ylim(-0.6, len(arms) - 0.4)
    ax.grid(False, axis="y")
    style.label(ax, "share of prompt tokens (%)", "arm (reused, %)")
    style.legend_right(ax)
    return figure


def share_percent(arm: ArmData, category: str) -> float:
    """Return the tokens of one category, `reused` or a loss cause, in percent of the prompt tokens."""
    tokens = arm.summary["tokens"]
    return 100.0 * category_tokens(tokens, category) / float(tokens["prompt"] or 1)


def _draw_category(ax: Axes, arms: list[ArmData], category: str, starts: list[float]) -> list[float]:
    widths = [share_percent(arm, category) for arm in arms]
    label = category.replace("_", " ").replace("kv ", "KV ") if any(widths) else None
    colour = style.CAUSE_COLOURS.get(category, "#999999")
    ax.barh(range(len(arms)), widths, 0.78, starts, color=colour, label=label, gid=category, linewidth=0)
    return [start + width for start, width in zip(starts, widths, strict=True)]


def _title(arm: ArmData) -> str:
    # figure spaces are as wide as digits, so that the numbers form a column
    percent = f"{share_percent(arm, 'reused'):5.1f}".replace(" ", "\u2007")
    return f"{arm.name}  {percent}"
