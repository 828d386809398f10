"""Calibration as a very small study: its files, which the simulator reads."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from spanlab.analyses.fit_profile import points_of
from spanlab.build import build_timing
from spanlab.cli import compose
from spanlab.core.step import StepFeatures
from spanlab.provenance import machine
from spanlab.settings import Study
from spanlab.study.backends import RealEngine
from spanlab.study.run import run_study
from spanlab_sim.timings import TERMS, read_profile

SMALL = ("design.shapes=4", "design.repeats=2", "design.longest=64", "design.outputs=3", "engine.threads=1")


def settings(root: Path, *more: str) -> Study:
    study = compose("calibrate", [*SMALL, "tracking.kind=none", f"output.root={root}", *more])
    assert isinstance(study, Study)
    return study


def test_a_run_leaves_a_profile_that_the_simulator_finds(tmp_path: Path, capsys):
    folder = run_study(settings(tmp_path, "only=[radix,cache_blend_15]"), "calibrate", tmp_path)
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
    names = {path.name for path in (folder / "figures").iterdir()}
    assert names == {"predicted.pdf", "predicted.png", "residuals.pdf", "residuals.png"}
    summary = json.loads((folder / "summary.json").read_bytes())
    assert summary["fit_profile"]["profile"]["steps"] == profile.steps
    assert summary["fit_profile"]["kept"].startswith("kept for the simulator (timing=calibrated): ")
    assert "arms" not in summary
    assert "shapes left out of the fit: median error" in capsys.readouterr().out
    typed = ["timing=calibrated", "backend=sim", f"output.root={tmp_path}", "engine.threads=1"]
    timing = build_timing(compose("pic_clean", typed))
    assert timing.step(StepFeatures(*(low for low, _ in profile.hull.values()))) > 0
    assert timing.outside == 0


def test_a_hybrid_pays_for_its_states(tmp_path: Path):
    overrides = (
        "model=tiny-hybrid",
        "arms=clean",
        "only=[block_512,boundary]",
        "design.longest=640",
        "design.repeats=1",
    )
    study = settings(tmp_path, *overrides, "output.figures=false")
    profile = read_profile(run_study(study, "calibrate", tmp_path) / "profile.json")
    assert profile.hull["captured_state_bytes"][1] >= study.model.state_bytes
    assert profile.hull["loaded_state_bytes"][1] >= study.model.state_bytes
    assert profile.hull["scan_chunks"][1] > 1
    assert set(profile.coefficients) == set(TERMS)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Arms that run out of memory."""
    arms: set[str] = set()
    real = RealEngine.run

    def run(self, job, write):
        if job.steps.name.partition("-")[0] in arms:
            raise MemoryError("out of memory")
        return real(self, job, write)

    monkeypatch.setattr(RealEngine, "run", run)
    return arms


def test_shapes_that_were_measured_are_not_measured_again(tmp_path: Path, failing):
    overrides = ("only=[none,radix]", "output.figures=false", "output.run=cut")
    failing.add("radix")
    with pytest.raises(ValueError, match=r"1 of 2 arms failed.*arms\.radix ran out of memory"):
        run_study(settings(tmp_path, *overrides), "calibrate", tmp_path)
    folder = tmp_path / "designed_shapes" / "cut"
    note = json.loads((folder / "summary.json").read_bytes())["fit_profile"]["kept"]
    assert note == "profile not kept, for it lacks arms: radix"
    logs = {path.name: path.read_bytes() for path in (folder / "steps").glob("none-*.jsonl")}
    failing.clear()
    run_study(settings(tmp_path, *overrides, "output.if_exists=resume"), "calibrate", tmp_path)
    assert {name: (folder / "steps" / name).read_bytes() for name in logs} == logs
    points = points_of(settings(tmp_path, *overrides), _files(folder))
    assert sorted({point.step_id.shape for point in points}) == [0, 1, 2, 3]


def _files(folder: Path):
    from spanlab.study.numbers import ArmFiles

    return {arm: ArmFiles.of_arm(folder, arm) for arm in ("none", "radix")}


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("arms=clean", r"^arms\.block_hash_align\.placement\.kind=last with model\.name=tiny: it has"),
        ("design.shapes=1", "design.shapes=1: expected 2 or more"),
        ("design.longest=8", "design.longest=8: expected 16 tokens or more"),
        ("design.longest=null", "design.longest=null with workload.kind=designed_shapes: expected a number of tokens"),
        ("only=[nobody]", "only=nobody: expected one of"),
        ("backend=sim", "backend=sim: expected backend=engine"),
        ("engine.clock=wall", "engine.clock=wall with workload.kind=designed_shapes: expected virtual"),
        ("repeats=2", "repeats=2 with workload.kind=designed_shapes: expected 1"),
        ("analyses=[summary]", "analyses=summary with workload.kind=designed_shapes: expected fit_profile"),
    ],
)
def test_a_design_that_cannot_be_is_refused(typed, message):
    with pytest.raises(Exception, match=message):
        compose("calibrate", [typed])
