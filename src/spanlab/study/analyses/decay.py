"""The analysis `decay`: whether the gain of each arm lasts while novel requests arrive."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from spanlab import build
from spanlab.analysis.decay import Floats, Stream, decay_of
from spanlab.analysis.outputs import read_scores
from spanlab.core.passages import novel_requests
from spanlab.core.request import Request
from spanlab.report.analyses.decay import decay_table, points_table
from spanlab.report.analyses.decay_figure import draw_decay
from spanlab.report.sweep.data import SweepPoint
from spanlab.settings import Study
from spanlab.settings.analyses import ANALYSES, OF_POINTS
from spanlab.study.analyses.head import footer
from spanlab.study.findings import Findings, Finished
from spanlab.study.numbers.results import family
from spanlab.study.output.arm_files import Cell


@ANALYSES.register("decay")
def decay(finished: Finished) -> Findings:
    """Return reuse and speedup of every arm in windows of novel requests; intervals are over seeds."""
    study = finished.study
    if study.baseline not in finished.files:
        raise ValueError(f"baseline={study.baseline} with analyses=decay: it failed, {finished.failed[study.baseline]}")
    cells = [Cell(seed, study.arrivals.rate_rps) for seed in study.seeds]
    streams = streams_of(study, finished.workload.requests)
    columns = {name: files.columns() for name, files in finished.files.items()}
    runs = {name: [by_cell[cell] for cell in cells] for name, by_cell in columns.items()}
    losses = {name: _losses(finished, name, cells, streams) for name in runs}
    arms = {
        name: decay_of(streams, arm_runs, runs[study.baseline], _changes(losses[name], losses[study.baseline]))
        for name, arm_runs in runs.items()
    }
    noise = finished.noise_sentence("speedups")
    families = {name: family(study.arms[name]) for name in arms}
    return Findings(
        summary={"decay": {name: arm.summary() for name, arm in arms.items()}},
        tables=(decay_table(f"{finished.name} · {footer(finished)}", arms, study.baseline),),
        figures={"decay": partial(draw_decay, arms, families, study.baseline, footer(finished))},
        caveats=(f"{noise}; they are shown all the same",) if noise else (),
    )


def _losses(finished: Finished, arm: str, cells: Sequence[Cell], streams: Sequence[Stream]) -> list[Floats]:
    """Return the gold loss of every request by seed, in stream order; empty where answers are not scored."""
    if finished.study.backend != "engine" or finished.study.engine.record != "scores":
        return []
    scores_by_seed = [read_scores(finished.files[arm].outputs(arm, cell)) for cell in cells]
    return [
        np.array([scores[request]["nll"] for request in stream.ids.tolist()])
        for scores, stream in zip(scores_by_seed, streams, strict=True)
    ]


def _changes(losses: Sequence[Floats], baseline: Sequence[Floats]) -> list[Floats]:
    return [loss - base for loss, base in zip(losses, baseline, strict=True)]


def streams_of(study: Study, requests: Sequence[Request]) -> list[Stream]:
    """Return the order of requests under each seed, equal for all arms; ValueError where a window is empty."""
    novel = np.array(sorted(novel_requests(requests)), np.int64)
    streams = []
    for seed in study.seeds:
        arrivals = build.build_arrivals(study, tuple(requests), seed, study.arrivals.rate_rps)
        ids = np.array([request.id for request in arrivals], np.int64)
        streams.append(Stream(ids, np.isin(ids, novel)))
        streams[-1].check(seed)
    return streams


@OF_POINTS.register("decay")
def decay_of_points(points: Sequence[SweepPoint]) -> Findings:
    """Return every arm's gain before and after novel requests, at every point of a sweep."""
    return Findings(summary={}, tables=(points_table(points),))
