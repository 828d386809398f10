"""Figures of a study, drawn from its records."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from spanlab.records import LOSS_CAUSES
from spanlab.registry import Registry
from spanlab.report import style
from spanlab.report.data import (
    ArmData,
    StudyData,
    category_tokens,
    holds_states,
    is_full_recompute,
    stable,
    ttft_s,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# ------------------------------------------------------------------------------
# Selection of representative arms, for figures that cannot show all arms of a study.
# ------------------------------------------------------------------------------

_REFERENCES = ("none", "kv_only")


def best_of_families(arms: Iterable[ArmData], limit: int) -> list[ArmData]:
    """Return the arm with the highest token hit rate of each family, references first, at most
    `limit` arms."""
    best: dict[str, ArmData] = {}
    for arm in arms:
        rival = best.get(arm.family)
        if rival is None or _rank(arm) < _rank(rival):
            best[arm.family] = arm
    references = [best.pop(family) for family in _REFERENCES if family in best]
    return (references + sorted(best.values(), key=_rank))[:limit]


def reference(arms: Iterable[ArmData]) -> ArmData | None:
    """Return the full recompute, or None if the study has none."""
    return next((arm for arm in arms if is_full_recompute(arm)), None)


def _rank(arm: ArmData) -> tuple[float, str]:
    return -float(arm.summary["token_hit_rate"]), arm.name


# ------------------------------------------------------------------------------
# Small multiples: one panel per arm, all on the same axes.
# ------------------------------------------------------------------------------

_PANEL_IN = 1.75
_TITLE_CHARS = 92  # across all panels of a row
_MARGINS = style.Margins(left=0.75, top=0.85, bottom=0.95)


def small_multiples(
    study: StudyData, title: str, names: Sequence[str], cols: int
) -> tuple[Figure, list[Axes]]:
    """Return a figure and one titled panel per entry of `names`, filled by row; all panels share
    both axes."""
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
        width = _TITLE_CHARS // cols
        shortened = name if len(name) <= width else f"{name[: width - 1]}…"
        ax.set_title(shortened, fontsize=style.TICK_PT, loc="left", pad=3, color=style.INK)
        # the panel above a removed one is the last of its column
        ax.tick_params(labelbottom=k + cols >= len(names), labelleft=k % cols == 0)
    return figure, panels[: len(names)]


def label_outer(figure: Figure, x: str, y: str) -> None:
    """Name the shared axes once, in the middle of the figure's edges."""
    height = figure.get_figheight()
    middle = (1 + (_MARGINS.left - _MARGINS.right) / style.WIDTH_IN) / 2
    figure.supxlabel(
        x, x=middle, y=0.42 / height, va="bottom", fontsize=style.LABEL_PT, color=style.INK
    )
    centre = (1 + (_MARGINS.bottom - _MARGINS.top) / height) / 2
    figure.supylabel(
        y, x=0.12 / style.WIDTH_IN, y=centre, ha="left", fontsize=style.LABEL_PT, color=style.INK
    )


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


# ------------------------------------------------------------------------------
# The figures of a study by file name; `spanlab.report.curves` registers them in order.
# ------------------------------------------------------------------------------

#: Draws one figure of a study's data, or returns None where the study has nothing to show.
FIGURES: Registry[Figure | None] = Registry("figure", given=("study",))


# ------------------------------------------------------------------------------
# Cache content over time.
# ------------------------------------------------------------------------------

_CACHE_CONTENT_ARMS = 8
_COLS = 4
_KV, _STATES = "#0072b2", "#e69f00"


