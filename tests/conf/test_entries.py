"""Every entry composes, builds its objects and runs at toy size."""

import json
from pathlib import Path

import numpy as np
import pytest

from spanlab.build import build_policy, build_timing
from spanlab.cli import compose, entries
from spanlab.settings import Study
from spanlab.study.jobs import run_cells
from spanlab.study.sweep import parse_axes
from spanlab.workloads.make_shape import MakeShape

OF_MODELS = ("conformance",)  # run small by tests/study/test_conformance.py
OF_CARDS = ("first_light",)  # run small by tests/study/test_first_light.py
OF_DRIVERS = ("conformance_cases",)  # run by tests/study/test_conformance_cases.py
NO_STUDIES = ("make_shape", "schedule", "compare", "export", "watch", *OF_MODELS, *OF_CARDS, *OF_DRIVERS)
STUDIES = [entry for entry in entries() if entry not in NO_STUDIES]
LIVE = ("rendezvous",)  # starts a real server: tests/replay/test_live.py
OF_STUDY = ("quality_fidelity", "pic_fidelity", "calibrate", "pic_decay", "pic_decay_answers")  # small in tests/study
SWEEPS = (
    *("break_even_sim", "families_sim", "replicas_sim", "eviction_sim"),
    *("quality_sweep", "pic_sweep", "rag_sweep", "tiers_sim"),
    *("hybrid_policies_sim", "state_ratio_sim", "drafts_sim", "chat_sim", "batch_sim", "mixed_sim"),
)
FEW_FACTS = "{collections: 3, passages: 2, sentences: 2, remarks: 0, hops: [1]}"


@pytest.fixture
def own(toy_parquet: Path) -> dict[str, tuple[str, ...]]:
    """Settings that an entry needs beyond the toy's, to run or to stay small."""
    short = ("workload.output_tokens=2", "engine.threads=1")
    quick = ("arrivals.rate_rps=100", *short)
    made = ("workload.documents=null", "workload.questions_per_document=null", "sweep=[]", "only=[none,radix]")
    few = ("trials=1", "repeats=2", "document_tokens=20")
    documents = tuple(f"workload.repeated_documents.{key}" for key in few)
    forks = (f"workload.forked_sequence.{key}" for key in ("prompt_tokens=256", "families=2", "visits=1"))
    questions = (f"workload.alias_questions.{key}" for key in ("questions=3", "words=16", "orders=[same]"))
    prefixes = (*made, *documents)
    talks = tuple(f"workload.chat_sessions.{key}" for key in ("sessions=6", "turns=1"))
    return {
        "sessions_sim": (*made, *talks),
        "replicas_sim": (*made, *talks),
        "drafts_sim": (*made[:-2], *talks, "sweep=['batch.speculation.draft_tokens=0,2']"),
        "sparse_prefix_replica": (f"workload.path={toy_parquet}",),
        "narrativeqa_sim": ("workload.max_prompt_tokens=4096",),
        "pic_bench": (*made, *documents, *short),
        "rag_prefix_sim": prefixes,
        "chat_sim": prefixes,
        "batch_sim": prefixes,
        "mixed_sim": ("only=[none,radix,exact_hash]",),
        "hybrid_policies_sim": ("only=[none,vllm_0_32,boundary]",),
        "state_ratio_sim": ("only=[branch_last,boundary]", "baseline=boundary"),
        "interval_sim": ("workload.synthetic.prompt_tokens=4096",),
        "checkpoint_bench": (*made[:-1], "only=[none,boundary]", *forks, *short),
        "pic_agreement": (*made, *questions, *short),
        "pic_answers": (
            *made[:-1],
            "only=[none,pic]",
            "model=tiny",
            "engine={weights: random, threads: 1}",
            "methods={without_context: null, gold_only: null}",
            f"workload.questions={{requests: 6, k: 2, facts: {FEW_FACTS}}}",
        ),
        "pic_sim": ("workload.rag.requests=null",),
        "break_even_sim": ("workload.rag.requests=null",),
        "quality_clean": ("only=[none,boundary]", "workload.max_prompt_tokens=128", *quick),
        "system_prompts_clean": ("backend=sim",),
        "narrativeqa_clean": ("backend=sim",),
        "families_clean": ("only=[none,pic_exact]", "workload.max_prompt_tokens=384", *short),
        "pic_clean": ("workload.rag.requests=null", "workload.rag.passage_tokens=64", "only=[none,pic]", *quick),
        "explain": ("workload.documents=6", "workload.questions_per_document=1"),
        "upgrade": ("workload.documents=6", "workload.questions_per_document=1"),
        "replay": ("backend=sim",),
        "plan": ("workload.documents=6", "workload.questions_per_document=1"),
        "twin": ("workload.documents=6", "workload.questions_per_document=1"),
        "rag_sim": ("workload.documents=null", "workload.questions_per_document=null", "workload.ragpulse.requests=6"),
    }


