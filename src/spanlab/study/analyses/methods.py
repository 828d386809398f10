"""The analysis `methods`: speed, bytes and answers of every arm against full recompute, paired by question."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from spanlab.analysis.bootstrap import describe_few
from spanlab.analysis.clustered import Groups
from spanlab.analysis.method_scores import ArmAnswers, References, floor_entry, loss_by, method_entry, pair_changes
from spanlab.core.request import Request
from spanlab.report.methods.benefit import draw as draw_benefit
from spanlab.report.methods.budgets import draw as draw_budgets
from spanlab.report.methods.data import MethodData
from spanlab.report.methods.tables import buckets_table, budgets_tables, methods_table, pairs_table
from spanlab.settings.analyses import ANALYSES
from spanlab.settings.methods import METHODS
from spanlab.study.analyses.head import footer
from spanlab.study.analyses.method_inputs import covariates, read_answers
from spanlab.study.findings import Findings, Finished
from spanlab.study.machine.aa import floor_files
from spanlab.study.machine.floor import NAME

FIGURES = {"methods_benefit": draw_benefit, "methods_budgets": draw_budgets}


@ANALYSES.register(METHODS)
def compare_methods(finished: Finished) -> Findings:
    """Return each arm's gold loss, benefit kept, agreement, time and bytes, with intervals over documents."""
    study, baseline = finished.study, finished.study.baseline
    questions = [request for request in finished.workload.requests if request.answer is not None]
    if baseline not in finished.files:
        return Findings({"methods": {}}, caveats=(f"no answers are compared, for {baseline} failed",))
    read_arm = partial(read_answers, finished, questions)
    arms = {arm: read_arm(arm, files) for arm, files in finished.files.items()}
    floor = read_arm(baseline, floor_files(finished.folder, baseline))
    without = arms.get(study.methods.without_context or "")
    references = References(arms[baseline], without, floor, _groups(questions))
    noise = finished.noise_sentence("speedups")
    entries = {name: method_entry(arm, references) | ({"speedup": None} if noise else {}) for name, arm in arms.items()}
    lowest = floor_entry(references)
    scored = bool(arms[baseline].scores)
    buckets = _buckets(finished, questions, arms, references.groups) if scored else []
    pairs = pair_changes(list(arms.values()), references) if scored else []
    views = study.methods.without_context, study.methods.gold_only
    data = MethodData(
        entries, lowest, baseline, *views, " · ".join(filter(None, (finished.name, footer(finished), noise)))
    )
    return Findings(
        summary={
            "methods": entries,
            NAME: lowest,
            "gold_loss_by": buckets,
            "documents": len(np.unique(references.groups)),
        },
        tables=(methods_table(data),),
        further=(*budgets_tables(data), buckets_table(buckets), pairs_table(pairs)) if scored else (),
        figures={name: partial(drawing, data) for name, drawing in FIGURES.items()} if scored else {},
        caveats=_caveats(entries, len(np.unique(references.groups)), noise),
    )


def _groups(questions: Sequence[Request]) -> Groups:
    return np.array([request.group_id for request in questions], np.int64)


def _buckets(
    finished: Finished, questions: Sequence[Request], arms: dict[str, ArmAnswers], groups: Groups
) -> list[dict[str, Any]]:
    """Return gold loss by covariate: one entry per arm, covariate and bucket."""
    return [
        {"arm": name, "covariate": covariate, "bucket": bucket, "questions": int((values == bucket).sum()), **loss}
        for covariate, values in covariates(finished.workload, questions).items()
        for name, arm in arms.items()
        for bucket, loss in loss_by(arm, values, groups).items()
    ]


def _caveats(entries: dict[str, Any], documents: int, noise: str) -> tuple[str, ...]:
    """Return caveats: differences that the questions do not show, noise, and intervals that may be too narrow."""
    not_shown = [name for name, entry in entries.items() if entry["shown"] is False]
    caveats = [noise] if noise else []
    if not_shown:
        caveats.append(f"not shown by these questions: a gold loss other than the baseline's of {', '.join(not_shown)}")
    return (*caveats, *filter(None, [describe_few(1, documents)]))
