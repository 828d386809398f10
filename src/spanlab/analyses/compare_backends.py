"""The analysis `compare_backends`: simulate the arrivals of the engine's runs, and compute the
prediction error."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from spanlab.analyses.base import Findings, Finished, footer
from spanlab.analyses.fidelity import (
    GOALS,
    METRICS,
    NOISE_LIMIT,
    TAU_GOAL,
    ArmComparison,
    Delays,
    ScheduleMatch,
    by_load,
    concatenate_delays,
    errors,
    load_words,
    mean_ttft,
    schedule_match,
    summarise,
)
from spanlab.build import build_policy, build_span_reads
from spanlab.core.policies.tree import TreePolicy
from spanlab.engine.settings import remap_tokens
from spanlab.records import Record, delays_of
from spanlab.report import style
from spanlab.report.table import (
    MISSING_TEXT,
    Cell,
    Field,
    Table,
    number_format,
    percent,
    percent_text,
    placeholder,
    seconds,
    seconds_text,
    short,
    signed_percent,
    tabulate,
    whole,
    word,
)
from spanlab.settings.analyses import ANALYSES, MEASURED, Analysis, DesignSettings, accept
from spanlab.study.bounds import family
from spanlab.study.jobs import Job, Jobs, run_cells
from spanlab.study.logs import read_steps
from spanlab.study.numbers import Columns, read_records, select
from spanlab_sim.run import simulate
from spanlab_sim.timings import CalibratedTiming

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# ------------------------------------------------------------------------------
# Tables that compare engine and simulator: every arm at every load, ranks of arms, goals.
# ------------------------------------------------------------------------------

Row = dict[str, Any]

CELL_NOTES = (
    "error = (simulated − measured) ÷ measured, of the means, signed; per request its size, of every request",
    "outside the hull = simulated steps outside the range that the profile was fitted to",
    "schedule match = both backends give the scheduler equal inputs: with the engine's step times, the simulator "
    "composes the same steps, which says nothing of how well it predicts those times",
)
GOAL_NOTES = (
    "within goal = plain count of cells; shown = of means, two one-sided tests over repeats at 5 % show that the error "
    "is within the goal (TOST), each cell tested alone; no verdict = one repeat, or A/A above "
    f"{NOISE_LIMIT:g} times the goal",
)
AA_NOTE = "A/A = the same between the engine's own repeats"
RANK_NOTES = (
    f"arms by mean TTFT, every pair counted, also pairs that the repeats do not separate; goal: tau ≥ {TAU_GOAL:g}",
)


def _load(row: Row) -> Cell:
    share, rate = row["load"], row["rate_rps"]
    return Cell(rate if share is None else share, load_words(share, rate))


def _bias(values: Row) -> Cell:
    bias = signed_percent(values["bias"])
    return Cell(bias.value, f"{bias.text} ({seconds_text(values['bias_s'])})")


def _verdict(goal: Row) -> Cell:
    if goal["met"] is None:
        return placeholder("no verdict" if goal["cells"] else MISSING_TEXT)
    return Cell(goal["met"], "met" if goal["met"] else "not met")


def _count(row: Row, counted: str, total: str) -> Cell:
    return Cell(row[counted], f"{row[counted]:,} of {row[total]:,}")


CELLS = (
    Field("arm", "arm", word, left=True),
    Field("load", "load", _load, whole, left=True),
    Field("ttft_measured_mean_s", "TTFT mean\nmeasured", seconds, "errors.ttft_s.measured_mean_s"),
    Field("ttft_bias", "its error\n% (absolute)", _bias, "errors.ttft_s"),
    Field("ttft_aa", "A/A", percent, "errors.ttft_s.spread.mean", 2),
    Field("ttft_request_p50", "per request\np50", percent, "errors.ttft_s.request_p50", 4),
    Field("ttft_request_p95", "per request\np95", percent, "errors.ttft_s.request_p95", 4),
    Field("ttft_request_aa_p50", "A/A\np50", percent, "errors.ttft_s.spread.request_p50", 5),
    Field("ttft_request_aa_p95", "A/A\np95", percent, "errors.ttft_s.spread.request_p95", 5),
    Field("tpot_bias", "TPOT\nerror", signed_percent, "errors.tpot_s.bias", 6),
    Field("e2e_measured_mean_s", "E2E mean\nmeasured", seconds, "errors.e2e_s.measured_mean_s", 3),
    Field("e2e_bias", "its error\n% (absolute)", _bias, "errors.e2e_s", 3),
    Field("e2e_aa", "A/A", percent, "errors.e2e_s.spread.mean", 5),
    Field(
        "steps_alike",
        "schedule\nmatch",
        partial(_count, counted="equal", total="steps"),
        "parity",
        1,
    ),
    Field(
        "steps_outside_hull",
        "outside\nthe hull",
        partial(_count, counted="steps_outside_hull", total="simulated_steps"),
        whole,
        7,
    ),
)
RANKS = (
    Field("load", "load", _load, whole, left=True),
    Field("rate_rps", "requests/s", short),
    Field("tau", "Kendall tau-b", number_format(".3f")),
    Field("aa_tau", "A/A tau", number_format(".3f")),
    Field("best_measured", "best, measured", word, "best", left=True),
    Field("best_simulated", "best, simulated", word, "choice", left=True),
    Field(
        "regret",
        "regret",
        lambda row: Cell(
            row["regret"], f"{percent_text(row['regret'])} ({seconds_text(row['regret_s'])})"
        ),
        whole,
    ),
)
GOAL_COLUMNS = (
    Field("goal", "goal", word, left=True),
    Field("limit", "at most", percent),
    Field("verdict", "verdict", _verdict, whole),
    Field("cells", "cells", number_format("d")),
    Field("cells_within_goal", "within goal", number_format("d")),
    Field("cells_met", "shown", number_format("d")),
    Field("cells_noisy", "no verdict", number_format("d")),
    Field("worst", "worst", word, left=True),
    Field(
        "worst_error",
        "its error",
        lambda goal: (signed_percent if goal["signed"] else percent)(goal["worst_error"]),
        whole,
    ),
    Field("worst_spread", "its A/A", percent),
)


def tables(summary: dict[str, Any], footer: str, notes: tuple[str, ...]) -> tuple[Table, ...]:
    """Return the table of cells and, for repeated runs, the ranks by load and the goals; `footer`
    is provenance."""
    repeated = any(row["repeats"] > 1 for row in summary["cells"])
    notes = (*CELL_NOTES, *([AA_NOTE] if repeated else []), *notes)
    fields = [field for field in CELLS if repeated or "A/A" not in field.heading]
    table = tabulate(
        "compare_backends", f"engine and simulator\n{footer}", fields, summary["cells"], notes
    )
    if not repeated:
        return (table,)
    ranked = [row for row in summary["rates"] if "tau" in row]
    return (
        table,
        tabulate("ranks", "arms by mean TTFT, measured and simulated", RANKS, ranked, RANK_NOTES),
        tabulate("goals", "goals of the simulator", GOAL_COLUMNS, summary["goals"], GOAL_NOTES),
    )


# ------------------------------------------------------------------------------
# Arms ranked by mean time to first token, measured and simulated.
# ------------------------------------------------------------------------------


def draw_ranking(comparisons: list[ArmComparison], footer: str) -> Figure | None:
    """Draw a panel per load, arms in the order of the engine's means; hollow: simulated, bars:
    range of repeats."""
    if not comparisons:
        return None
    loads = by_load(comparisons)
    drawn = style.strokes({comparison.arm: comparison.family for comparison in comparisons}.items())
    unit = style.time_unit(
        max(max(*mean_ttft(comparison)[0], mean_ttft(comparison)[1]) for comparison in comparisons)
    )
    figure, rows = style.framed_with(
        footer,
        "Arms by mean TTFT: measured (filled, bars over repeats) and simulated (hollow)",
        len(loads),
        1,
        height=1.9 + len(loads) * (0.45 + 0.24 * len(drawn)),
        share=("all", "none"),
        margins=style.Margins(left=0.35 + 0.075 * max(map(len, drawn)), top=0.72, bottom=1.25),
        hspace=0.32,
    )
    for [ax], load in zip(rows, loads, strict=True):
        _ranking_draw_load(ax, load, drawn, unit.factor)
        ax.set_title(
            load_words(load[0].share, load[0].rate_rps), fontsize=9, loc="left", color=style.INK
        )
        ax.tick_params(labelbottom=ax is rows[-1][0])
    times = [
        value * unit.factor
        for comparison in comparisons
        for value in (*mean_ttft(comparison)[0], mean_ttft(comparison)[1])
    ]
    style.log_scale(rows[-1][0].xaxis, min(times), max(times))
    rows[-1][0].set_xlim(min(times) / 1.2, max(times) * 1.2)
    style.label(rows[-1][0], f"mean TTFT ({unit.name})")
    return figure


def _ranking_draw_load(
    ax: Axes, load: list[ArmComparison], drawn: dict[str, style.Stroke], factor: float
) -> None:
    means = {comparison.arm: mean_ttft(comparison) for comparison in load}
    order = sorted(means, key=lambda arm: sum(means[arm][0]) / len(means[arm][0]))
    for row, arm in enumerate(order):
        repeats, predicted = means[arm]
        stroke = drawn[arm]
        middle = sum(repeats) / len(repeats)
        ax.plot(
            [min(repeats) * factor, max(repeats) * factor],
            [row, row],
            color=stroke.colour,
            linewidth=2.5,
        )
        ax.plot(middle * factor, row, stroke.marker, color=stroke.colour, markersize=6)
        ax.plot(
            predicted * factor,
            row,
            "o",
            markerfacecolor="none",
            markeredgecolor=style.INK,
            markersize=9,
            markeredgewidth=1.0,
        )
    ax.set_yticks(range(len(order)), order)
    ax.set_ylim(len(order) - 0.5, -0.5)
    ax.grid(False, axis="y")


# ------------------------------------------------------------------------------
# The simulator's error in the means by load, with its interval over the engine's repeats.
# ------------------------------------------------------------------------------

_SHOWN = {"ttft_s": "mean TTFT", "e2e_s": "mean E2E latency"}
_WIDTH = 0.8  # share of the width of a load that its arms fill


def draw_error_by_load(comparisons: list[ArmComparison], footer: str) -> Figure | None:
    """Draw the signed error of each arm's means; bars: 90 % interval over repeats; band: the goal.

    An error is shown to be within the goal where its whole bar lies in the band.
    """
    if not comparisons or all(len(comparison.measured) < 2 for comparison in comparisons):
        return None
    loads = by_load(comparisons)
    drawn = style.strokes({comparison.arm: comparison.family for comparison in comparisons}.items())
    figure, axes = style.framed_with(
        footer,
        "Error of simulated means by load; bars: 90 % interval over the engine's repeats",
        2,
        1,
        height=6.2,
        share=("all", "none"),
        margins=style.Margins(right=0.75 + 0.072 * max(map(len, drawn)), bottom=1.25),
        hspace=0.16,
    )
    for [ax], (metric, label) in zip(axes, _SHOWN.items(), strict=True):
        limit = next(
            100 * goal.limit for goal in GOALS if goal.metric == metric and goal.error == "bias"
        )
        ax.axhspan(-limit, limit, color=style.FAINT, alpha=0.6, zorder=0)
        ax.axhline(0, color=style.INK, linewidth=0.8)
        for number, (arm, stroke) in enumerate(drawn.items()):
            shift = _WIDTH * ((number + 0.5) / len(drawn) - 0.5)
            ticks, shown = [], []
            for tick, load in enumerate(loads):
                for comparison in load:
                    if comparison.arm == arm:
                        ticks.append(tick + shift)
                        shown.append(errors(comparison.measured, comparison.predicted)[metric])
            reach = np.array([_reach(error["bias"], error["bias_interval"]) for error in shown])
            ax.errorbar(
                ticks,
                [100 * error["bias"] for error in shown],
                100 * reach.reshape(-1, 2).T,
                fmt=stroke.marker,
                color=stroke.colour,
                markersize=5,
                elinewidth=1.2,
                label=arm,
            )
        style.label(ax, "", f"error of {label} (%)")
    axes[0][0].tick_params(labelbottom=False)
    axes[-1][0].set_xticks(
        range(len(loads)), [load_words(load[0].share, load[0].rate_rps) for load in loads]
    )
    style.legend_right(axes[0][0])
    return figure


def _reach(bias: float, interval: tuple[float, float] | None) -> tuple[float, float]:
    """Return the lengths of a bar below and above: 0 without an interval, 0 above where its end is
    infinite."""
    if interval is None:
        return 0.0, 0.0
    low, high = interval
    return max(bias - low, 0.0), max(high - bias, 0.0) if math.isfinite(high) else 0.0


# ------------------------------------------------------------------------------
# Every request's time to first token, predicted against measured.
# ------------------------------------------------------------------------------

_ONE_TENTH = 0.1


def draw_predicted_measured(comparisons: list[ArmComparison], footer: str) -> Figure | None:
    """Draw one point per request and repeat, a panel per load, with a line of equality and a ±10 %
    band."""
    if not comparisons:
        return None
    loads = by_load(comparisons)
    drawn = style.strokes({comparison.arm: comparison.family for comparison in comparisons}.items())
    figure, [axes] = style.framed_with(
        footer,
        "Time to first token of every request: simulated against measured",
        1,
        len(loads),
        height=4.5 if len(loads) > 1 else style.HEIGHT_IN,
        share=("all", "all"),
        margins=style.Margins(top=0.72, right=0.75 + 0.072 * max(map(len, drawn)), bottom=1.35),
        wspace=0.1,
    )
    values = np.concatenate(
        [
            v
            for comparison in comparisons
            for v in (
                *(run["ttft_s"] for run in comparison.measured),
                comparison.predicted["ttft_s"],
            )
        ]
    )
    unit = style.time_unit(float(values.max()))
    low, high = (value * unit.factor for value in style.positive_range(values))
    for ax, load in zip(axes, loads, strict=True):
        _predicted_measured_draw_load(ax, load, drawn, unit.factor, (low / 1.3, high * 1.3))
        ax.set_title(
            load_words(load[0].share, load[0].rate_rps), fontsize=9, loc="left", color=style.INK
        )
    style.label(axes[0], "", f"simulated TTFT ({unit.name})")
    middle = (0.8 + style.WIDTH_IN - 0.75 - 0.072 * max(map(len, drawn))) / 2 / style.WIDTH_IN
    label = f"measured TTFT ({unit.name})"
    figure.supxlabel(
        label, fontsize=style.LABEL_PT, color=style.INK, x=middle, y=0.85 / figure.get_figheight()
    )
    style.legend_right(axes[-1])
    return figure


def _predicted_measured_draw_load(
    ax: Axes,
    load: list[ArmComparison],
    drawn: dict[str, style.Stroke],
    factor: float,
    limits: tuple[float, float],
) -> None:
    line = np.array(limits)
    ax.plot(line, line, color=style.INK, linewidth=0.8, zorder=1, label="equal")
    band = line * (1 - _ONE_TENTH), line * (1 + _ONE_TENTH)
    ax.fill_between(
        line, *band, color=style.FAINT, alpha=0.6, zorder=0, label=f"±{100 * _ONE_TENTH:g} %"
    )
    for comparison in load:
        measured = np.concatenate([run["ttft_s"] for run in comparison.measured]) * factor
        predicted = np.tile(comparison.predicted["ttft_s"], len(comparison.measured)) * factor
        stroke = drawn[comparison.arm]
        ax.scatter(
            measured,
            predicted,
            s=11,
            marker=stroke.marker,
            color=stroke.colour,
            alpha=0.55,
            linewidths=0,
            label=comparison.arm,
        )
    for axis in (ax.xaxis, ax.yaxis):
        style.log_scale(axis, *limits)
    ax.set_xlim(limits)
    ax.set_ylim(limits)


FIGURES = {
    "predicted_measured": draw_predicted_measured,
    "error_by_load": draw_error_by_load,
    "ranking": draw_ranking,
}
_PROFILE_KEYS = ("model", "machine", "device", "date", "commit", "left_out", "shapes", "steps")


def compare_backends(finished: Finished) -> Findings:
    """Compare measured delays of each repeat with simulated delays, for every arm and rate, over
    all seeds."""
    profile, noise = finished.profile, finished.noise
    assert profile is not None and noise is not None, "engine runs have a profile and noise"
    profile.write(finished.folder / "profile.json")
    requests = tuple(remap_tokens(finished.workload.requests, finished.study.model.vocab_size))
    # both backends need equal prompts: remapped ids may become equal
    jobs = Jobs(finished.study, requests)
    compared = [cell for arm in finished.files for cell in _compare_arm(finished, arm, jobs)]
    alone = "summary" not in finished.study.chosen_analyses()
    sentence = noise.sentence("conclusions") if alone else ""
    calibrated = f"simulator calibrated {profile.date} at {profile.steps} steps"
    provenance = " · ".join(filter(None, (finished.name, footer(finished), calibrated, sentence)))
    names = list(FIGURES) if alone else ["predicted_measured"]
    summary = summarise(compared)
    notes = (
        (noise.description, *finished.failed.values(), *filter(None, [sentence])) if alone else ()
    )
    return Findings(
        summary={
            "fidelity": {"profile": {key: asdict(profile)[key] for key in _PROFILE_KEYS}} | summary
        },
        tables=tables(summary, provenance if alone else calibrated, notes),
        figures={name: partial(FIGURES[name], compared, provenance) for name in names},
        caveats=tuple(filter(None, [sentence])),
    )


def _compare_arm(finished: Finished, arm: str, jobs: Jobs) -> Iterable[ArmComparison]:
    """Compare one arm at each of its rates."""
    study, files = finished.study, finished.files[arm]
    assert finished.profile is not None, "compare_backends checks it"
    arm_cells, columns = run_cells(study, arm), files.columns()
    for rate in dict.fromkeys(cell.rate_rps for cell in arm_cells):
        at_rate = [cell for cell in arm_cells if cell.rate_rps == rate]
        seeds = [cell for cell in at_rate if not cell.repeat]
        timing = CalibratedTiming(finished.profile)
        predicted, schedule_matches = [], []
        for seed in seeds:
            job = jobs.job(arm, seed, files)
            predicted.append(
                _simulate(jobs, job, timing, finished.folder / "simulated" / job.steps.name)
            )
            logs = [files.log(arm, cell) for cell in at_rate if cell.first_repeat == seed]
            for log in logs:
                # the simulator's steps beside the engine's, with the engine's step times
                policy = build_policy(
                    jobs.study, job.strategy, job.warmup, job.max_tokens, job.requests
                )
                assert isinstance(policy, TreePolicy), "the engine runs the policy `tree` only"
                schedule_matches.append(
                    schedule_match(job.requests, policy, job.rules, read_steps(log), job.clients)
                )
        repeats = [
            [replace(cell, repeat=repeat) for cell in seeds] for repeat in range(study.runs.repeats)
        ]
        yield ArmComparison(
            arm=arm,
            family=family(study.arms[arm]),
            share=finished.shares.get(rate) if rate is not None else None,
            rate_rps=rate,
            measured=[
                concatenate_delays([delays(columns[cell]) for cell in repeat]) for repeat in repeats
            ],
            predicted=concatenate_delays(predicted),
            schedule_match=ScheduleMatch.of_all(schedule_matches),
            outside=timing.outside,
            simulated=timing.predicted,
        )


def _simulate(jobs: Jobs, job: Job, timing: CalibratedTiming, path: Path) -> Delays:
    """Simulate one run with a timing model, write its records to `path`, and return its delays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:

        def write(record: Record) -> None:
            file.write(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))

        simulate(
            job.requests,
            build_policy(jobs.study, job.strategy, job.warmup, job.max_tokens, job.requests),
            job.rules,
            timing,
            write,
            seed=job.seed,
            rate_rps=job.rate_rps,
            warmup=job.warmup,
            clients=job.clients,
            reads=build_span_reads(job.strategy),
        )
    return delays(read_records(path))


def delays(columns: Columns) -> Delays:
    """Delays in seconds of every counted request, by request id: an array of shape (n,) for each
    metric."""
    counted = select(columns, columns["counted"].astype(bool))
    order = np.argsort(counted["request_id"], kind="stable")
    values = delays_of(counted)
    return {metric: values[metric][order] for metric in METRICS}


ANALYSES.add(
    Analysis(
        "compare_backends",
        compare_backends,
        needs=(MEASURED,),
        options=DesignSettings,
        check_unread=accept,
    )
)
