"""The analysis `compare_backends`: simulate the arrivals of the engine's runs, and compute the prediction error."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import orjson

from spanlab import build
from spanlab.analysis.compare import ArmComparison, ScheduleMatch, concatenate_delays, summarise
from spanlab.analysis.errors import METRICS, Delays
from spanlab.core.policies.tree import TreePolicy
from spanlab.engine.remap_tokens import remap_tokens
from spanlab.records import Record
from spanlab.report.fidelity.comparison import tables
from spanlab.report.fidelity.error_by_load import draw as draw_error_by_load
from spanlab.report.fidelity.predicted_measured import draw as draw_predicted_measured
from spanlab.report.fidelity.ranking import draw as draw_ranking
from spanlab.settings.analyses import ANALYSES
from spanlab.study.analyses.head import footer
from spanlab.study.execution.cells import cells
from spanlab.study.execution.jobs import Job, Jobs
from spanlab.study.fidelity.schedule_match import schedule_match
from spanlab.study.findings import Findings, Finished
from spanlab.study.numbers import summary as sums
from spanlab.study.numbers.results import family
from spanlab.study.output.step_log import read_steps
from spanlab_sim.calibrated import CalibratedTiming
from spanlab_sim.run import simulate

FIGURES = {
    "predicted_measured": draw_predicted_measured,
    "error_by_load": draw_error_by_load,
    "ranking": draw_ranking,
}
_PROFILE_KEYS = ("model", "machine", "device", "date", "commit", "left_out", "shapes", "steps")


@ANALYSES.register("compare_backends")
def compare_backends(finished: Finished) -> Findings:
    """Compare measured delays of each repeat with simulated delays, for every arm and rate, over all seeds."""
    profile, noise = finished.profile, finished.noise
    assert profile is not None and noise is not None, "engine runs have a profile and noise"
    profile.write(finished.folder / "profile.json")
    requests = tuple(remap_tokens(finished.workload.requests, finished.study.model.vocab_size))
    jobs = Jobs(finished.study, requests)  # both backends need equal prompts: remapped ids may become equal
    compared = [cell for arm in finished.files for cell in _compare_arm(finished, arm, jobs)]
    alone = "summary" not in finished.study.chosen_analyses()
    sentence = noise.sentence("conclusions") if alone else ""
    calibrated = f"simulator calibrated {profile.date} at {profile.steps} steps"
    provenance = " · ".join(filter(None, (finished.name, footer(finished), calibrated, sentence)))
    names = list(FIGURES) if alone else ["predicted_measured"]
    summary = summarise(compared)
    notes = (noise.description, *finished.failed.values(), *filter(None, [sentence])) if alone else ()
    return Findings(
        summary={"fidelity": {"profile": {key: asdict(profile)[key] for key in _PROFILE_KEYS}} | summary},
        tables=tables(summary, provenance if alone else calibrated, notes),
        figures={name: partial(FIGURES[name], compared, provenance) for name in names},
        caveats=tuple(filter(None, [sentence])),
    )


def _compare_arm(finished: Finished, arm: str, jobs: Jobs) -> Iterable[ArmComparison]:
    """Compare one arm at each of its rates."""
    study, files = finished.study, finished.files[arm]
    assert finished.profile is not None, "compare_backends checks it"
    arm_cells, columns = cells(study, arm), files.columns()
    for rate in dict.fromkeys(cell.rate_rps for cell in arm_cells):
        at_rate = [cell for cell in arm_cells if cell.rate_rps == rate]
        seeds = [cell for cell in at_rate if not cell.repeat]
        timing = CalibratedTiming(finished.profile)
        predicted, schedule_matches = [], []
        for seed in seeds:
            job = jobs.job(arm, seed, files)
            predicted.append(_simulate(jobs, job, timing, finished.folder / "simulated" / job.steps.name))
            logs = [files.log(arm, cell) for cell in at_rate if cell.first_repeat == seed]
            schedule_matches += [_schedule_match(jobs, job, log) for log in logs]
        repeats = [[replace(cell, repeat=repeat) for cell in seeds] for repeat in range(study.repeats)]
        yield ArmComparison(
            arm=arm,
            family=family(study.arms[arm]),
            share=finished.shares.get(rate) if rate is not None else None,
            rate_rps=rate,
            measured=[concatenate_delays([delays(columns[cell]) for cell in repeat]) for repeat in repeats],
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
            build.build_policy(jobs.study, job.strategy, job.warmup, job.max_tokens, job.requests),
            job.rules,
            timing,
            write,
            seed=job.seed,
            rate_rps=job.rate_rps,
            warmup=job.warmup,
            clients=job.clients,
            reads=build.build_span_reads(job.strategy),
        )
    return delays(sums.read_records(path))


def _schedule_match(jobs: Jobs, job: Job, log: Path) -> ScheduleMatch:
    """Compare the simulator's steps with the engine's, using the engine's step times."""
    policy = build.build_policy(jobs.study, job.strategy, job.warmup, job.max_tokens, job.requests)
    assert isinstance(policy, TreePolicy), "the engine runs the policy `tree` only"
    return schedule_match(job.requests, policy, job.rules, read_steps(log), job.clients)


def delays(columns: sums.Columns) -> Delays:
    """Delays in seconds of every counted request, by request id: an array of shape (n,) for each metric."""
    counted = sums.select(columns, columns["counted"].astype(bool))
    order = np.argsort(counted["request_id"], kind="stable")
    values = sums.delays(counted)
    return {metric: values[metric][order] for metric in METRICS}
