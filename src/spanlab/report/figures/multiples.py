"""Small multiples: one panel per arm, all on the same axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from spanlab.report.data import StudyData
from spanlab.report.drawing import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PANEL_IN = 1.75
_TITLE_CHARS = 92  # across all panels of a row
_MARGINS = style.Margins(left=0.75, top=0.85, bottom=0.95)


def small_multiples(study: StudyData, title: str, names: Sequence[str], cols: int) -> tuple[Figure, list[Axes]]:
    """Return a figure and one titled panel per entry of `names`, filled by row; all panels share both axes."""
    cols = min(cols, len(names))
    rows = -(-len(names) // cols)
    height = _MARGINS.top + _MARGINS.bottom + max(rows * _PANEL_IN, 2.4)
    figure, axes = style.framed_with(
        study.provenance,
        title,
        rows,
        cols,
        height=height,
        margins=_MARGINS,
        share=("all", "all"),
        hspace=0.3,
        wspace=0.18,
    )
    panels = [ax for row in axes for ax in row]
    for ax in panels[len(names) :]:
        ax.remove()
    for k, (ax, name) in enumerate(zip(panels, names, strict=False)):
        ax.set_title(_shortened(name, _TITLE_CHARS // cols), fontsize=style.TICK_PT, loc="left", pad=3, color=style.INK)
        # the panel above a removed one is the last of its column
        ax.tick_params(labelbottom=k + cols >= len(names), labelleft=k % cols == 0)
    return figure, panels[: len(names)]


def _shortened(name: str, width: int) -> str:
    return name if len(name) <= width else f"{name[: width - 1]}…"


def label_outer(figure: Figure, x: str, y: str) -> None:
    """Name the shared axes once, in the middle of the figure's edges."""
    height = figure.get_figheight()
    middle = (1 + (_MARGINS.left - _MARGINS.right) / style.WIDTH_IN) / 2
    figure.supxlabel(x, x=middle, y=0.42 / height, va="bottom", fontsize=style.LABEL_PT, color=style.INK)
    centre = (1 + (_MARGINS.bottom - _MARGINS.top) / height) / 2
    figure.supylabel(y, x=0.12 / style.WIDTH_IN, y=centre, ha="left", fontsize=style.LABEL_PT, color=style.INK)


def legend_top(figure: Figure, handles: Sequence[Any]) -> None:
    """One row of keys between title and panels."""
    figure.legend(
        handles=list(handles),
        loc="upper left",
        bbox_to_anchor=(0.05 / style.WIDTH_IN, 1 - 0.33 / figure.get_figheight()),
        ncols=len(handles),
        fontsize=8.5,
        frameon=False,
        borderpad=0.2,
    )