def draw_cache_content(study: StudyData) -> Figure | None:
    """Draw stacked KV and state bytes over the run of the first seed, one panel per arm with shared
    axes."""
    from matplotlib.patches import Patch

    byte_columns = ("timeline_kv_bytes", "timeline_state_bytes")
    candidates = (
        arm
        for arm in study.arms
        if not is_full_recompute(arm)
        and arm.runs
        and any(any(arm.runs[0].get(name, ())) for name in byte_columns)
    )
    arms = best_of_families(candidates, _CACHE_CONTENT_ARMS)
    if not arms:
        return None
    figure, panels = small_multiples(
        study, f"Cache content over time · store: {study.store}", [arm.name for arm in arms], _COLS
    )
    runs = [arm.runs[0] for arm in arms]
    longest = max(run["timeline_s"][-1] for run in runs)
    unit = style.time_unit(longest)
    totals = [np.sum([run[name] for name in byte_columns], axis=0) for run in runs]
    byte_unit = style.byte_unit(max(float(total.max()) for total in totals))
    for ax, run in zip(panels, runs, strict=True):
        time = np.asarray(run["timeline_s"]) * unit.factor
        kv = np.asarray(run["timeline_kv_bytes"]) * byte_unit.factor
        total = kv + np.asarray(run["timeline_state_bytes"]) * byte_unit.factor
        ax.fill_between(time, 0, kv, color=_KV, linewidth=0, step="post")
        ax.fill_between(time, kv, total, color=_STATES, linewidth=0, step="post")
    panels[0].set_xlim(0, longest * unit.factor or 1)
    panels[0].set_ylim(bottom=0)
    label_outer(figure, f"time since start ({unit.name})", f"bytes held ({byte_unit.name})")
    states = [Patch(color=_STATES, label="states")] if any(map(holds_states, arms)) else []
    legend_top(figure, [*states, Patch(color=_KV, label="KV")])
    return figure


# ------------------------------------------------------------------------------
# Positions of the states of one group of requests, by visit.
# ------------------------------------------------------------------------------

_CHECKPOINT_POSITIONS_ARMS = 8
_PROMPT, _MATCH, _STATE, _RESUME = "#e2e2e2", "#e0867c", "#1a1a1a", "#0072b2"
_ROW_FILL = 0.72
_RASTER_FROM = 3000


