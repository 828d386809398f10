"""Memory in two pools by their ratio, and the summary of the analysis."""

import json
from pathlib import Path

import pytest

from spanlab.analyses.state_ratio import balanced
from spanlab.build import build_workload
from spanlab.cli import compose
from spanlab.settings import StoreSettings
from spanlab.study.run import run_study

TOY = (
    "workload.documents=2",
    "workload.questions_per_document=2",
    "seeds=[0]",
    "sweep=[]",
    "executor.kind=here",
    "output.figures=false",
)


def test_a_ratio_is_two_pools_of_the_same_total():
    split = StoreSettings(total_gib=12, state_ratio=0.5).budget
    assert split == StoreSettings(total_gib=12, kv_gib=8, state_gib=4).budget


def test_the_formula_is_five_states_to_the_mean_request():
    study = compose("quality_sim", list(TOY[:2]))
    requests = build_workload(study.workload, "unused").requests
    mean = sum(request.num_tokens + request.output_len for request in requests) / len(requests)
    states, tokens = 5 * study.model.state_bytes, study.model.kv_bytes_per_token
    assert balanced(study.model, requests) == pytest.approx(states / (tokens * mean))


def test_a_study_tells_its_ratio_beside_those_of_sglang(tmp_path: Path):
    study = compose("state_ratio_sim", [*TOY, "only=[boundary]", "baseline=boundary", "store.state_ratio=0.4"])
    folder = run_study(study, "state_ratio_sim", tmp_path, show=False)
    summary = json.loads((folder / "summary.json").read_bytes())
    assert summary["state_ratio"]["ratio"] == 0.4
    assert summary["state_ratio"]["default"] == 0.9
    assert summary["store"].startswith("12 GiB for KV and states together, ")


def test_a_model_without_states_has_no_ratio():
    with pytest.raises(ValueError, match=r"^analyses=state_ratio with model\.name=llama-3\.1-8b: expected a hybrid"):
        compose("sessions_sim", ["analyses=[state_ratio]"])
