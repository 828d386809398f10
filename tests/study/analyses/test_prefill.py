"""The analysis `prefill` of an engine study: reuse of cold requests, parts and bounds."""

import json

import pytest

from spanlab.cli import compose
from spanlab.engine.plain import PlainForward
from spanlab.study.backends import RealEngine
from spanlab.study.run import run_study

SMALL = ("sweep=[]", "tracking.kind=none", "output.figures=false", "workload.output_tokens=2")
DOCUMENTS = ("repeats=2", "trials=1", "document_tokens=40", "question_tokens=8")


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """The summary of a small pic_bench."""
    keys = [f"workload.repeated_documents.{key}" for key in DOCUMENTS]
    study = compose("pic_bench", [*SMALL, *keys, "only=[none,radix,pic,cache_blend_15]"])
    folder = run_study(study, "pic_bench", tmp_path_factory.mktemp("pic_bench"), show=False)
    return json.loads((folder / "summary.json").read_bytes())


def entries(summary, **labels):
    all_entries = summary["prefill"]["entries"]
    return [entry for entry in all_entries if all(entry[name] == value for name, value in labels.items())]


def test_cold_requests_reuse_nothing(documents):
    cold = entries(documents, kind="cold")
    assert {entry["arm"] for entry in cold} == {"none", "radix", "pic", "cache_blend_15"}
    assert all(entry["token_hit_rate"] == 0 for entry in cold)


def test_shuffled_documents_are_reused_by_position_independent_caches_only(documents):
    by_arm = {entry["arm"]: entry["token_hit_rate"] for entry in entries(documents, kind="warm", order="shuffled")}
    assert by_arm["none"] == 0
    assert by_arm["pic"] > 0.8 > by_arm["radix"]
    same = {entry["arm"]: entry["token_hit_rate"] for entry in entries(documents, kind="warm", order="same")}
    assert same["radix"] == pytest.approx(same["pic"], abs=0.02)


def test_parts_and_bounds_are_reported(documents):
    for entry in entries(documents):
        assert entry["bound_s"] > 0
        assert entry["of_bound"] > 0
        assert min(entry["parts_s"].values()) >= -1e-6
        assert entry["parts_s"]["prefill_s"] > 0
    (repaired,) = entries(documents, kind="warm", order="same", arm="cache_blend_15")
    assert repaired["repaired_tokens"] > 0
    assert repaired["parts_s"]["repair_s"] > 0


def test_every_arm_stands_beside_plain_transformers(documents):
    for kind in ("cold", "warm"):
        times = {(entry["order"], entry["plain_s"]) for entry in entries(documents, kind=kind)}
        assert len(times) == len({order for order, _ in times})  # one time for all arms
        assert all(seconds > 0 for _, seconds in times)


def test_where_plain_transformers_fail_the_arms_are_reported_without(tmp_path, monkeypatch):
    def fail(self, step, deadline_ns):
        raise MemoryError

    monkeypatch.setattr(RealEngine, "warm_up", lambda self, requests: None)
    monkeypatch.setattr(PlainForward, "execute", fail)
    keys = [f"workload.repeated_documents.{key}" for key in DOCUMENTS]
    study = compose("pic_bench", [*SMALL, *keys, "only=[none,pic]"])
    folder = run_study(study, "pic_bench", tmp_path, show=False)
    summary = json.loads((folder / "summary.json").read_bytes())
    assert "no times of plain transformers: plain transformers ran out of memory: no more memory" in summary["caveats"]
    assert {(entry["arm"], entry["plain_s"]) for entry in entries(summary)} == {("none", None), ("pic", None)}


def test_learning_placements_know_the_depths_after_one_family(tmp_path):
    keys = ("prompt_tokens=640", "families=3", "depths=[0.5,0.8]")
    keys = [f"workload.forked_sequence.{key}" for key in keys]
    study = compose("checkpoint_bench", [*SMALL, *keys, "backend=sim", "only=[none,dp_3,boundary]", "seeds=[0]"])
    folder = run_study(study, "checkpoint_bench", tmp_path, show=False)
    all_entries = json.loads((folder / "summary.json").read_bytes())["prefill"]["entries"]
    assert all(entry["plain_s"] is entry["over_plain"] is None for entry in all_entries)  # of a simulation
    reused = {
        (entry["arm"], entry["depth"], entry["visit"]): entry["reused_tokens"]
        for entry in all_entries
        if entry["kind"] == "fork"
    }
    for depth, tokens in (("50 % shared", 320), ("80 % shared", 512)):
        assert reused["dp_3", depth, "visit 1"] == reused["boundary", depth, "visit 1"] == tokens


def test_resumed_prefills_have_the_logits_of_full_ones(tmp_path):
    keys = ("prompt_tokens=256", "families=2", "depths=[0.5,0.75]")
    keys = [f"workload.forked_sequence.{key}" for key in keys]
    arms = ["only=[none,block_64,boundary]", "seeds=[0]", "warmup_fraction=0"]
    study = compose("checkpoint_bench", [*SMALL, *keys, *arms])
    folder = run_study(study, "checkpoint_bench", tmp_path, show=False)
    all_entries = json.loads((folder / "summary.json").read_bytes())["prefill"]["entries"]
    resumed = [entry for entry in all_entries if entry["arm"] != "none" and entry["reused_tokens"]]
    assert len(resumed) >= 6
    assert all(0 <= entry["logit_gap"] < 1e-4 for entry in resumed)