def draw_checkpoint_positions(study: StudyData) -> Figure | None:
    """Draw stored states (dots) over match (red) and prompt (light) of each visit of one group,
    first seed."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    candidates = (
        arm
        for arm in study.arms
        if arm.runs and any(visit["positions"] for visit in arm.runs[0].get("group_rounds", ()))
    )
    arms = best_of_families(candidates, _CHECKPOINT_POSITIONS_ARMS)
    if not arms:
        return None
    figure, panels = small_multiples(
        study, "Checkpoint positions of one group of requests", [arm.name for arm in arms], _COLS
    )
    visits = [arm.runs[0]["group_rounds"] for arm in arms]
    last = max(visit["round"] for rounds in visits for visit in rounds)
    panels[0].set_xlim(0, 1.02 * max(visit["prompt"] for rounds in visits for visit in rounds))
    panels[0].set_ylim(
        last + 0.7, min(visit["round"] for rounds in visits for visit in rounds) - 0.7
    )
    for ax, rounds in zip(panels, visits, strict=True):
        _checkpoint_positions_draw_arm(ax, rounds)
    panels[0].yaxis.set_major_locator(MaxNLocator(6, integer=True))
    style.count_ticks(panels[0].xaxis)
    label_outer(figure, "position in prompt (tokens)", "visit (number)")
    dot: dict[str, Any] = {"marker": "o", "linestyle": ""}
    handles = [
        Line2D([], [], color=_PROMPT, linewidth=6, label="prompt"),
        Line2D([], [], color=_MATCH, linewidth=6, label="match"),
        Line2D([], [], color=_STATE, markersize=3.5, label="state held", **dot),
        Line2D([], [], color=_RESUME, markersize=5.5, label="state resumed from", **dot),
    ]
    legend_top(figure, handles)
    return figure


def _checkpoint_positions_draw_arm(ax: Axes, rounds: list[dict[str, Any]]) -> None:
    number = np.array([visit["round"] for visit in rounds], dtype=float)
    bottom, top = ax.get_ylim()
    bar_pt = float(ax.bbox.height) / style.DPI * 72 / abs(bottom - top) * _ROW_FILL
    for key, colour in (("prompt", _PROMPT), ("match", _MATCH)):
        ax.hlines(
            number, 0, [visit[key] for visit in rounds], color=colour, linewidth=bar_pt, zorder=1
        )
    positions = np.concatenate([np.asarray(visit["positions"], dtype=float) for visit in rounds])
    rows = np.repeat(number, [len(visit["positions"]) for visit in rounds])
    size = float(np.clip(0.6 * bar_pt, 1.0, 3.2))
    ax.plot(
        positions,
        rows,
        "o",
        color=_STATE,
        markersize=size,
        markeredgewidth=0,
        rasterized=len(rows) > _RASTER_FROM,
    )
    resumed = [(visit["resume"], visit["round"]) for visit in rounds if visit["resume"]]
    if resumed:
        ax.plot(
            *zip(*resumed, strict=True),
            "o",
            color=_RESUME,
            markersize=size + 2,
            mec="white",
            mew=0.7,
        )


# ------------------------------------------------------------------------------
# Common prefix of each prompt with any earlier prompt.
# ------------------------------------------------------------------------------

_COMMON_PREFIX_BINS = 40
_COLOUR = "#0072b2"


def draw_common_prefix(study: StudyData) -> Figure | None:
    """Draw the distribution of the common prefix, equal for all arms: in tokens (left), as share of
    prompt (right).

    Read from an arm that looks up prefixes: other arms may serve passages in another order.
    """
    arms = [arm for arm in study.arms if arm.summary["finds"] == "prefixes"]
    arm = reference(arms) or next(iter(arms), None)
    if arm is None or not len(arm.columns["seen_tokens"]):
        return None
    prefix = np.asarray(arm.columns["seen_tokens"], dtype=np.float64)
    share = 100.0 * prefix / np.maximum(arm.columns["prompt_tokens"], 1)
    figure, axes = style.framed_with(
        study.provenance,
        "Common prefix with any earlier prompt",
        rows=2,
        cols=2,
        share=("col", "row"),
        hspace=0.12,
        wspace=0.08,
    )
    for column, values, high, unit in (
        (0, prefix, max(float(prefix.max()), 1.0), "tokens"),
        (1, share, 100.0, "%"),
    ):
        counts, edges = np.histogram(values, bins=_COMMON_PREFIX_BINS, range=(0.0, high))
        axes[0][column].stairs(counts, edges, fill=True, color=_COLOUR, alpha=0.75)
        ax = axes[1][column]
        median = float(np.median(values))
        ax.plot(*style.empirical_cdf(values), color=_COLOUR, drawstyle="steps-post", linewidth=1.5)
        ax.axvline(median, color=style.INK, linewidth=0.8, linestyle=(0, (4, 2)))
        on_left = median > high / 2
        ax.annotate(
            f"median {median:,.0f} {unit}",
            (median, 85 if on_left else 12),  # a CDF leaves this corner free
            xytext=(-5 if on_left else 5, 0),
            textcoords="offset points",
            ha="right" if on_left else "left",
            fontsize=style.TICK_PT,
            color=style.INK,
        )
        ax.set_xlim(0, 1.01 * high)
        ax.set_ylim(0, 102)
    style.count_ticks(axes[1][0].xaxis)
    style.label(axes[0][0], y=f"requests (of {len(prefix)})")
    style.label(axes[1][0], "common prefix (tokens)", "requests at or below (%)")
    style.label(axes[1][1], "common prefix (% of prompt tokens)")
    return figure


# ------------------------------------------------------------------------------
# Prompt length against time to first token.
# ------------------------------------------------------------------------------

_LENGTH_TTFT_ARMS = 6
_LENGTH_TTFT_BINS = 9
_KEY_TITLE = "median, band: quartiles"


def draw_length_ttft(study: StudyData) -> Figure | None:
    """Draw TTFT by prompt length: median and quartiles per bin of equal counts, over faint single
    requests.

    Arms whose queue grows are omitted.
    """
    arms = [
        arm
        for arm in best_of_families(stable(study.arms), _LENGTH_TTFT_ARMS)
        if len(arm.columns["prompt_tokens"])
    ]
    if not arms:
        return None
    figure, [[ax]] = style.framed_with(
        study.provenance,
        "Time to first token by prompt length",
        margins=style.margins_for([*(arm.name for arm in arms), _KEY_TITLE[:-6]]),
    )
    unit = style.time_unit(max(float(ttft_s(arm).max()) for arm in arms))
    strokes = style.strokes((arm.name, arm.family) for arm in arms)
    seconds = np.concatenate([ttft_s(arm) for arm in arms]) * unit.factor
    low, high = style.positive_range(seconds)
    style.log_scale(ax.yaxis, low, high)
    ax.set_ylim(low / 1.2, high * 1.2)
    for arm in arms:
        stroke = strokes[arm.name]
        length, value = arm.columns["prompt_tokens"], ttft_s(arm) * unit.factor
        middle, (lower, median, upper) = binned_quartiles(length, value)
        ax.plot(length, value, ",", color=stroke.colour, alpha=0.3, rasterized=True, zorder=1)
        ax.fill_between(middle, lower, upper, color=stroke.colour, alpha=0.2, linewidth=0, zorder=2)
        ax.plot(middle, median, markersize=5, label=arm.name, zorder=3, **stroke.options)
    style.label(ax, "prompt length (tokens)", f"TTFT ({unit.name})")
    style.legend_right(ax, title=_KEY_TITLE, title_fontsize=8, alignment="left")
    return figure


def binned_quartiles(
    length: NDArray[np.int64], value: NDArray[np.float64], bins: int = _LENGTH_TTFT_BINS
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the median length and the three quartiles (shape [3, bins]) of `value` in bins of
    equal counts."""
    order = np.argsort(length, kind="stable")
    groups = [group for group in np.array_split(order, min(bins, len(order))) if len(group)]
    middle = np.array([np.median(length[group]) for group in groups])
    return middle, np.array([np.percentile(value[group], (25, 50, 75)) for group in groups]).T


