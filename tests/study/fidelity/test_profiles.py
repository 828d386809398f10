"""Which profile a study may use, and how another's is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from spanlab import build
from spanlab.analyses import fit_profile
from spanlab.build import build_timing
from spanlab.cli import compose
from spanlab.core.step import StepFeatures
from spanlab.provenance import machine
from spanlab.settings import Study
from spanlab.study.run import run_study
from spanlab_sim.timings import TERMS, Profile, read_profile

PROFILE = Profile(
    model="llama-3.2-1b",
    machine=machine(),
    device="cpu",
    threads=2,
    dtype="bfloat16",
    versions={},
    date="2026-01-01",
    commit="abc",
    coefficients=dict.fromkeys(TERMS, 0.0) | {"step": 5e6},
    hull=dict.fromkeys(StepFeatures._fields, (0, 1)),
    left_out={"median": 0.05, "p95": 0.15, "bias": 0.0},
    shapes=1,
    steps=1,
    longest=2048,
)


@pytest.fixture
def alone(monkeypatch, tmp_path: Path) -> Path:
    """A place without published profiles; returns where outputs go."""
    monkeypatch.setattr(build, "PUBLISHED", tmp_path / "published")
    return tmp_path / "outputs"


def study(root: Path, *more: str) -> Study:
    plain = ["model=llama-3.2-1b", "arms=attention", "load.arms=[]", "load.rates_rps=[]"]
    made = compose("smoke", [*plain, "timing=calibrated", f"output.root={root}", *more])
    assert isinstance(made, Study)
    return made


def test_a_profile_that_is_named_is_used(alone: Path):
    path = alone / "mine.json"
    PROFILE.write(path)
    timing = build_timing(study(alone, f"timing.profile={path}"))
    assert timing.step(StepFeatures(num_decodes=1)) == 5_000_000


@pytest.mark.parametrize(
    ("change", "typed", "message"),
    [
        ({"model": "tiny"}, (), "with model tiny; expected model llama-3.2-1b"),
        ({"machine": "9 x Abacus"}, (), f"with machine 9 x Abacus; expected machine {machine()}"),
        ({"dtype": "float32"}, (), "with dtype float32; expected dtype bfloat16"),
        ({"device": "Card 9000"}, ("engine.device=cpu",), "with device cuda; expected device cpu"),
        ({}, ("engine.device=cuda:1",), "with device cpu; expected device cuda"),
        ({}, ("engine.threads=1",), "with threads 2; expected threads 1"),
    ],
)
def test_anothers_profile_is_refused_with_both_names(alone: Path, change, typed, message):
    path = alone / "theirs.json"
    replace(PROFILE, **change).write(path)
    named = study(alone, f"timing.profile={path}", *typed)
    with pytest.raises(ValueError, match=r"^timing.profile=") as refused:
        build_timing(named)
    assert str(refused.value) == f"timing.profile={path}: it was measured {message}"


def test_published_profiles_can_be_read_and_have_their_own_names():
    published = list(build.PUBLISHED.glob("*.json"))
    assert published
    assert [path.name for path in published] == [fit_profile.file_name(read_profile(path)) for path in published]


def test_without_a_name_our_own_comes_before_a_published_one(alone: Path):
    replace(PROFILE, commit="published").write(build.PUBLISHED / "any.json")
    assert build.profile_of(study(alone)).commit == "published"
    replace(PROFILE, model="tiny").write(build.profile_folder(alone) / "another.json")
    assert build.profile_of(study(alone)).commit == "published"
    note = fit_profile.store_profile(replace(PROFILE, commit="own"), alone)
    path = build.profile_folder(alone) / fit_profile.file_name(PROFILE)
    assert note == f"kept for the simulator (timing=calibrated): {path}"
    assert path.parent == alone / "profiles"
    assert path.name.startswith("llama-3.2-1b-")
    assert path.name.endswith("-cpu.json")
    assert build.profile_of(study(alone)).commit == "own"


def noisy(median: float) -> Profile:
    return replace(PROFILE, commit="noisy", date="2026-02-02", left_out=PROFILE.left_out | {"median": median})


def test_noisy_profile_is_not_kept(alone: Path, monkeypatch):
    monkeypatch.setattr(fit_profile, "CROSS_VALIDATION_LIMIT", 0.1)
    head = "noisy machine, profile not kept: median error 18.9% at shapes left out, 10% is the limit; "
    assert fit_profile.store_profile(noisy(0.189), alone) == f"{head}none is stored"
    assert build.local_profile(study(alone)) is None
    fit_profile.store_profile(PROFILE, alone)
    assert fit_profile.store_profile(noisy(0.189), alone) == f"{head}the one of 2026-01-01 stays"
    assert build.profile_of(study(alone)).commit == "abc"
    assert fit_profile.store_profile(noisy(float("nan")), alone).startswith("noisy machine, profile not kept")
    assert fit_profile.store_profile(noisy(0.1), alone).startswith("kept for the simulator")


def test_a_missing_profile_names_the_calibrate_command(alone: Path):
    with pytest.raises(ValueError, match=r"^timing.profile is not set, and no profile of llama-3.2-1b on ") as refused:
        build_timing(study(alone))
    assert "bash runall.sh -cn calibrate model=llama-3.2-1b" in str(refused.value)


def test_a_profile_goes_with_calibrated_timing_alone(alone: Path):
    with pytest.raises(Exception, match=r"timing\.profile=x\.json.*: expected timing.profile=null"):
        compose("smoke", ["timing.profile=x.json"])


def test_a_study_reports_extrapolation_once(alone: Path):
    toy = (
        "workload.documents=1",
        "workload.questions_per_document=2",
        "only=[none]",
        "seeds=[0]",
        "tracking.kind=none",
    )
    fit_profile.store_profile(PROFILE, alone)
    folder = run_study(study(alone, *toy, "output.figures=false", "workers=1"), "smoke", alone)
    caveats = json.loads((folder / "summary.json").read_bytes())["caveats"]
    (caveat,) = [text for text in caveats if text.startswith("timing beyond")]
    assert caveat.startswith("timing beyond what its profile was measured on: ")
    assert "prefill_tokens in 2 steps" in caveat
