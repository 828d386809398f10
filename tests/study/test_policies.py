"""The analysis policies of small studies and of a sweep."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from spanlab.errors import sentence
from spanlab.main import CONF, compose
from spanlab.study.sweep import Entry, run_sweep

ENTRY = "hybrid_policies_sim"
TOY = (
    *("workload.documents=4", "workload.questions_per_document=3", "seeds=[0,1]", "workers=1"),
    *("only=[vllm_0_32,last,boundary,boundary_last]", "output.run=swept", "output.figures=false"),
)


@pytest.fixture(scope="module")
def swept(tmp_path_factory) -> Path:
    given = [*TOY, 'sweep=["store.total_gib=2,16"]']
    entry = Entry(ENTRY, lambda *point: compose(ENTRY, [*given, *point, "sweep=[]"]), partial(sentence, conf=CONF))
    return run_sweep(compose(ENTRY, given), entry, tmp_path_factory.mktemp("policies"))


def test_rules_are_told_by_family_in_the_order_of_the_settings(swept: Path):
    points = json.loads((swept / "summary.json").read_bytes())["policies"]
    assert [point["budget_gib"] for point in points] == [2, 16]
    for point in points:
        rules = {rule["arm"]: rule for rule in point["rules"]}
        assert list(rules) == ["vllm_0_32", "last", "boundary", "boundary_last"]
        for rule in rules.values():
            assert len(rule["hit_rates"]) == 2
            assert rule["hit_rate"]["mean"] <= rule["offline"] + 1e-9
            assert rule["offline"] <= rule["infinite"] + 1e-9


def test_tables_are_written(swept: Path):
    rows = (swept / "tables" / "policies_rules.csv").read_text().splitlines()
    assert len(rows) == 1 + 2 * 4
    ranked = (swept / "tables" / "policies.csv").read_text().splitlines()
    assert {row.split(",")[0] for row in ranked[1:]} == {"vllm_0_32", "last", "boundary", "boundary_last"}


def test_rules_without_families_are_refused():
    with pytest.raises(ValueError, match=r"^families=\{\}: expected two families or more"):
        compose("quality_sim", ["analyses=[summary,policies]"])
