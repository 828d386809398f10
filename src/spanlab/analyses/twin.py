"""Tables of the analysis `twin`: errors on requests outside the fit, parameters, and the server's
settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from spanlab.analyses.base import Findings, Finished, footer
from spanlab.analyses.twin_capture import Capture, is_run, read_captures
from spanlab.analyses.twin_fit import (
    IDENTIFIED,
    Fit,
    Fitting,
    errors,
    measured_times,
    predicted_times,
    predictions_without_model,
)
from spanlab.analyses.twin_forward import Forwards, read_forwards, rows_of, table_of
from spanlab.analyses.twin_log import (
    ServerFacts,
    TimedLog,
    check_memory,
    read_timed_log,
    read_untimed_log,
    server_of,
)
from spanlab.analyses.twin_metrics import Sums, counts_of, read_sums
from spanlab.analyses.twin_metrics import rows_of as rows_of_sums
from spanlab.analyses.twin_metrics import tables_of as tables_of_sums
from spanlab.analyses.twin_predict import PREDICTORS, Twin, predict, summary_of
from spanlab.analyses.twin_predict import tables_of as tables_of_predictions
from spanlab.core.admission import BatchRules
from spanlab.provenance import commit
from spanlab.registry import require
from spanlab.report import style
from spanlab.report.table import MISSING, Cell, Field, Table, seconds, short, tabulate, word
from spanlab.settings.analyses import ANALYSES, LOG, Analysis, TwinSettings
from spanlab.settings.server import StoreSettings
from spanlab.settings.study import Study
from spanlab.workloads.logs.log import Log
from spanlab_sim.timings import FittedProfile

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


Summary = Mapping[str, Any]
NAMES = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "E2E latency"}


def _error(value: float | None) -> Cell:
    return MISSING if value is None else Cell(value, f"{100 * value:+.2f} %")


_ERRORS = (
    Field("metric", "metric", word, left=True),
    Field("predictor", "predictor", word, left=True),
    Field("mean_s", "measured\nmean", seconds),
    Field("mean_error", "error of\nthe mean", _error),
    Field("p50_error", "median\n|error|", _error),
    Field("p95_error", "p95\n|error|", _error),
    Field("bias", "bias", _error, keep=2),
    Field("seen_mean_error", "mean, of\nthose seen", _error, "seen.mean_error", 4),
    Field("seen_p50_error", "median, of\nthose seen", _error, "seen.p50_error", 3),
)
_PARAMETERS = (
    Field("parameter", "parameter", word, left=True),
    Field("value", "value", short),
    Field("low", "from", short),
    Field("high", "to", short),
    Field("identified", "identified", lambda value: Cell(value, "yes" if value else "no"), keep=2),
)
_SETTINGS = (Field("setting", "setting", word, left=True), Field("value", "value", word, left=True))


def tables_of(summary: Summary, title: str, caveats: tuple[str, ...]) -> tuple[Table, ...]:
    """Return all tables; `caveats` are notes of the first table."""
    rows = [{"parameter": name, **parameter} for name, parameter in summary["parameters"].items()]
    note = "from, to: 95 % interval; errors within a tenth of the requests count as one"
    parameters = tabulate(
        "parameters", "What the log says of the server", _PARAMETERS, rows, (note,)
    )
    blocks = summary["blocks"]
    settings = summary["server"] | {
        "blocks in use, at most": f"{blocks['most_used']:,} of {blocks['usable']:,}",
        "preemptions, simulated": f"{summary['preemptions']:,}",
    }
    if (reuse := summary["reuse"]) is not None:
        settings["reused tokens equal"] = f"{reuse['same']:,} of {summary['requests']:,} requests"
        settings["token hit rate, simulated"] = (
            f"{reuse['hit_rate']:.2%}, {reuse['our_hit_rate']:.2%}"
        )
    if (steps := summary["steps_fitted"]) is not None:
        settings["steps fitted"] = f"{steps:,}"
    rows = [{"setting": name, "value": value} for name, value in settings.items()]
    server = tabulate("server", "The server as it was run", _SETTINGS, rows)
    if not any(summary["means_s"].values()):  # a log without times of requests has no errors
        return replace(parameters, title=title, notes=(*parameters.notes, *caveats)), server
    return _errors(summary, title, caveats), parameters, server


def _errors(summary: Summary, title: str, caveats: tuple[str, ...]) -> Table:
    split = summary["split"]
    head = f"fitted to the first {split['train']:,} requests, tested on the {split['test']:,} that arrived later"
    by_predictor = {"twin": summary, **summary["without_model"]}
    rows = [
        {
            "metric": name,
            "predictor": PREDICTORS[predictor],
            "mean_s": summary["means_s"][metric],
            "seen": errors["seen"][metric],
        }
        | errors["unseen"][metric]
        for metric, name in NAMES.items()
        for predictor, errors in by_predictor.items()
    ]
    notes = (
        "error: predicted ÷ measured - 1, per request but for that of the mean; bias: its median",
        "all requests are simulated from the first on; of the test requests, the fit uses arrivals and lengths only",
        "line, mean, last value: fitted to the same first requests, without a model of the server; line: over the "
        "request's number, for E2E latency also over its output tokens",
        *caveats,
    )
    return tabulate("twin", f"{title}\n{head}", _ERRORS, rows, notes)


# ------------------------------------------------------------------------------
# The figure of the analysis `twin`: predicted against measured times of requests, and errors
# over time.
# ------------------------------------------------------------------------------

SHOWN = {"ttft": "TTFT", "e2e": "E2E latency"}
PARTS = {"seen by the fit": ("#999999", "o"), "not seen": ("#0072b2", "s")}
BAND = 0.1  # shaded around equality
MOST = 0.5  # larger errors are drawn at this limit


def draw_twin_figure(columns: Mapping[str, Any], title: str) -> Figure:
    """Draw predicted against measured times above, and relative errors by arrival below, one point
    per request."""
    heading = "Requests of the log: predicted against measured, and relative errors by arrival"
    margins = style.margins_for(PARTS)
    figure, axes = style.framed_with(
        title, heading, 2, 2, height=7.0, margins=margins, wspace=0.4, hspace=0.3
    )
    for column, (metric, name) in enumerate(SHOWN.items()):
        predicted, measured = columns["predicted"][metric], columns["measured"][metric]
        _draw_pairs(axes[0][column], columns["trains"], predicted, measured, name)
        ax = axes[1][column]
        ax.axhspan(-100 * BAND, 100 * BAND, color=style.FAINT, alpha=0.6, zorder=0)
        ax.axhline(0, color=style.INK, linewidth=0.8)
        shown = 100 * np.clip(predicted / measured - 1, -MOST, MOST)
        for label, mask in _subsets(columns["trains"]):
            colour, marker = PARTS[label]
            ax.scatter(
                columns["arrived_s"][mask],
                shown[mask],
                s=9,
                marker=marker,
                color=colour,
                alpha=0.6,
                linewidths=0,
            )
        style.label(ax, "arrival (s)", f"error of {name} (%)")
    style.legend_right(axes[0][1])
    return figure


def _subsets(trains: Any) -> list[tuple[str, Any]]:
    return list(zip(PARTS, (trains, ~trains), strict=True))


def _draw_pairs(ax: Axes, trains: Any, predicted: Any, measured: Any, name: str) -> None:
    low, high = style.positive_range(np.concatenate([predicted, measured]))
    ends = np.array([low / 1.3, high * 1.3])
    ax.plot(ends, ends, color=style.INK, linewidth=0.8)
    lower, upper = ends * (1 - BAND), ends * (1 + BAND)
    ax.fill_between(
        ends, lower, upper, color=style.FAINT, alpha=0.6, zorder=0, label=f"within {BAND:.0%}"
    )
    for label, mask in _subsets(trains):
        colour, marker = PARTS[label]
        ax.scatter(
            measured[mask],
            predicted[mask],
            s=9,
            marker=marker,
            color=colour,
            alpha=0.6,
            linewidths=0,
            label=label,
        )
    for axis in (ax.xaxis, ax.yaxis):
        style.log_scale(axis, *ends)
    ax.set_xlim(*ends)
    ax.set_ylim(*ends)
    style.label(ax, f"measured {name} (s)", f"predicted {name} (s)")


# ------------------------------------------------------------------------------
# The analysis `twin`: rates of a server from its log, their intervals, and errors on held-out
# requests.
# ------------------------------------------------------------------------------

PROFILE = "profile.json"
RUNS = "as in the folder of a run of replay or rendezvous"
OTHER_LOAD = 1.25  # rates of arrival that differ by more are different loads


@dataclass(frozen=True)
class Input:
    """What a twin reads: a log with its server, and other runs with theirs.

    `fitted`    the log's run; None for a log without prompts
    `forwards`  timed forwards of the same model and device; None: no file is given
    `sums`      what the server's metrics say of the log's requests; None: no file is given
    """

    log: TimedLog
    facts: ServerFacts
    fitted: Capture | None = None
    others: list[tuple[Capture, ServerFacts]] = field(default_factory=list)
    forwards: Forwards | None = None
    sums: Sums | None = None


def read_input(study: Study, log: Log) -> Input:
    """Return the input; ValueError for a log without the data of a fit, and for facts that no
    server has."""
    options, sums = study.analyses.twin, read_sums(study.analyses.twin.metrics)
    given = _read_log(study, log, sums)
    if sums is not None:
        sums.check(given.log.prompt_lens, given.log.output_lens, study.workload.path or "null")
    return replace(
        given,
        sums=sums,
        forwards=read_forwards(options.forward, study.model, given.facts.deployment),
    )


def _read_log(study: Study, log: Log, sums: Sums | None) -> Input:
    path, options = study.workload.path or "null", study.analyses.twin
    if not is_run(path):
        if options.predict:
            raise ValueError(
                f"twin.predict={options.predict} with log={path}: expected a log with prompts, {RUNS}"
            )
        read = read_timed_log if sums is None or log.observed is not None else read_untimed_log
        timed_log, facts = read(log, path, options.train_share), server_of(study)
        check_memory(timed_log, facts.memory, path)
        return Input(timed_log, facts)
    runs = read_captures(path, "log", study)
    if len(runs) > 1:
        raise ValueError(
            f"log={path}: {len(runs)} runs, {runs[0].name} and others; expected one, as of one seed and load"
        )
    fitted, facts = runs[0], server_of(study, runs[0].described)
    check_memory(fitted.log, facts.memory, path)
    if not options.predict:
        return Input(fitted.log, facts, fitted)
    # other servers have another memory: what describes that of the fitted run's does not count
    settings = replace(options, num_gpu_blocks=None, prefix_caching=None, async_scheduling=None)
    (arm,) = study.chosen()
    pool = study.arms[arm].pool
    assert pool is not None, "checked with the settings"
    arms = {arm: replace(study.arms[arm], pool=replace(pool, block_size=None))}
    alone = study.changed(twin=settings, arms=arms, batch=BatchRules(), store=StoreSettings())
    others: list[tuple[Capture, ServerFacts]] = []
    for folder in options.predict:
        for run in read_captures(str(Path(folder).expanduser()), "twin.predict", study):
            if run.digest in [known.digest for known in (fitted, *(other for other, _ in others))]:
                raise ValueError(
                    f"twin.predict={folder}: expected another run than the fitted one, and each one once"
                )
            other_facts = server_of(alone, run.described)
            check_memory(run.log, other_facts.memory, folder)
            others.append((run, other_facts))
    return Input(fitted.log, facts, fitted, others)


def check_log(study: Study, log: Log) -> None:
    """Raise ValueError for a log that cannot be fitted, and for runs that cannot be predicted from
    it."""
    read_input(study, log)


def twin(finished: Finished) -> Findings:
    """Fit the first requests of a log, predict the others, and write the fitted profile."""
    study, log = finished.study, finished.workload.log
    assert log is not None, "the settings let no other workload pass"
    path, given = study.workload.path or "null", read_input(study, log)
    timed_log = given.log
    fitting = Fitting(
        timed_log, study.model, study.hardware, given.facts, given.forwards, given.sums
    )
    fit = fitting.fit()
    summary = _summary(timed_log, fit)
    profile = FittedProfile(
        model=study.model.name,
        hardware=study.hardware.name,
        deployment=fit.facts.deployment,
        parameters=fit.parameters,
        unseen=summary["unseen"],
        log=Path(path).name,
        commit=commit(),
    )
    profile.write(finished.folder / PROFILE)
    caveats = (*log.notes, *timed_log.notes, *_caveats(fit, summary))
    title = f"{finished.name} · {footer(finished)}"
    tables = tables_of(summary, title, caveats)
    if given.sums is not None:
        arrived_s = timed_log.arrived_s + np.median(timed_log.outside.before)  # as simulated
        rows = rows_of_sums(given.sums, arrived_s, fit.times, fitting.fitted_intervals(given.sums))
        summary |= {
            "sums": rows,
            "counts": counts_of(given.sums, fit.times, timed_log.reused is not None),
        }
        tables += tables_of_sums(rows, summary["counts"])
        caveats += tuple(_caveats_of_sums(given.sums, timed_log))
    if given.forwards is not None:
        caveats += given.forwards.notes
        summary["forwards"] = rows_of(
            given.forwards, fitting.forward_seconds(given.forwards, fit.rates)
        )
        tables += (table_of(summary["forwards"]),)
    if given.fitted is not None and given.others:
        draws = study.analyses.twin.draws
        captures = (given.fitted, *(run for run, _ in given.others))
        model, predictions = Twin.of(fitting, fit), []
        for run, facts in given.others:
            further = [other for other in captures if other is not run]
            predicted, speed = predict(model, run, facts, draws), model.at_speed(run, facts)
            slowness = model.slowness(run.log)
            predictions.append(summary_of(given.fitted, predicted, speed, slowness, further))
        summary["predictions"] = predictions
        tables += tables_of_predictions(predictions, title, draws)
        caveats += tuple(f"{run.name}: {note}" for run, _ in given.others for note in run.log.notes)
    figures = (
        {}
        if not timed_log.has_times
        else {"predicted_measured": partial(draw_twin_figure, summary["requests_by_time"], title)}
    )
    summary = {key: value for key, value in summary.items() if key != "requests_by_time"}
    return Findings(summary | {"profile": PROFILE}, tables, (), figures, caveats)


def _summary(log: TimedLog, fit: Fit) -> dict[str, Any]:
    predicted, measured, tests = predicted_times(log, fit.times), measured_times(log), ~log.trains
    source = fit.facts.sources["twin.async_scheduling"]
    scheduling = source if "(" in source else f"{bool(fit.facts.asynchronous)} (fits better)"
    means_s: dict[str, float | None] = {}
    for name, values in measured.items():
        known = values[tests & ~np.isnan(values)]
        means_s[name] = float(known.mean()) if len(known) else None
    reuse = None
    if log.reused is not None:
        tokens = int(log.prompt_lens.sum())
        reuse = {
            "same": int((log.reused == fit.times.reused).sum()),
            "hit_rate": float(log.reused.sum()) / tokens,
            "our_hit_rate": float(fit.times.reused.sum()) / tokens,
        }
    return {
        "timing": "fitted",  # replaces the study's own timing model
        "requests": len(log.requests),
        "parameters": {name: asdict(parameter) for name, parameter in fit.parameters.items()},
        "unseen": errors(predicted, measured, tests),
        "seen": errors(predicted, measured, log.trains),
        "without_model": {
            name: {
                "unseen": errors(other, measured, tests),
                "seen": errors(other, measured, log.trains),
            }
            for name, other in predictions_without_model(log).items()
        },
        "means_s": means_s,
        "split": {
            "train": int(log.trains.sum()),
            "test": int(tests.sum()),
            "train_rate_rps": _rate(log.arrived_s[log.trains]),
            "test_rate_rps": _rate(log.arrived_s[tests]),
        },
        "server": fit.facts.sources | {"twin.async_scheduling": scheduling},
        "deployment": asdict(fit.facts.deployment),
        "preemptions": fit.times.preemptions,
        "reuse": reuse,
        "steps_fitted": None if log.steps is None else int(log.steps.trains.sum()),
        "steps": fit.times.steps,
        "blocks": {"usable": fit.facts.memory.blocks, "most_used": fit.times.blocks},
        "simulations": fit.simulations,
        "requests_by_time": {
            "arrived_s": log.arrived_s,
            "trains": log.trains,
            "predicted": predicted,
            "measured": measured,
        },
    }


def _caveats_of_sums(sums: Sums, log: TimedLog) -> Iterator[str]:
    """Yield what sums do not tell."""
    if not log.has_times and len(sums.intervals) == 1:
        yield "the scrapes have one interval, which is fitted: none is left to test the fit"
    if log.reused is None and sums.counts.get("reused"):
        yield (
            f"the server reused {sums.counts['reused']:,} prompt tokens, and the log does not say which: every prompt "
            "is computed in full, so the server appears faster than it is"
        )


def _rate(arrived_s: Any) -> float | None:
    span = float(arrived_s[-1] - arrived_s[0])
    return (len(arrived_s) - 1) / span if span > 0 else None


def _caveats(fit: Fit, summary: dict[str, Any]) -> list[str]:
    """Return caveats about quantities that the log does not determine, one sentence each."""
    caveats = [
        f"{name} is not identified by this log: its interval spans more than a factor of {IDENTIFIED:g}, so "
        f"{parameter.value:.4g} is as much assumed as fitted"
        for name, parameter in fit.parameters.items()
        if not parameter.identified
    ]
    used, between = fit.times.blocks, fit.facts.blocks_between
    if between is not None:
        blocks_text = (
            f"the log does not name its blocks of KV: {fit.facts.memory.blocks:,} are estimated, "
            f"from {between[0]:,} to {between[1]:,}"
        )
        matters = used >= between[0]
        effect = (
            "which matters, for so many are used"
            if matters
            else f"which does not matter, for {used:,} are used"
        )
        caveats.append(
            f"{blocks_text}, {effect}{'; twin.num_gpu_blocks sets them' if matters else ''}"
        )
    rates = summary["split"]["train_rate_rps"], summary["split"]["test_rate_rps"]
    if None not in rates and not 1 / OTHER_LOAD <= rates[1] / rates[0] <= OTHER_LOAD:
        caveats.append(
            f"the test requests have another load: {rates[1]:.3g} per second, compared with {rates[0]:.3g} in the fit"
        )
    return caveats


def _check(study: Study) -> None:
    """Raise ValueError for settings that `twin` does not read."""
    require(
        "analyses=twin",
        ("analyses", study.chosen_analyses(), ["twin"]),
        ("workload.kind", study.workload.kind, "log"),
        ("workload.popularity.requests", study.workload.popularity.requests, None),
        ("arrivals.kind", study.arrivals.kind, "as_given"),
        ("load.rates_rps", study.runs.load.rates_rps, []),
        ("backend", study.backend, "sim"),
        ("timing.kind", study.timing.kind, "roofline"),
        ("seeds", study.runs.seeds, study.runs.seeds[:1]),
        ("warmup_fraction", study.runs.warmup_fraction, 0.0),
        ("batch.async_scheduling", study.batch.async_scheduling, False),
        ("batch.speculation.draft_tokens", study.batch.speculation.draft_tokens, 0),
        ("store.total_gib", study.store.total_gib, None),
        ("store.state_gib", study.store.state_gib, None),
        ("store.state_ratio", study.store.state_ratio, None),
        ("store.entries", study.store.entries, None),
        (
            "only one arm, with a pool",
            [study.arms[name].pool is not None for name in study.chosen()],
            [True],
        ),
    )
    if study.store.kv_gib is not None and study.analyses.twin.num_gpu_blocks is not None:
        raise ValueError(
            f"store.kv_gib={study.store.kv_gib} with twin.num_gpu_blocks: expected one of them"
        )


ANALYSES.add(
    Analysis("twin", twin, needs=(LOG,), options=TwinSettings, check=_check, check_log=check_log)
)
