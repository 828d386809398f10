"""The analysis `prefill`: time to first token by the workload's labels, of one request at a
time."""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from spanlab.analyses.base import Findings, Finished, footer
from spanlab.analyses.prefill_data import (
    FEW_STATES,
    MOST_OVERHEAD,
    PARTS,
    PHASES,
    ArmPrefills,
    Entry,
    Floats,
    PrefillData,
    capture_goal,
    curve,
    overhead,
    prefill_entries,
)
from spanlab.model_spec import DeviceRates
from spanlab.records import delays_of
from spanlab.report import style
from spanlab.report.sweep import SweepPoint
from spanlab.report.table import (
    Cell,
    Field,
    Table,
    byte_size,
    count,
    hidden,
    number_format,
    percent,
    ratio,
    ratio_interval,
    seconds,
    seconds_text,
    significant,
    tabulate,
    with_ends,
    word,
)
from spanlab.settings.analyses import ANALYSES, LABELS, PLAIN, REPEAT, Analysis
from spanlab.settings.study import Study
from spanlab.study.bounds import ArmFailure, family
from spanlab.study.jobs import repeated_arm, run_cells
from spanlab.study.logs import LoggedStep, read_steps
from spanlab.study.numbers import (
    ArmFiles,
    Columns,
    RunCell,
    at_rate,
    read_outputs,
    read_records,
    select,
)
from spanlab_sim.bounds import Bound

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.typing import LineStyleType


# ------------------------------------------------------------------------------
# Inputs of the analysis: records and step logs of one client's requests, served one after
# another.
# ------------------------------------------------------------------------------

Logits = Mapping[tuple[int, int], NDArray[np.float32]]


def read_logits(study: Study, arm: str, files: ArmFiles) -> Logits:
    """Return logits of the first token by seed and request; empty where they were not recorded."""
    if study.engine.record not in ("first_logits", "logits"):
        return {}
    by_seed = {
        seed: read_outputs(files.outputs(arm, cell)).logits
        for seed, cell in _cells(study, arm).items()
    }
    return {
        (seed, request): rows[0]
        for seed, logits in by_seed.items()
        for request, rows in logits.items()
    }


def read_prefills(
    study: Study,
    arm: str,
    files: ArmFiles,
    rates: DeviceRates | None,
    reference: Logits | None = None,
) -> ArmPrefills:
    """Return the counted requests of one arm at the study's own load.

    `rates`      rates of the engine's device; None for a simulation
    `reference`  logits of the baseline; None without logits
    """
    columns = read_records(files.records)
    at_load = at_rate(columns, study.arrivals.rate_rps) & np.isin(columns["seed"], study.runs.seeds)
    columns = select(columns, at_load & columns["counted"].astype(bool))
    phase_s: Mapping[str, Floats] = {}
    bound = None
    if rates is not None:
        logs = {seed: read_steps(files.log(arm, cell)) for seed, cell in _cells(study, arm).items()}
        phase_s, bound = _measured(study, columns, logs, Bound(study.model, rates))
    logit_gap = None
    if reference:
        logits = read_logits(study, arm, files)
        requests = zip(columns["seed"].tolist(), columns["request_id"].tolist(), strict=True)
        gaps = [np.abs(logits[request] - reference[request]).max() for request in requests]
        logit_gap = np.array(gaps, np.float64)
    return ArmPrefills(
        arm=arm,
        family=family(study.arms[arm]),
        seed=columns["seed"],
        group=columns["group_id"],
        request=columns["request_id"],
        ttft_s=delays_of(columns)["ttft_s"],
        prompt=columns["prompt_tokens"],
        reused=columns["reused_tokens"],
        computed=columns["computed_tokens"],
        repaired=columns["repaired_tokens"],
        captured_states=columns["captured_states"],
        captured_bytes=columns["captured_state_bytes"],
        parts=phase_s,
        bound_s=bound,
        logit_gap=logit_gap,
    )


