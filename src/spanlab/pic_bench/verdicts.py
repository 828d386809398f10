"""Answers become a table: accuracy, and closeness to full recompute beside its floor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from spanlab.analysis.judge import Case, JudgeOptions, judge_all
from spanlab.analysis.answer_rows import ArmResult, arm_rows
from spanlab.pic_bench.quality import FLOOR, ORDERS, REFERENCE, Answer
from spanlab.report import units
from spanlab.settings.pic_bench import JudgeSettings
from spanlab.stats import Interval

_SHUFFLED = f"-{ORDERS[1]}"
_NOTES = (
    "KL = mean over the answer's tokens of KL(full recompute ‖ arm), nats; top-1 = share of them with the same "
    "likeliest token; greedy = answers that would be the same; all after the tokens that M0, full recompute, chose",
    "floor = full recompute against itself in smaller steps; [ ] = 95 % interval over questions",
)


def verdicts(answers: Sequence[Answer], questions: Sequence[str], judge: JudgeSettings) -> list[dict[str, Any]]:
    """One entry per model and arm, `questions` by their number; where accuracy was not asked for it is None."""
    models: dict[str, dict[str, list[Answer]]] = defaultdict(lambda: defaultdict(list))
    for one in sorted(answers, key=lambda one: one.question):
        models[one.model][one.arm].append(one)
    return [entry for model, arms in models.items() for entry in _of_model(model, arms, questions, judge)]


def _of_model(
    model: str, arms: dict[str, list[Answer]], questions: Sequence[str], judge: JudgeSettings
) -> list[dict[str, Any]]:
    floors = [arms.pop(name) for name in (FLOOR, FLOOR + _SHUFFLED)]
    named = [name for arm in arms if not arm.endswith(_SHUFFLED) for name in (arm, arm + _SHUFFLED)]
    results = [ArmResult(arm, _texts(arms[arm]), _apart(arm, arms[arm])) for arm in named]
    golds = [[one.gold] for one in arms[REFERENCE]]
    rows = arm_rows(results, golds, [one.divergence for floor in floors for one in floor], REFERENCE)
    entries = [{"model": model} | _plain(asdict(row)) for row in rows]
    if judge.base_url:
        for entry in entries:
            entry["judge"] = _judged(arms[entry["arm"]], questions, judge)
    return entries


def _plain(value: Any) -> Any:
    """Intervals as lists, for a file that knows no tuples with names."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _texts(own: Sequence[Answer]) -> tuple[str, ...]:
    texts = tuple(one.answer for one in own)
    return texts if any(texts) else ()


def _apart(arm: str, own: Sequence[Answer]) -> tuple[Any, ...]:
    """Full recompute has no distance to itself; the floor says what there is."""
    return () if arm.startswith(REFERENCE) else tuple(one.divergence for one in own)


def _judged(own: Sequence[Answer], questions: Sequence[str], judge: JudgeSettings) -> dict[str, Any]:
    cases = [Case(questions[one.question], one.gold, one.answer) for one in own]
    found = judge_all(JudgeOptions(**asdict(judge)), cases)
    mean = sum(found.scores) / len(found.scores) if found.scores else None
    return {"mean": mean, "judged": len(found.scores), "failures": found.failures}


def as_table(entries: Sequence[dict[str, Any]]) -> Group:
    """A rich renderable: one row per model and arm, the floor in a row of its own."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False)
    scored = any(entry["accuracy"] for entry in entries)
    for heading in ("model", "arm", *(("exact", "stated", "F1") if scored else ()), "KL to M0", "top-1", "greedy"):
        table.add_column(heading, justify="left" if heading in ("model", "arm") else "right", no_wrap=True)
    for entry in entries:
        accuracy = entry["accuracy"]
        scores = [accuracy[key] if accuracy else None for key in ("exact", "stated", "f1")] if scored else []
        table.add_row(Text(entry["model"]), Text(entry["arm"]), *map(_share, scores), *_agreement(entry["agreement"]))
    for model, floor in {entry["model"]: entry["floor"] for entry in entries}.items():
        table.add_row(Text(model), Text("floor: M0 to M0"), *([""] * 3 if scored else []), *_agreement(floor))
    return Group(table, Text(), Text("\n".join(_NOTES), style="dim"))


def _agreement(found: dict[str, Any] | None) -> tuple[str, str, str]:
    if found is None:
        return units.MISSING, units.MISSING, units.MISSING
    kl = Interval(*found["kl"])
    bounds = "" if kl.low is None or kl.high is None else f" [{kl.low:.2g}, {kl.high:.2g}]"
    return f"{kl.mean:.3g}{bounds}", _share(found["top1"]), _share(found["greedy"])


def _share(found: Sequence[float | None] | None) -> str:
    if found is None:
        return units.MISSING
    mean, low, high = found
    bounds = "" if low is None or high is None else f" [{100 * low:.0f}, {100 * high:.0f}]"
    return f"{units.percent(mean)}{bounds}"
