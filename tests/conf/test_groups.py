"""Every file of every group can be chosen, and becomes objects that serve requests."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path

import pytest

from spanlab import build
from spanlab.main import CONF, compose
from spanlab.settings import Study
from spanlab_sim.run import simulate

CHOICES: dict[str, list[str]] = {}
for _path in sorted(CONF.glob("*/*.yaml")):
    CHOICES.setdefault(_path.parent.name, []).append(_path.stem)
UNTIMED = ("as_given", "interleaved_legacy")
# Files of these groups know nothing of each other, so one study can choose from all of them: the first file of each,
# then the second of each, and so on.
FREE = ("arrivals", "batch", "hardware", "store", "timing", "tracking", "strategy")
ROUNDS = [
    {group: name for group, name in zip(FREE, names, strict=True) if name is not None}
    for names in zip_longest(*(CHOICES[group] for group in FREE))
]
BOUND = [(group, name) for group in CHOICES for name in CHOICES[group] if group not in FREE]


def overrides(group: str, name: str, parquet: Path) -> list[str]:
    """How a user would choose this file in the smoke entry."""
    chosen = [f"+strategy@arms.mine={name}"] if group == "strategy" else [f"{group}={name}"]
    if (group, name) == ("workload", "tokenised"):
        chosen.append(f"workload.path={parquet}")
    if group == "arrivals" and name in UNTIMED:
        chosen.append("arrivals.rate_rps=null")
    if group == "model" and name.startswith(("llama", "qwen3-")):
        chosen.append("arms=attention")
    if group == "arms" and name == "attention":
        chosen.append("model=qwen3-8b")
    if (group, name) == ("workload", "narrativeqa"):
        chosen.append("workload.max_prompt_tokens=2048")
    return chosen


def check_serves(study: Study, arms: list[str]) -> None:
    """Each arm finishes every request, and its store still adds up."""
    assert arms, "nothing is served by nobody"
    requests = build.build_workload(study.workload, "unused").requests
    arrived = build.build_arrivals(study, requests, 0, study.arrivals.rate_rps)
    for arm in arms:
        records: list = []
        policy = build.build_policy(study, study.arms[arm], 0, max(request.num_tokens for request in requests))
        simulate(arrived, policy, build.build_rules(study), build.build_timing(study), records.append)
        policy.check()
        assert sorted(record.request_id for record in records) == sorted(request.id for request in requests)


def check_named(study: Study, group: str, name: str) -> None:
    """A file that has a name or a kind is called after it."""
    if group in ("model", "hardware"):
        assert getattr(study, group).name == name
    elif group in ("arrivals", "timing", "tracking", "workload"):
        assert getattr(study, group).kind == name


@pytest.mark.parametrize("chosen", ROUNDS, ids=lambda chosen: "-".join(chosen.values()))
def test_free_choices_serve_requests(chosen: dict[str, str], toy, toy_parquet: Path):
    typed = [word for group, name in chosen.items() for word in overrides(group, name, toy_parquet)]
    study = compose("smoke", [*(word for word in toy if word != "tracking=none"), *typed])
    check_serves(study, ["boundary", "mine"])
    for group, name in chosen.items():
        check_named(study, group, name)


@pytest.mark.parametrize(("group", "name"), BOUND, ids=lambda value: value)
def test_a_choice_serves_requests(group: str, name: str, toy, toy_parquet: Path):
    study = compose("smoke", [*toy, *overrides(group, name, toy_parquet)])
    check_serves(study, list(study.arms))
    check_named(study, group, name)


def test_a_strategy_places_as_its_file_is_called(toy):
    named = {"block", "balanced", "sqrt", "log", "dp", "last", "boundary", "branch"}
    arms = compose("smoke", [*toy, *(f"+strategy@arms.my_{name}={name}" for name in CHOICES["strategy"])]).arms
    kinds = {name: arms[f"my_{name}"].placement.kind for name in CHOICES["strategy"]}
    assert kinds == {name: name if name in named else "none" for name in kinds}
