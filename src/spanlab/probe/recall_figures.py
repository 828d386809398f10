"""Figures of the probe: training, answers by arm, norms of transitions by length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from spanlab.probe.recall_scores import HeadNorm, Score, TrainingPoint
from spanlab.report import style
from spanlab.stats import Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ALL, _UPDATED, _FIRST = "#222222", "#d55e00", "#56b4e9"
_COLOURS = ("#0072b2", "#d55e00", "#117733", "#aa4499")
_LEAST_NORM = 1e-6  # a smaller norm is drawn here


def draw_training(points: Sequence[TrainingPoint], footer: str) -> Figure:
    """Draw loss and accuracy by step, a line for each way in which questions read the documents."""
    figure, [[above], [below]] = style.framed_with(
        footer, "Training of the probe", 2, 1, height=5.5, share=("col", "none"), margins=style.Margins(right=1.6)
    )
    for view, colour in zip(dict.fromkeys(point.read for point in points), _COLOURS, strict=False):
        view_points = [point for point in points if point.read == view]
        steps = [point.step for point in view_points]
        above.plot(steps, [point.loss for point in view_points], color=colour, label=view)
        below.plot(steps, [100 * point.accuracy for point in view_points], color=colour)
    style.label(above, "", "gold loss (nats)")
    style.label(below, "step", "accuracy (%)")
    style.legend_right(above, title="questions read")
    return figure


def draw_answers(cases: Mapping[str, Sequence[Score]], footer: str) -> Figure:
    """Draw a panel per case: accuracy of each arm, over all questions and over two kinds of questions."""
    arms = [score.arm for score in next(iter(cases.values()))]
    figure, [axes] = style.framed_with(
        footer,
        "Accuracy of answers by what questions read of the documents",
        1,
        len(cases),
        height=2.0 + 0.22 * len(arms),
        share=("all", "all"),
        margins=style.Margins(left=0.35 + 0.075 * max(map(len, arms)), top=0.8, bottom=1.35),
        wspace=0.12,
    )
    for ax, (case, scores) in zip(axes, cases.items(), strict=True):
        _draw_case(ax, scores)
        ax.set_title(f"{case.replace('x', ' x ')} tokens", fontsize=9, loc="left", color=style.INK)
        style.label(ax, "accuracy (%)", size=8)
    axes[0].set_yticks(range(len(arms)), arms)
    axes[0].set_ylim(len(arms) - 0.5, -0.5)
    axes[0].legend(loc="upper left", bbox_to_anchor=(0, -0.13), ncols=3, fontsize=8, frameon=False)
    return figure


def _draw_case(ax: Axes, scores: Sequence[Score]) -> None:
    marks = {"updated keys": ("d", _UPDATED), "keys of the first document": ("^", _FIRST)}
    for row, score in enumerate(scores):
        _draw_interval(ax, row, score.accuracy)
        intervals = dict(zip(marks, (score.updated, score.first), strict=True))
        for name, interval in intervals.items():
            if interval is not None:
                marker, colour = marks[name]
                ax.plot(100 * interval.mean, row, marker, color=colour, markersize=4.5, label=None if row else name)
    ax.plot([], [], "o", color=_ALL, markersize=4, label="all questions, 95 % interval")
    ax.set_xlim(-3, 103)


def _draw_interval(ax: Axes, row: int, accuracy: Interval) -> None:
    ends = [100 * end for end in (accuracy.low, accuracy.high) if end is not None]
    ax.plot(ends, [row] * len(ends), color=_ALL, linewidth=2)
    ax.plot(100 * accuracy.mean, row, "o", color=_ALL, markersize=4)


def draw_norms(norms: Sequence[HeadNorm], footer: str) -> Figure:
    """Draw a dot per head: the norm of A by the length of its span, one colour per model."""
    figure, [[ax]] = style.framed_with(
        footer, "Spectral norm of the transition of a span, one dot per head", margins=style.Margins(right=1.5)
    )
    sources = list(dict.fromkeys(head.source for head in norms))
    for number, (source, colour) in enumerate(zip(sources, _COLOURS, strict=False)):
        heads = [head for head in norms if head.source == source]
        shift = 1.08 ** (number - (len(sources) - 1) / 2)
        lengths = [head.tokens * shift for head in heads]
        ax.plot(lengths, [max(head.norm, _LEAST_NORM) for head in heads], "o", color=colour, alpha=0.6, label=source)
    tokens = [head.tokens for head in norms]
    style.log_scale(ax.xaxis, min(tokens), max(tokens))
    ax.set_xticks(sorted(set(tokens)))
    style.log_scale(ax.yaxis, _LEAST_NORM, 1.0)
    style.label(ax, "tokens of the span", f"norm(A), smaller ones at {_LEAST_NORM:g}")
    style.legend_right(ax, title="weights")
    return figure