# ------------------------------------------------------------------------------
# Prompt tokens by category: reused, or computed for one of the loss causes.
# ------------------------------------------------------------------------------

_CATEGORIES = ("reused", *LOSS_CAUSES)
_ROW_IN = 0.19


def draw_loss_by_cause(study: StudyData) -> Figure | None:
    """Draw one bar per arm in percent of its prompt tokens, most reused on top; categories sum to
    100 %."""
    arms = sorted(study.arms, key=lambda arm: (share_percent(arm, "reused"), arm.name))
    if not arms:
        return None
    margins = style.Margins(left=0.4 + 0.07 * max(len(_title(arm)) for arm in arms), right=1.8)
    height = margins.top + margins.bottom + max(_ROW_IN * len(arms), 1.6)
    figure, [[ax]] = style.framed_with(
        study.provenance,
        f"Prompt tokens by cause · store: {study.store}",
        height=height,
        margins=margins,
    )
    starts = [0.0] * len(arms)
    for category in _CATEGORIES:
        widths = [share_percent(arm, category) for arm in arms]
        label = category.replace("_", " ").replace("kv ", "KV ") if any(widths) else None
        colour = style.CAUSE_COLOURS.get(category, "#999999")
        ax.barh(
            range(len(arms)),
            widths,
            0.78,
            starts,
            color=colour,
            label=label,
            gid=category,
            linewidth=0,
        )
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    ax.set_yticks(range(len(arms)), [_title(arm) for arm in arms])
    ax.set_xlim(0, 100)
    ax.set_ylim(-0.6, len(arms) - 0.4)
    ax.grid(False, axis="y")
    style.label(ax, "share of prompt tokens (%)", "arm (reused, %)")
    style.legend_right(ax)
    return figure


def share_percent(arm: ArmData, category: str) -> float:
    """Return the tokens of one category, `reused` or a loss cause, in percent of the prompt
    tokens."""
    tokens = arm.summary["tokens"]
    return 100.0 * category_tokens(tokens, category) / float(tokens["prompt"] or 1)


def _title(arm: ArmData) -> str:
    # figure spaces are as wide as digits, so that the numbers form a column
    percent = f"{share_percent(arm, 'reused'):5.1f}".replace(" ", "\u2007")
    return f"{arm.name}  {percent}"


# ------------------------------------------------------------------------------
# Distribution of the time to first token.
# ------------------------------------------------------------------------------

_TTFT_DISTRIBUTION_ARMS = 6


def draw_ttft_distribution(study: StudyData) -> Figure | None:
    """Draw the empirical CDF of TTFT for references and the best arm of each main family, without
    saturated arms."""
    arms = [
        arm
        for arm in best_of_families(stable(study.arms), _TTFT_DISTRIBUTION_ARMS)
        if len(arm.columns["prompt_tokens"])
    ]
    if not arms:
        return None
    figure, [[ax]] = style.framed_with(
        study.provenance,
        "Distribution of time to first token",
        margins=style.margins_for(arm.name for arm in arms),
    )
    strokes = style.strokes((arm.name, arm.family) for arm in arms)
    unit = style.time_unit(max(float(ttft_s(arm).max()) for arm in arms))
    values = {arm.name: ttft_s(arm) * unit.factor for arm in arms}
    low, high = style.positive_range(np.concatenate(list(values.values())))
    style.log_scale(ax.xaxis, low, high)
    ax.set_xlim(low / 1.1, high * 1.1)
    for name, stroke in strokes.items():
        x, percent = style.empirical_cdf(values[name])
        x = np.maximum(x, low / 1.1)
        ax.plot(
            x,
            percent,
            color=stroke.colour,
            linestyle=stroke.line,
            drawstyle="steps-post",
            label=name,
        )
    ax.set_ylim(0, 101)
    style.label(ax, f"TTFT ({unit.name})", "requests at or below (%)")
    style.legend_right(ax)
    return figure
