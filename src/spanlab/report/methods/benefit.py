"""Quality over time to first token: one point per method, between the floor and the ceiling of the answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from spanlab.report.drawing import scales, style
from spanlab.report.drawing.labels import Label, place_labels
from spanlab.report.methods.data import Entry, MethodData, ends

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw(data: MethodData) -> Figure | None:
    """Draw the share of the context's benefit that each method keeps over mean TTFT; without shares, gold loss."""
    key = "benefit_kept" if all(entry["benefit_kept"] for entry in data.entries.values()) else "gold_loss"
    factor, name = (100.0, "benefit of the context kept (%)") if key == "benefit_kept" else (1.0, "gold loss (nats)")
    direction = "more is better" if key == "benefit_kept" else "less is better"
    figure, [[ax]] = style.framed_with(
        data.footer, "Answer quality and TTFT of reuse methods", margins=style.Margins(right=1.5)
    )
    drawn = {**data.methods, data.baseline: data.entries[data.baseline]}
    unit = scales.time_unit(max(entry["ttft_s"]["mean"] for entry in drawn.values()))
    strokes = style.strokes((name, entry["family"]) for name, entry in drawn.items())
    labels = [_point(ax, name, entry, key, unit.factor, factor, strokes[name]) for name, entry in drawn.items()]
    for arm, text in (
        (data.baseline, "full recompute"),
        (data.without, "no passages"),
        (data.gold_only, "gold alone"),
    ):
        if arm is not None and arm in data.entries:
            _line(ax, data.entries[arm], key, factor, text)
    low, high = (edge * unit.factor for edge in _times(drawn))
    scales.log_scale(ax.xaxis, low, high)
    ax.set_xlim(low / 1.25, high * 1.25)
    style.label(ax, f"mean time to first token ({unit.name})", f"{name}; {direction}")
    place_labels(ax, labels, [bar for entry in drawn.values() for bar in _bars(entry, key, unit.factor, factor)])
    return figure


def _times(drawn: dict[str, Entry]) -> tuple[float, float]:
    means = [entry["ttft_s"]["mean"] for entry in drawn.values()]
    return min(means), max(means)


def _point(ax: Axes, name: str, entry: Entry, key: str, across: float, up: float, stroke: style.Stroke) -> Label:
    x, y = across * entry["ttft_s"]["mean"], up * entry[key]["mean"]
    x_reach, y_reach = _reach(entry["ttft_s"], across), _reach(entry[key], up)
    ax.errorbar(x, y, y_reach, x_reach, fmt=stroke.marker, color=stroke.colour, markersize=6, elinewidth=0.9)
    return Label(x, y, name, stroke.colour)


def _bars(entry: Entry, key: str, across: float, up: float) -> Iterator[list[tuple[float, float]]]:
    """Return the ends of a point's error bars, which labels should not cover."""
    x, y = across * entry["ttft_s"]["mean"], up * entry[key]["mean"]
    if x_ends := ends(entry["ttft_s"]):
        yield [(across * end, y) for end in x_ends]
    if y_ends := ends(entry[key]):
        yield [(x, up * end) for end in y_ends]


def _reach(estimate: Entry, factor: float) -> list[list[float]] | None:
    """Return the distances of the ends of an interval below and above its mean."""
    reach = ends(estimate)
    if reach is None:
        return None
    return [[factor * (estimate["mean"] - reach[0])], [factor * (reach[1] - estimate["mean"])]]


def _line(ax: Axes, entry: Entry, key: str, factor: float, text: str) -> None:
    """Draw a reference level: dashed, with its interval as a band and its name in the right margin."""
    level, reach = factor * entry[key]["mean"], ends(entry[key])
    ax.axhline(level, color="#777777", linewidth=0.9, linestyle=(0, (4, 2)))
    if reach is not None and reach[0] < reach[1]:
        ax.axhspan(factor * reach[0], factor * reach[1], color="#777777", alpha=0.08, linewidth=0)
    ax.annotate(
        text,
        (1, level),
        (6, 0),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        va="center",
        fontsize=style.TICK_PT,
        color=style.INK,
        annotation_clip=False,
    )
