"""The analysis `twin`: rates of a server from its log, their intervals, and errors on held-out requests."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from spanlab.report.twin import tables_of
from spanlab.report.twin_figure import draw as draw_twin_figure
from spanlab.settings import Study
from spanlab.settings.analyses import ANALYSES, LOG_CHECKS
from spanlab.study.analyses.head import footer
from spanlab.study.findings import Findings, Finished
from spanlab.study.output.provenance import commit
from spanlab.study.twin.errors import errors, measured_times, predicted_times, predictions_without_model
from spanlab.study.twin.fit import IDENTIFIED, Fit, Fitting
from spanlab.study.twin.log import TimedLog, check_memory, read_timed_log
from spanlab.study.twin.server import server_of
from spanlab.workloads.logs import Log
from spanlab_sim.fitted_profile import FittedProfile

PROFILE = "profile.json"
OTHER_LOAD = 1.25  # rates of arrival that differ by more are different loads


@LOG_CHECKS.register("twin")
def check_log(study: Study, log: Log) -> None:
    """Raise ValueError for a log without the data of a fit, and for facts that no server has."""
    path = study.workload.path or "null"
    check_memory(read_timed_log(log, path, study.twin.train_share), server_of(study).memory, path)


@ANALYSES.register("twin")
def twin(finished: Finished) -> Findings:
    """Fit the first requests of a log, predict the others, and write the fitted profile."""
    study, log = finished.study, finished.workload.log
    assert log is not None, "the settings let no other workload pass"
    path = study.workload.path or "null"
    timed_log, facts = read_timed_log(log, path, study.twin.train_share), server_of(study)
    check_memory(timed_log, facts.memory, path)
    fit = Fitting(timed_log, study.model, study.hardware, facts).fit()
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
    figures = {"predicted_measured": partial(draw_twin_figure, summary["requests_by_time"], title)}
    summary = {key: value for key, value in summary.items() if key != "requests_by_time"}
    return Findings(summary | {"profile": PROFILE}, tables, (), figures, caveats)


def _summary(log: TimedLog, fit: Fit) -> dict[str, Any]:
    predicted, measured, tests = predicted_times(log, fit.times), measured_times(log), ~log.trains
    return {
        "timing": "fitted",  # replaces the study's own timing model
        "requests": len(log.requests),
        "parameters": {name: asdict(parameter) for name, parameter in fit.parameters.items()},
        "unseen": errors(predicted, measured, tests),
        "seen": errors(predicted, measured, log.trains),
        "without_model": {
            name: {"unseen": errors(other, measured, tests), "seen": errors(other, measured, log.trains)}
            for name, other in predictions_without_model(log).items()
        },
        "means_s": {name: float(np.nanmean(values[tests])) for name, values in measured.items()},
        "split": {
            "train": int(log.trains.sum()),
            "test": int(tests.sum()),
            "train_rate_rps": _rate(log.arrived_s[log.trains]),
            "test_rate_rps": _rate(log.arrived_s[tests]),
        },
        "server": fit.facts.sources | {"twin.async_scheduling": _scheduling(fit)},
        "deployment": asdict(fit.facts.deployment),
        "preemptions": fit.times.preemptions,
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


def _rate(arrived_s: Any) -> float | None:
    span = float(arrived_s[-1] - arrived_s[0])
    return (len(arrived_s) - 1) / span if span > 0 else None


def _scheduling(fit: Fit) -> str:
    source = fit.facts.sources["twin.async_scheduling"]
    return source if "(" in source else f"{bool(fit.facts.asynchronous)} (fits better)"


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
            f"the log does not name its blocks of KV: {fit.facts.memory.blocks:,} are estimated, from {between[0]:,}"
        )
        blocks_text = f"{blocks_text} to {between[1]:,}"
        matters = used >= between[0]
        effect = "which matters, for so many are used" if matters else f"which does not matter, for {used:,} are used"
        caveats.append(f"{blocks_text}, {effect}{'; twin.num_gpu_blocks sets them' if matters else ''}")
    rates = summary["split"]["train_rate_rps"], summary["split"]["test_rate_rps"]
    if None not in rates and not 1 / OTHER_LOAD <= rates[1] / rates[0] <= OTHER_LOAD:
        caveats.append(
            f"the test requests have another load: {rates[1]:.3g} per second, compared with {rates[0]:.3g} in the fit"
        )
    return caveats
