"""The entry from end to end, very small: what it leaves, and that the simulator reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from spanlab.calibrate.run import calibrate, run_calibrate

from spanlab import build
from spanlab.core.step_features import StepFeatures
from spanlab.main import compose
from spanlab.settings import Calibrate, DesignSettings
from spanlab.study.provenance import machine
from spanlab_sim.calibrated import TERMS, read_profile

SMALL = ("design.shapes=4", "design.repeats=2", "design.longest=64", "design.outputs=3", "engine.threads=1")


def settings(root: Path, *more: str) -> Calibrate:
    made = compose("calibrate", [*SMALL, "tracking=none", f"output.root={root}", *more])
    assert isinstance(made, Calibrate)
    return made


def test_a_run_leaves_a_profile_that_the_simulator_finds(tmp_path: Path, capsys):
    folder = run_calibrate(settings(tmp_path, "only=[radix,cache_blend_15]"), "calibrate", tmp_path)
    profile = read_profile(folder / "profile.json")
    assert (profile.model, profile.machine, profile.device) == ("tiny", machine(), "cpu")
    assert (profile.dtype, profile.threads, profile.shapes, profile.longest) == ("float32", 1, 4, 64)
    assert set(profile.left_out) == {"median", "p95", "bias"}
    assert profile.coefficients["step"] >= 0
    rows = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    assert len(rows) == profile.steps
    assert all(len(row["cycles_ns"]) == 2 for row in rows)
    assert {row["arm"] for row in rows} == {"radix", "cache_blend_15"}
    for name in StepFeatures._fields:
        assert profile.hull[name] == (min(row[name] for row in rows), max(row[name] for row in rows))
    assert sorted(path.name for path in (folder / "figures").iterdir()) == [
        "predicted.pdf",
        "predicted.png",
        "residuals.pdf",
        "residuals.png",
    ]
    assert "shapes left out of the fit: median error" in capsys.readouterr().out
    typed = ["timing=calibrated", "backend=sim", f"output.root={tmp_path}", "engine.threads=1"]
    timing = build.build_timing(compose("pic_clean", typed))
    assert timing.step(StepFeatures(*(low for low, _ in profile.hull.values()))) > 0
    assert timing.outside == 0


def test_a_hybrid_pays_for_its_states(tmp_path: Path):
    made = settings(tmp_path, "model=tiny-hybrid", "arms=clean", "only=[block_512,boundary]", "design.longest=640")
    profile = calibrate(made, build.build_model(made), DesignSettings(shapes=4, repeats=1, longest=640))
    assert profile.hull["captured_state_bytes"][1] >= made.model.state_bytes
    assert profile.hull["loaded_state_bytes"][1] >= made.model.state_bytes
    assert profile.hull["scan_chunks"][1] > 1
    assert set(profile.coefficients) == set(TERMS)


def test_an_arm_that_makes_no_sense_for_the_model_is_refused():
    with pytest.raises(Exception, match=r"^arms\.block_hash_align\.placement\.kind=last with model\.name=tiny: it has"):
        compose("calibrate", ["arms=clean"])


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("design.shapes=1", "design.shapes=1: expected 2 or more"),
        ("design.longest=8", "design.longest=8: expected 16 tokens or more"),
        ("only=[nobody]", "only=nobody: expected one of"),
    ],
)
def test_a_design_that_cannot_be_is_refused(typed, words):
    with pytest.raises(Exception, match=words):
        compose("calibrate", [typed])
