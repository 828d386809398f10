"""The analysis policies of a small study, and of points of a sweep."""

import json
from pathlib import Path
from typing import Any

import pytest

from spanlab.analyses.policies import policies_of_points
from spanlab.cli import compose
from spanlab.report.sweep import SweepPoint
from spanlab.study.run import run_study

ENTRY = "hybrid_policies_sim"
ARMS = ["vllm_0_32", "last", "boundary", "dp_3_branch"]
TOY = ("workload.documents=3", "workload.questions_per_document=2", "seeds=[0,1]", "executor.kind=here", "sweep=[]")


@pytest.fixture(scope="module")
def summary(tmp_path_factory) -> dict[str, Any]:
    settings = (*TOY, f"only=[{','.join(ARMS)}]", "output.figures=false")
    folder: Path = run_study(compose(ENTRY, list(settings)), ENTRY, tmp_path_factory.mktemp("policies"), show=False)
    return json.loads((folder / "summary.json").read_bytes())


def test_rules_are_listed_by_family_in_settings_order(summary):
    assert summary["policies"]["budget_gib"] == 16
    rules = {rule["arm"]: rule for rule in summary["policies"]["rules"]}
    assert list(rules) == ARMS
    for rule in rules.values():
        assert len(rule["hit_rates"]) == 2
        assert rule["hit_rate"]["mean"] <= rule["offline"] + 1e-9


def test_points_of_a_sweep_have_a_ranking_and_figures(summary):
    points = [
        SweepPoint("", "", "", summary, settings={"traffic": name, "store.total_gib": "16"}) for name in ("a", "b")
    ]
    findings = policies_of_points(points)
    assert [table.name for table in findings.every_table] == ["policies", "policies_best", "policies_rules"]
    assert [point["settings"]["traffic"] for point in findings.summary["policies"]] == ["a", "b"]
    assert {row[0].value for row in findings.tables[0].rows} == set(ARMS)
    assert set(findings.figures) == {"policies_tokens", "policies_ttft"}


def test_rules_without_families_are_refused():
    with pytest.raises(ValueError, match=r"^families=\{\}: expected two families or more"):
        compose("smoke", ["analyses=[summary,policies]"])