def _cells(study: Study, arm: str) -> dict[int, RunCell]:
    """Return the cells at the study's own load, by seed."""
    return {
        cell.seed: cell
        for cell in run_cells(study, arm)
        if cell.rate_rps == study.arrivals.rate_rps
    }


def _measured(
    study: Study, columns: Columns, logs: Mapping[int, list[LoggedStep]], bound: Bound
) -> tuple[dict[str, Floats], Floats]:
    """Return seconds by part, and lower bounds, of every request."""
    rows = []
    admitted, first = (
        np.rint(columns[name] * 1e9).astype(np.int64) for name in ("admitted_s", "first_token_s")
    )
    waited = delays_of(columns)["ttft_s"]
    for seed, start, end, ttft in zip(
        columns["seed"].tolist(), admitted.tolist(), first.tolist(), waited, strict=True
    ):
        # from the request's admission to its first token, in nanoseconds
        begin = bisect_left(logs[seed], start, key=lambda step: step.started_ns)
        stop = bisect_right(logs[seed], end, key=lambda step: step.ended_ns)
        steps = logs[seed][begin:stop]
        parts = [sum(step.phases[phase] for step in steps) for phase in PHASES]
        rows.append((*parts, ttft - sum(parts), bound.seconds(step.features for step in steps)))
    table = np.array(rows, np.float64).reshape(-1, len(PARTS) + 1)
    return dict(zip(PARTS, table.T, strict=False)), table[:, -1]


# ------------------------------------------------------------------------------
# The table of the analysis: a row for each arm and combination of labels.
# ------------------------------------------------------------------------------

PrefillRow = dict[str, Any]

_NOTES = (
    "TTFT of one request at a time, medians; bound = the slower of FLOPs ÷ measured matrix rate and bytes ÷ measured "
    "copy rate, for what the requests computed and moved",
    "speedup = summed TTFT of {baseline} ÷ summed TTFT of the arm on the same requests; [a, b] = 95 % interval; ratio "
    "of bounds = the same of both bounds, which bounds no speedup: a baseline far from its own bound exceeds it",
    "TTFT in transformers = the same prompts without a cache and without our engine: one forward each, with torch's "
    "fused attention, between the runs of the arms; the speedup over it is of the same requests",
    "logits apart = largest |difference| of a first token's logits to those of {baseline} on the same prompt",
)

_NONE = (None, 0)  # nothing was measured, or there is nothing of this kind
_FIELDS = (
    Field("requests", "", hidden),
    Field("prompt_tokens", "prompt\ntokens", count),
    Field("token_hit_rate", "token\nhit rate", percent, keep=1),
    Field("reused_tokens", "", hidden),
    Field("computed_tokens", "computed\ntokens", count, keep=6),
    Field("repaired_tokens", "repaired\ntokens", count, keep=5, empty=_NONE),
    Field("captured_states", "states\ncaptured", count, keep=5, empty=_NONE),
    Field("captured_bytes", "their\nbytes", byte_size, keep=5, empty=_NONE),
    Field("ttft_p50_s", "TTFT\np50", seconds, "ttft_s.p50"),
    Field(
        "ttft_p25_s",
        "\nquartiles",
        lambda ttft_s: Cell(
            ttft_s["p25"], f"{seconds_text(ttft_s['p25'])} to {seconds_text(ttft_s['p75'])}"
        ),
        "ttft_s",
        4,
    ),
    Field("ttft_p75_s", "", hidden, "ttft_s.p75"),
    Field("ttft_least_s", "", hidden, "ttft_s.least"),
    Field("bound_s", "its\nbound", seconds, keep=3, empty=_NONE),
    Field("of_bound", "bound ÷\nTTFT", percent, keep=3, empty=_NONE),
    *with_ends(Field("speedup", "speedup\nof TTFT", ratio_interval, keep=1, empty=_NONE)),
    Field("plain_s", "TTFT in\ntransformers", seconds, keep=2, empty=_NONE),
    *with_ends(Field("over_plain", "speedup\nover it", ratio_interval, keep=2, empty=_NONE)),
    Field("logit_gap", "logits\napart", number_format(".1e"), keep=5, empty=_NONE),
    Field("ratio_of_bounds", "ratio of\nbounds", ratio, keep=2, empty=_NONE),
)


