"""The analysis `methods`: speed, bytes and answers of every arm beside full recompute, paired by question."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from spanlab.analysis.clustered import Groups
from spanlab.analysis.method_scores import ArmAnswers, Compared, floor_entry, loss_by, method_entry, pair_changes
from spanlab.core.request import Request
from spanlab.report.methods.data import MethodData
from spanlab.report.methods.tables import buckets_table, budgets_tables, methods_table, pairs_table
from spanlab.settings.analyses import ANALYSES
from spanlab.settings.methods import METHODS
from spanlab.study.analyses.head import footer
from spanlab.study.analyses.method_inputs import covariates, read_answers
from spanlab.study.findings import Findings, Finished
from spanlab.study.machine.aa import floor_files
from spanlab.study.machine.floor import NAME

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURES = ("benefit", "budgets")


@ANALYSES.register(METHODS)
def compare_methods(finished: Finished) -> Findings:
    """Every arm's loss of the gold answer, benefit kept, agreement, time and bytes, with intervals over documents."""
    study, baseline = finished.study, finished.study.baseline
    asked = [request for request in finished.workload.requests if request.answer is not None]
    if baseline not in finished.files:
        return Findings({"methods": {}}, caveats=(f"no answers are compared, for {baseline} failed",))
    read = partial(read_answers, finished, asked)
    arms = {arm: read(arm, files) for arm, files in finished.files.items()}
    floor = read(baseline, floor_files(finished.folder, baseline))
    without = arms.get(study.methods.without_context or "")
    beside = Compared(arms[baseline], without, floor, _groups(asked))
    noise = finished.noise.sentence("speedups") if finished.noise else ""
    entries = {name: method_entry(arm, beside) | ({"speedup": None} if noise else {}) for name, arm in arms.items()}
    lowest = floor_entry(beside)
    scored = bool(arms[baseline].scores)
    buckets = _buckets(finished, asked, arms, beside.groups) if scored else []
    pairs = pair_changes(list(arms.values()), beside) if scored else []
    views = study.methods.without_context, study.methods.gold_only
    data = MethodData(
        entries, lowest, baseline, *views, " · ".join(filter(None, (finished.name, footer(finished), noise)))
    )
    return Findings(
        summary={
            "methods": entries,
            NAME: lowest,
            "gold_loss_by": buckets,
            "documents": len(np.unique(beside.groups)),
        },
        tables=(methods_table(data),),
        further=(*budgets_tables(data), buckets_table(buckets), pairs_table(pairs)) if scored else (),
        figures={f"methods_{name}": partial(_draw, name, data) for name in FIGURES} if scored else {},
        caveats=_caveats(entries, len(np.unique(beside.groups)), noise),
    )


def _groups(asked: Sequence[Request]) -> Groups:
    return np.array([request.group_id for request in asked], np.int64)


def _buckets(
    finished: Finished, asked: Sequence[Request], arms: dict[str, ArmAnswers], groups: Groups
) -> list[dict[str, Any]]:
    """Gold loss by covariate: one entry for each arm, covariate and bucket."""
    return [
        {"arm": name, "covariate": covariate, "bucket": bucket, "questions": int((values == bucket).sum()), **loss}
        for covariate, values in covariates(finished.workload, asked).items()
        for name, arm in arms.items()
        for bucket, loss in loss_by(arm, values, groups).items()
    ]


def _caveats(entries: dict[str, Any], documents: int, noise: str) -> tuple[str, ...]:
    """What a reader of the numbers must know: which differences the questions do not show, and why times say little."""
    unshown = [name for name, entry in entries.items() if entry["shown"] is False]
    found = [noise] if noise else []
    if unshown:
        found.append(f"not shown by these questions: a gold loss other than the baseline's of {', '.join(unshown)}")
    if documents < 20:
        found.append(f"intervals over {documents} documents may be too narrow: a bootstrap needs some twenty")
    return tuple(found)


def _draw(name: str, data: MethodData) -> Figure | None:
    from spanlab.report.methods import benefit, budgets

    return {"benefit": benefit.draw, "budgets": budgets.draw}[name](data)
