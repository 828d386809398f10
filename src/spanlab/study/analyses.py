"""The analyses of a study by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spanlab.report.sweep_data import SweepPoint
from spanlab.study.answers import score_answers
from spanlab.study.compare_backends import compare_backends
from spanlab.study.findings import Analysis, Findings
from spanlab.study.fit_profile import fit_profile
from spanlab.study.prefill import compare_prefills, prefills_of_points
from spanlab.study.summarise_arms import summarise_arms

ANALYSES: dict[str, Analysis] = {
    "summary": summarise_arms,
    "compare_backends": compare_backends,
    "fit_profile": fit_profile,
    "prefill": compare_prefills,
    "answers": score_answers,
}

#: Analyses that read the repeated baseline of an engine study: the noise of its machine, or of its numerics.
READ_REPEAT = {"summary", "prefill", "answers"}

#: Analyses that also say something of all points of a sweep together.
OF_POINTS: dict[str, Callable[[Sequence[SweepPoint]], Findings]] = {"prefill": prefills_of_points}
