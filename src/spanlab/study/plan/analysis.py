"""The analysis `plan`: searches, the verdict first, and where each number comes from."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import Console

from spanlab.report.plan import tables_of
from spanlab.settings.analyses import ANALYSES
from spanlab.settings.plan import SEARCHES
from spanlab.study.analyses.head import footer
from spanlab.study.findings import Findings, Finished
from spanlab.study.numbers.summary import requests_needed
from spanlab.study.plan.found import Found
from spanlab.study.plan.planner import REFERENCES, Planner
from spanlab.study.plan.trials import Trials

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@ANALYSES.register("plan")
def plan(finished: Finished) -> Findings:
    """What meets the targets of the study, and why nothing does where nothing does."""
    study = finished.study
    assert finished.arms is not None, "arms stay at hand for what needs points"
    trials = Trials(study, finished.arms, finished.folder / "points.jsonl", Console(stderr=True))
    planner = Planner(study, finished.workload.requests, trials)
    found = {name: SEARCHES[name](planner) for name in study.plan.searches}
    summary = _summary(planner, found)
    title = f"{finished.name} · {footer(finished)}"
    caveats = (*_caveats(planner), *(said for one in found.values() for said in one.caveats))
    figures = {f"plan_{name}": partial(_draw, summary, name, title) for name, one in found.items() if one.curve}
    return Findings(summary, tables_of(summary, title, caveats), (), figures, caveats)


def _summary(planner: Planner, found: Mapping[str, Found]) -> dict[str, Any]:
    answers = {key: value for one in found.values() for key, value in one.answer.items()}
    return {
        "verdict": _verdict(found),
        "targets": {target.key: target.limit_s for target in planner.targets},
        "meets": planner.references["own"].meets,
        **answers,
        "searches": {name: _told(one) for name, one in found.items()},
        "references": {
            name: {"says": words} | planner.references[name].summary() for name, words in REFERENCES.items()
        },
        "curves": {
            name: [{one.axis.key: value} | outcome.summary() for value, outcome in one.curve]
            for name, one in found.items()
        },
    }


def _verdict(found: Mapping[str, Found]) -> str:
    """What helps first; that nothing helps, and why, is an answer too."""
    helping = [one.verdict for one in found.values() if one.helps]
    others = [one.verdict for one in found.values() if not one.helps]
    if helping:
        return "; ".join([*helping, *others])
    return f"this will not help: {'; '.join(others)}"


def _told(found: Found) -> dict[str, Any]:
    axis = found.axis
    return {
        "verdict": found.verdict,
        "helps": found.helps,
        "answer": found.value,
        "axis": {"key": axis.key, "label": axis.label, "logarithmic": axis.logarithmic},
        "marks": {mark.words: mark.value for mark in found.marks},
    }


def _caveats(planner: Planner) -> tuple[str, ...]:
    """What a reader of the intervals must know."""
    study, count = planner.study, len(planner.requests)
    if study.draws_arrivals():
        runs = f"intervals are Student's t over {len(study.seeds)} draws of the arrivals, the same for every point"
    else:
        runs = (
            f"arrivals are one recorded path: intervals are of a bootstrap over blocks of time, and of "
            f"{study.plan.shakes} runs with arrivals moved by up to half the mean gap, the same for every point"
        )
    met = "a target counts as met where the upper end of the 95 % interval meets it and the queue does not grow"
    few = [
        f"{target.key} is of {count} requests, and a percentile needs {needed}: its interval says too little"
        for target in planner.targets
        if target.statistic != "mean" and count < (needed := requests_needed(float(target.statistic[1:])))
    ]
    at_once = planner.references["own"].mean("rate_rps") is None
    burst = ("all requests come at once: delays are those of one burst",) if at_once else ()
    return (runs, met, *burst, *few)


def _draw(summary: Mapping[str, Any], name: str, title: str) -> Figure | None:
    from spanlab.report.plan_figure import draw_search

    return draw_search(summary, name, title)
