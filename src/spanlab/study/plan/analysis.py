"""The analysis `plan`: results of the searches, their verdict, and the runs that support them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from rich.console import Console

from spanlab.report.plan import tables_of
from spanlab.report.plan_figure import draw_search
from spanlab.settings.analyses import ANALYSES
from spanlab.settings.plan import SEARCHES
from spanlab.study.analyses.head import footer
from spanlab.study.findings import Findings, Finished
from spanlab.study.numbers.summary import requests_needed
from spanlab.study.plan.planner import REFERENCES, Planner
from spanlab.study.plan.search_result import SearchResult
from spanlab.study.plan.trials import Trials


@ANALYSES.register("plan")
def plan(finished: Finished) -> Findings:
    """Search for settings that meet the study's latency targets, or report why none do."""
    study = finished.study
    assert finished.arms is not None, "arms stay available for analyses that need points"
    trials = Trials(study, finished.arms, finished.folder / "points.jsonl", Console(stderr=True))
    planner = Planner(study, finished.workload.requests, trials)
    results = {name: SEARCHES[name](planner) for name in study.plan.searches}
    summary = _summary(planner, results)
    trials.sort()
    title = f"{finished.name} · {footer(finished)}"
    caveats = (*_caveats(planner), *(caveat for result in results.values() for caveat in result.caveats))
    curves = [name for name, result in results.items() if result.curve]
    figures = {f"plan_{name}": partial(draw_search, summary, name, title) for name in curves}
    return Findings(summary, tables_of(summary, title, caveats), (), figures, caveats)


def _summary(planner: Planner, results: Mapping[str, SearchResult]) -> dict[str, Any]:
    answers = {key: value for result in results.values() for key, value in result.answer.items()}
    return {
        "verdict": _verdict(results),
        "targets": {target.key: target.limit_s for target in planner.targets},
        "meets": planner.references["own"].meets,
        **answers,
        "searches": {name: _search_entry(result) for name, result in results.items()},
        "references": {
            name: {"says": label} | planner.references[name].summary() for name, label in REFERENCES.items()
        },
        "curves": {
            name: [{result.axis.key: value} | outcome.summary() for value, outcome in result.curve]
            for name, result in results.items()
        },
    }


def _verdict(results: Mapping[str, SearchResult]) -> str:
    """Join the verdicts, those of searches that help first; where none helps, the sentence begins with that."""
    helpful = [result.verdict for result in results.values() if result.helps]
    unhelpful = [result.verdict for result in results.values() if not result.helps]
    if helpful:
        return "; ".join([*helpful, *unhelpful])
    return f"this will not help: {'; '.join(unhelpful)}"


def _search_entry(result: SearchResult) -> dict[str, Any]:
    axis = result.axis
    return {
        "verdict": result.verdict,
        "helps": result.helps,
        "answer": result.value,
        "axis": {"key": axis.key, "label": axis.label, "logarithmic": axis.logarithmic},
        "marks": {mark.label: mark.value for mark in result.marks},
    }


def _caveats(planner: Planner) -> tuple[str, ...]:
    """Return caveats of the intervals."""
    study, count = planner.study, len(planner.requests)
    if study.draws_arrivals():
        runs = f"intervals are Student's t over {len(study.seeds)} draws of the arrivals, the same for every point"
    else:
        runs = (
            f"arrivals are one recorded path: intervals are of a bootstrap over blocks of time, and of "
            f"{study.plan.shakes} runs with arrivals moved by up to half the mean gap, the same for every point"
        )
    criterion = "a target counts as met where the upper end of the 95 % interval meets it and the queue does not grow"
    small_samples = [
        f"{target.key} is of {count} requests, and a percentile needs {needed}: its interval is unreliable"
        for target in planner.targets
        if target.statistic != "mean" and count < (needed := requests_needed(float(target.statistic[1:])))
    ]
    at_once = planner.references["own"].mean("rate_rps") is None
    burst = ("all requests come at once: delays are those of one burst",) if at_once else ()
    return (runs, criterion, *burst, *small_samples)