def prefill_table(entries: Sequence[PrefillRow], labels: Sequence[str], baseline: str) -> Table:
    """Return a table of the entries, in their order; `labels` are the names of their label
    columns."""
    names = [
        Field(
            label,
            label,
            lambda value: Cell(value, f"{value:,}" if isinstance(value, int) else value),
            left=True,
        )
        for label in labels
    ]
    fields = (Field("arm", "arm", word, left=True), *names, *_FIELDS)
    *always, of_plain, of_gap = _NOTES
    always += [of_plain] if any(entry["plain_s"] for entry in entries) else []
    always += [of_gap] if any(entry["logit_gap"] for entry in entries) else []
    notes = [note.format(baseline=baseline) for note in always]
    return tabulate("prefill", "Time to first token by kind of request", fields, entries, notes)


# ------------------------------------------------------------------------------
# The axis of prompt lengths that figures of prefills share, and the names of both axes.
# ------------------------------------------------------------------------------

_AXES_TICKS = 3


def length_axis(axis: Axis, lengths: list[float]) -> None:
    """Set a log axis of prompt lengths, short to long, with at most three ticks, all at lengths."""
    from matplotlib.ticker import FixedLocator

    style.log_scale(axis, lengths[0], lengths[-1])
    axis.set_major_locator(FixedLocator(lengths[:: -(-len(lengths) // _AXES_TICKS)]))


def name_axes(figure: Figure, x: str, y: str) -> None:
    """Name the axes of all panels once: y on the left, x between the lowest ticks and the
    footer."""
    bottom: float = min(ax.get_position().y0 for ax in figure.axes)
    below = bottom - 0.52 / figure.get_figheight()
    figure.supylabel(y, fontsize=style.LABEL_PT, color=style.INK, x=0.01)
    figure.supxlabel(x, fontsize=style.LABEL_PT, color=style.INK, y=below)


# ------------------------------------------------------------------------------
# Cost of captures in a cold prefill, by the number of captured states.
# ------------------------------------------------------------------------------

_CAPTURE_COLS = 2
_CAPTURE_TICKS = (0, 1, 3, 10, 30, 100, 300, 1000)


def draw_prefill_capture(data: PrefillData) -> Figure | None:
    """Draw TTFT with captures ÷ TTFT of the baseline − 1, with 95 % intervals, by length; None
    without captures."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    entries = [
        entry
        for entry in data.without_baseline()
        if entry["reused_tokens"] == 0 and entry["speedup"]
    ]
    if not any(entry["captured_states"] for entry in entries):
        return None
    lengths = sorted({entry["prompt_tokens"] for entry in entries})
    figure, panels = style.panels(
        data.footer,
        "Capture overhead: cold prefill with captures ÷ without − 1",
        len(lengths),
        min(_CAPTURE_COLS, len(lengths)),
        (1.5, 2.3),
        share=("all", "all"),
        margins=style.Margins(left=0.75, right=1.75, top=0.66),
        hspace=0.32,
        wspace=0.1,
    )
    strokes = style.strokes(data.families().items())
    for ax, length in zip(panels, lengths, strict=True):
        goal = 100 * MOST_OVERHEAD
        ax.plot(
            [0, FEW_STATES],
            [goal, goal],
            color="#cc3311",
            linewidth=1.2,
            label=f"goal, to {FEW_STATES} states",
        )
        for entry in entries:
            if entry["prompt_tokens"] == length:
                _capture_draw_arm(ax, entry, strokes[entry["arm"]])
        ax.set_title(f"{length:,.0f} tokens", fontsize=9, loc="left", color=style.INK, pad=3)
    # set the x axis of states: zero, then decades
    ax = panels[0]
    most = max(entry["captured_states"] for entry in entries)
    ax.set_xscale("symlog", linthresh=1, linscale=0.4)
    ax.xaxis.set_major_locator(FixedLocator([tick for tick in _CAPTURE_TICKS if tick <= 2 * most]))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(style.plain_number))
    ax.set_xlim(-0.3, 1.6 * max(most, 1))
    name_axes(figure, "states captured in the prefill", "capture overhead (% of the cold prefill)")
    handles, names = panels[0].get_legend_handles_labels()
    anchor = 1 - 1.68 / style.WIDTH_IN, 1 - 0.6 / figure.get_figheight()
    figure.legend(
        handles, names, loc="upper left", bbox_to_anchor=anchor, fontsize=8, frameon=False
    )
    return figure


def _capture_draw_arm(ax: Axes, entry: Entry, stroke: style.Stroke) -> None:
    low, mean, high = overhead(entry)
    middle = 100 * mean
    spread = (
        None
        if low is None or high is None
        else np.array([[middle - 100 * low], [100 * high - middle]])
    )
    ax.errorbar(
        entry["captured_states"],
        middle,
        spread,
        label=entry["arm"],
        fmt=stroke.marker,
        color=stroke.colour,
        markersize=5,
        elinewidth=0.9,
    )


# ------------------------------------------------------------------------------
# Parts of the time to first token at the longest prompt.
# ------------------------------------------------------------------------------

#: Colour and name of every part, in the order of execution in a step.
DRAWN_PARTS = {
    "plan_s": ("#332288", "planning"),
    "copy_s": ("#ee7733", "copying and rotating"),
    "fill_s": ("#56b4e9", "spans computed alone"),
    "repair_s": ("#999933", "repair"),
    "prefill_s": ("#117733", "ordered text and first token"),
    "other_s": ("#bbbbbb", "rest"),
}
_CUT = 4  # times the median: longer bars end there, with their length as a number


def draw_prefill_parts(data: PrefillData) -> Figure | None:
    """Draw stacked medians of requests that reuse at least half of their prompt, and a mark at
    their bound."""
    longest = data.lengths()[-1]
    entries = [
        entry for entry in data.entries if entry["prompt_tokens"] == longest and entry["parts_s"]
    ]
    # the long bars of entries that reuse less would hide the others
    entries = [entry for entry in entries if entry["token_hit_rate"] >= 0.5]
    if not entries:
        return None
    names = [f"{entry['arm']}: {data.name(entry)}" for entry in entries]
    figure, [[ax]] = style.framed_with(
        data.footer,
        f"Parts of the time to first token, prompts of {longest:,.0f} tokens",
        height=1.9 + 0.3 * len(entries),
        margins=style.Margins(left=0.35 + 0.075 * max(map(len, names)), right=2.25),
    )
    totals = [sum(entry["parts_s"].values()) for entry in entries]
    unit = style.time_unit(_CUT * statistics.median(totals))
    starts = [0.0] * len(entries)
    for key, (colour, name) in DRAWN_PARTS.items():
        widths = [entry["parts_s"][key] * unit.factor for entry in entries]
        if any(widths):
            ax.barh(range(len(entries)), widths, left=starts, height=0.62, color=colour, label=name)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    bounds = [entry["bound_s"] * unit.factor for entry in entries]
    bar: dict[str, Any] = {"color": style.INK, "markersize": 13, "markeredgewidth": 1.8}
    ax.plot(bounds, range(len(entries)), "|", label="bound", **bar)
    # bars above the limit are clipped, so that the parts of shorter bars stay visible
    shown = [total * unit.factor for total in totals]
    limit = _CUT * statistics.median(shown)
    if max(shown) > limit:
        ax.set_xlim(0, limit)
    for row, total in enumerate(shown):
        if total > limit:
            text = f"{significant(total)} {unit.name} →"
            at: dict[str, Any] = {"ha": "right", "va": "center"}
            ax.text(0.99 * limit, row, text, fontsize=style.TICK_PT, color="white", **at)
    ax.set_yticks(range(len(entries)), names)
    ax.invert_yaxis()
    ax.grid(False, axis="y")
    style.label(ax, f"TTFT, medians of its parts ({unit.name})")
    style.legend_right(ax)
    return figure


# ------------------------------------------------------------------------------
# Time to first token by reused tokens, with its bound; one shade per prompt length.
# ------------------------------------------------------------------------------

_LIGHTEST, _DARKEST = 0.82, 0.08


def draw_prefill_reuse(data: PrefillData) -> Figure | None:
    """Draw median (dot), quartiles and bound (cross) of every arm and kind of request."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex
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
    unit = style.time_unit(max(entry["ttft_s"]["p75"] for entry in data.entries))
    # a shade for each length, light to dark
    step = (_LIGHTEST - _DARKEST) / max(len(lengths) - 1, 1)
    shades = [
        to_hex(colormaps["viridis"](_LIGHTEST - step * index)) for index in range(len(lengths))
    ]
    for length, shade in zip(lengths, shades, strict=True):
        entries = [entry for entry in data.entries if entry["prompt_tokens"] == length]
        reused = [entry["reused_tokens"] for entry in entries]
        low, middle, high = (
            np.array([entry["ttft_s"][point] for entry in entries]) * unit.factor
            for point in ("p25", "p50", "p75")
        )
        spread = (middle - low, high - middle)
        ax.errorbar(
            reused, middle, spread, fmt="o", color=shade, markersize=4, elinewidth=0.8, alpha=0.8
        )
        ax.plot(
            reused,
            [entry["bound_s"] * unit.factor for entry in entries],
            "x",
            color=shade,
            markersize=4,
        )
    times = [entry["bound_s"] for entry in data.entries]
    times += [entry["ttft_s"][point] for entry in data.entries for point in ("p25", "p75")]
    bottom, top = style.positive_range(np.array(times) * unit.factor)
    style.log_scale(ax.yaxis, bottom, top)
    ax.set_ylim(bottom / 1.4, top * 1.4)
    style.count_ticks(ax.xaxis)
    style.label(ax, "reused tokens", f"TTFT ({unit.name})")
    keys = [Line2D([], [], color=shade, marker="o", linestyle="", markersize=5) for shade in shades]
    keys.append(Line2D([], [], color=style.INK, marker="x", linestyle="", markersize=4))
    labels = [*names, "bound, measured rates"]
    ax.legend(
        keys, labels, loc="upper left", bbox_to_anchor=(1.01, 1.02), fontsize=8.5, frameon=False
    )
    return figure


# ------------------------------------------------------------------------------
# Speedups and ratios of bounds by prompt length: one panel per arm.
# ------------------------------------------------------------------------------

_SPEEDUP_COLS = 4
_DOTS = (0, (1.5, 1.2))
_LINES: tuple[LineStyleType, ...] = ("-", (0, (4, 1.5)), (0, (2, 1)), (0, (6, 1.5, 1.5, 1.5)))


def draw_prefill_speedup(data: PrefillData) -> Figure | None:
    """Draw ratios of mean TTFT with 95 % bands, ratios of bounds dotted; None without speedups or
    two lengths."""
    from matplotlib.lines import Line2D

    entries = [
        entry for entry in data.without_baseline() if entry["speedup"] and entry["reused_tokens"]
    ]
    lengths = sorted({entry["prompt_tokens"] for entry in entries})
    if len(lengths) < 2:
        return None
    arms, names = (
        list(dict.fromkeys(values))
        for values in ([e["arm"] for e in entries], map(data.name, entries))
    )
    rows = -(-len(arms) // _SPEEDUP_COLS)
    figure, axes = style.framed_with(
        data.footer,
        "Speedup of TTFT over the baseline, and the ratio of both bounds (dotted)",
        rows,
        _SPEEDUP_COLS,
        height=1.75 + 1.75 * rows,
        share=("all", "all"),
        margins=style.Margins(top=1.05),
        hspace=0.35,
        wspace=0.12,
    )
    panels = [ax for row in axes for ax in row]
    strokes = style.strokes(data.families().items())
    for ax, arm in zip(panels, arms, strict=False):
        for index, name in enumerate(names):
            points = [
                entry for entry in entries if entry["arm"] == arm and data.name(entry) == name
            ]
            _draw_curve(ax, curve(points), strokes[arm], _LINES[index % len(_LINES)])
        ax.axhline(1, color="#999999", linewidth=0.6)
        ax.set_title(arm, fontsize=8, loc="left", color=style.INK, pad=3)
    for index, ax in enumerate(panels[len(arms) :], len(arms)):
        ax.set_axis_off()
        panels[index - _SPEEDUP_COLS].tick_params(labelbottom=index >= _SPEEDUP_COLS)
    factors = [
        value
        for entry in entries
        for value in (entry["speedup"]["mean"], entry["ratio_of_bounds"])
        if value
    ]
    length_axis(panels[0].xaxis, lengths)
    style.log_scale(panels[0].yaxis, min(factors), max(factors))
    panels[0].set_ylim(min(*factors, 1) / 1.3, max(factors) * 1.3)
    name_axes(figure, "prompt length (tokens)", "speedup of TTFT (×)")
    keys = [
        Line2D([], [], color=style.INK, linewidth=1.3, linestyle=_LINES[index % len(_LINES)])
        for index in range(len(names))
    ]
    anchor = 0.07, 1 - 0.3 / figure.get_figheight()
    figure.legend(
        keys, names, loc="upper left", bbox_to_anchor=anchor, ncols=3, fontsize=8, frameon=False
    )
    return figure


def _draw_curve(ax: Axes, entries: list[Entry], stroke: style.Stroke, line: LineStyleType) -> None:
    lengths = [entry["prompt_tokens"] for entry in entries]
    if all(entry["ratio_of_bounds"] for entry in entries):
        bounds = [entry["ratio_of_bounds"] for entry in entries]
        ax.plot(lengths, bounds, color=style.INK, linewidth=0.9, linestyle=_DOTS)
    if all(entry["speedup"]["low"] for entry in entries):
        low, high = ([entry["speedup"][end] for entry in entries] for end in ("low", "high"))
        ax.fill_between(lengths, low, high, color=stroke.colour, alpha=0.2, linewidth=0)
    means = [entry["speedup"]["mean"] for entry in entries]
    ax.plot(
        lengths,
        means,
        color=stroke.colour,
        marker=stroke.marker,
        markersize=4,
        linewidth=1.3,
        linestyle=line,
    )


# ------------------------------------------------------------------------------
# Time to first token by prompt length: one panel per kind of request, one curve per arm.
# ------------------------------------------------------------------------------

_TTFT_COLS = 3


def draw_prefill_ttft(data: PrefillData) -> Figure | None:
    """Draw medians, with quartiles as bands; None where all prompts have one length."""
    from matplotlib.lines import Line2D

    lengths = data.lengths()
    if len(lengths) < 2:
        return None
    names = list(dict.fromkeys(map(data.name, data.entries)))
    strokes = style.strokes(data.families().items())
    margins = style.margins_for(strokes)
    figure, panels = style.panels(
        data.footer,
        "Time to first token of one request at a time (median, quartiles)",
        len(names),
        min(_TTFT_COLS, len(names)),
        (1.5, 2.2),
        share=("all", "all"),
        margins=style.Margins(left=0.75, right=margins.right, top=0.66),
        hspace=0.32,
        wspace=0.1,
    )
    times = np.array([entry["ttft_s"][point] for entry in data.entries for point in ("p25", "p75")])
    unit = style.time_unit(times.max())
    for ax, name in zip(panels, names, strict=True):
        entries = [entry for entry in data.entries if data.name(entry) == name]
        for arm, stroke in strokes.items():
            line = curve([entry for entry in entries if entry["arm"] == arm])
            at = [entry["prompt_tokens"] for entry in line]
            low, middle, high = (
                [entry["ttft_s"][point] * unit.factor for entry in line]
                for point in ("p25", "p50", "p75")
            )
            ax.fill_between(at, low, high, color=stroke.colour, alpha=0.15, linewidth=0)
            ax.plot(at, middle, markersize=4, linewidth=1.2, **stroke.options)
        ax.set_title(name, fontsize=8, loc="left", color=style.INK, pad=3)
    length_axis(panels[0].xaxis, lengths)
    style.log_scale(panels[0].yaxis, *style.positive_range(times * unit.factor))
    name_axes(figure, "prompt length (tokens)", f"TTFT ({unit.name})")
    keys = [Line2D([], [], markersize=4, **stroke.options) for stroke in strokes.values()]
    right = style.margins_for(strokes).right
    anchor = 1 - (right - 0.1) / style.WIDTH_IN, 1 - 0.6 / figure.get_figheight()
    figure.legend(
        keys, list(strokes), loc="upper left", bbox_to_anchor=anchor, fontsize=8, frameon=False
    )
    return figure


FIGURES = {
    "prefill_ttft": draw_prefill_ttft,
    "prefill_speedup": draw_prefill_speedup,
    "prefill_parts": draw_prefill_parts,
    "prefill_reuse": draw_prefill_reuse,
    "prefill_capture": draw_prefill_capture,
}


def compare_prefills(finished: Finished) -> Findings:
    """Return every arm compared with the baseline; no speedups where the machine was noisy."""
    study, labels = finished.study, finished.workload.labels
    rates = None if finished.facts is None else finished.facts.rates
    base = finished.files.get(study.runs.baseline)
    logits = read_logits(study, study.runs.baseline, base) if base and finished.facts else None
    arms = [
        read_prefills(study, arm, files, rates, logits) for arm, files in finished.files.items()
    ]
    named = labels or {"request": ("all",) * len(finished.workload.requests)}
    plain = finished.plain
    beside = (
        read_prefills(study, repeated_arm(study), plain, None)
        if isinstance(plain, ArmFiles)
        else None
    )
    entries = prefill_entries(arms, named, study.runs.baseline, beside)
    if finished.noise_sentence("speedups"):
        entries = [entry | {"speedup": None, "over_plain": None} for entry in entries]
    findings = _findings(
        entries, list(named), study.runs.baseline, f"{finished.name} · {footer(finished)}"
    )
    if isinstance(plain, ArmFailure):
        return replace(findings, caveats=(f"no times of plain transformers: {plain.sentence}",))
    return findings


def prefills_of_points(points: Sequence[SweepPoint]) -> Findings:
    """Return one table and figures over all points of a sweep that ran."""
    ran = {point.run: point.summary or {} for point in points}
    summaries = [summary["prefill"] for summary in ran.values()]
    first = next(iter(ran.values()))
    provenance = (
        f"{first['study']} · {first['model']} · {len(ran)} points · commit {first['commit']}"
    )
    noisy = sum(summary.get("machine_noise", {}).get("noisy", False) for summary in ran.values())
    footer = (
        f"{provenance} · no speedups at {noisy} of them, for the machine was noisy"
        if noisy
        else provenance
    )
    return _findings(
        [entry for summary in summaries for entry in summary["entries"]],
        summaries[0]["labels"],
        first["baseline"],
        footer,
    )


def _findings(
    entries: list[dict[str, Any]], labels: Sequence[str], baseline: str, footer: str
) -> Findings:
    """Return table and figures of entries, of one study or of all points of a sweep; `footer` is
    for figures."""
    data = PrefillData(entries, tuple(labels), baseline, footer)
    return Findings(
        summary={
            "prefill": {
                "labels": list(labels),
                "entries": entries,
                "capture_goal": capture_goal(entries),
            }
        },
        tables=(prefill_table(entries, labels, baseline),),
        figures={name: partial(drawing, data) for name, drawing in FIGURES.items()},
    )


def _check(study: Study) -> None:
    """Raise ValueError where prefills share the device."""
    if (clients := study.arrivals.clients) != 1:
        raise ValueError(
            f"analyses=prefill with arrivals.clients={clients}: expected arrivals=closed_loop with 1"
        )


ANALYSES.add(
    Analysis(
        "prefill",
        compare_prefills,
        needs=(REPEAT, LABELS, PLAIN),
        check=_check,
        of_points=prefills_of_points,
    )
)