@pytest.mark.parametrize("entry", STUDIES)
def test_a_study_composes_and_builds_as_it_is(entry: str, toy_parquet: Path):
    """Its figures have the arms that they need: a baseline, and something to run for each arm."""
    asked = {
        "sparse_prefix_replica": [f"workload.path={toy_parquet}"],
        "plan": ["slo.ttft_p95_s=0.5"],
        "replay": ["base_url=http://server"],
    }
    study = compose(entry, asked.get(entry, []))
    assert isinstance(study, Study)
    assert study.runs.baseline in study.arms
    for strategy in study.arms.values():
        build_policy(study, strategy, 0, 1000)
    if study.timing.kind != "calibrated":  # which needs a profile of this machine
        build_timing(study)
    assert [cell.seed for arm in study.chosen() for cell in run_cells(study, arm)]


@pytest.mark.parametrize("entry", [entry for entry in STUDIES if entry not in OF_STUDY + SWEEPS + LIVE])
def test_a_study_runs_at_toy_size(entry: str, spanlab, toy, own, tmp_path: Path):
    here = ("executor.kind=here", f"output.root={tmp_path}", "output.run=toy")  # no process that would load torch again
    done = spanlab("-cn", entry, *toy, *own.get(entry, ()), *here)
    assert done.code == 0, done.err
    (folder,) = tmp_path.glob("*/toy")
    summary = json.loads((folder / "summary.json").read_bytes())
    warmup = int(6 * summary["warmup_fraction"])
    assert {arm["requests"] for arm in summary["arms"].values()} == {6 - warmup}
    assert [path.name for path in folder.parent.iterdir() if path.suffix != ".lock"] == ["toy"]
    assert len(summary["arms"]) == len(list(folder.glob("runs/*.jsonl")))
    for arm in summary["arms"]:
        assert len((folder / "records" / f"{arm}.jsonl").read_bytes().splitlines()) == 6
        assert arm in done.out


@pytest.mark.parametrize("entry", SWEEPS)
def test_a_sweep_runs_at_toy_size(entry: str, spanlab, toy, own, tmp_path: Path):
    small = own.get(entry.replace("_sweep", "_sim"), ())
    axes = 'sweep=["store.total_gib=4,8"]'
    done = spanlab("-cn", entry, *toy, *small, axes, "store.total_gib=16", f"output.root={tmp_path}", "output.run=toy")
    assert done.code == 0, done.err
    (folder,) = tmp_path.glob("*/toy")
    runs = sorted(path.name for path in folder.parent.iterdir() if path.is_dir())
    assert runs == ["toy", "toy__store.total_gib=4", "toy__store.total_gib=8"]
    assert "memory budget (GiB)" in done.out


@pytest.mark.parametrize("ends", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["last", "every"])
@pytest.mark.parametrize("entry", SWEEPS)
def test_every_value_of_a_sweep_composes(entry: str, ends: bool):
    for axis in parse_axes(compose(entry, []).runs.sweep):
        tried: set[str] = set()
        points = list(axis.combinations())
        for values in points[-1:] if ends else points:
            point = [f"{key}={value}" for key, value in zip(axis.keys, values, strict=True)]
            if not tried.issuperset(point):
                assert compose(entry, [*point, "sweep=[]"]).chosen()
            tried |= set(point)


def test_the_replica_needs_a_path(spanlab, one_sentence):
    one_sentence(spanlab("-cn", "sparse_prefix_replica"), "workload.", "workload.path", "expected")


def test_the_replicas_table_is_explained_by_its_own_baseline_and_hit(spanlab, toy, own, tmp_path: Path):
    few = ("only=[no_cache,log]", f"output.root={tmp_path}")
    said = " ".join(spanlab("-cn", "sparse_prefix_replica", *toy, *own["sparse_prefix_replica"], *few).out.split())
    assert "speedup = mean TTFT of no_cache ÷ mean TTFT of the arm" in said
    assert "requests with at least one matched token ÷ requests" in said


def test_make_shape_makes_a_shape_without_text_that_a_study_could_load(spanlab, toy_quality, tmp_path: Path):
    from spanlab.workloads.shape import load

    given = (f"path={toy_quality['path']}", f"tokenizer={toy_quality['tokenizer']}", f"out={tmp_path}")
    assert isinstance(compose("make_shape", ["kind=quality", *given]), MakeShape)
    done = spanlab("-cn", "make_shape", "kind=quality", *given)
    assert done.code == 0, done.err
    assert done.out.strip() == str(tmp_path / "quality.npz")
    corpus = load(tmp_path / "quality.npz").corpus()
    assert len(corpus.rows) == 4
    with np.load(tmp_path / "quality.npz") as made:
        words = b"".join(made[name].tobytes() for name in made.files)
    assert b"alpha" not in words
    assert b"beta" not in words


def test_shapes_of_text_need_a_tokenizer_and_traces_none(spanlab, one_sentence):
    done = spanlab("-cn", "make_shape", "kind=quality", "path=x.jsonl", "out=y")
    one_sentence(done, "tokenizer is not set with kind=quality: expected a tokenizer.json, or its folder")
    assert compose("make_shape", ["kind=ragpulse", "path=x", "out=y"]).tokenizer is None
