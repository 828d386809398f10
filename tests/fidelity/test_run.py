"""The entries at their smallest, under a made-up profile: what they leave, what they refuse, what they resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from spanlab.calibrate.fit import fit
from spanlab.calibrate.points import merged
from spanlab.calibrate.points import read_points as points_of
from spanlab.fidelity import measure, rounds, run

from spanlab.core.step_features import StepFeatures
from spanlab.main import compose
from spanlab.study.provenance import machine
from spanlab_sim.calibrated import TERMS, Profile, read_profile

FEW = (
    "fidelity=quick",
    "fidelity.repeats=2",
    "workload.rag.requests=null",
    "workload.output_tokens=3",
    "workload.rag.k=2",
    "only=[none,radix,pic]",
    "engine.threads=1",
    "tracking=none",
)
PRICES = dict.fromkeys(TERMS, 0.0) | {"step": 1e6, "prefill_token": 1e5}
ROOMY = dict.fromkeys(StepFeatures._fields, (0, 1 << 40))


def profile(path: Path, **others) -> Path:
    """A profile of `tiny` on this machine that was never measured."""
    told = {"model": "tiny", "machine": machine(), "device": "cpu", "threads": 1, "dtype": "float32", "versions": {}}
    told |= {"date": "2026-01-01", "commit": "none", "coefficients": PRICES, "hull": ROOMY, "left_out": {}}
    Profile(**told | {"shapes": 2, "steps": 2, "longest": 1 << 40} | others).write(path)
    return path


def settings(root: Path, *overrides: str):
    named = profile(root / "made_up.json")
    return compose("pic_fidelity", [*FEW, f"timing.profile={named}", f"output.root={root}", *overrides])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A whole run of three arms at one load, twice."""
    root = tmp_path_factory.mktemp("outputs")
    return run.run_fidelity(settings(root, "output.run=whole"), "pic_fidelity", root)


def test_a_run_leaves_cells_logs_a_profile_and_figures(folder: Path):
    cells = {f"{arm}-load0.6-repeat{repeat}.jsonl" for arm in ("none", "radix", "pic") for repeat in (0, 1)}
    assert {path.name for path in (folder / "records" / "engine").iterdir()} == cells
    assert {path.name for path in (folder / "steps").iterdir()} == {*cells, "saturation.jsonl"}
    simulated = {path.name for path in (folder / "records" / "simulated").iterdir()}
    assert simulated == {f"{arm}-load0.6.jsonl" for arm in ("none", "radix", "pic")}
    drawn = {path.name for path in (folder / "figures").iterdir()}
    assert drawn == {f"{n}.{k}" for n in ("predicted_measured", "error_by_load", "ranking") for k in ("png", "pdf")}
    assert (folder / "profile.json").exists()


def test_every_step_is_composed_alike_and_every_request_compared(folder: Path):
    summary = json.loads((folder / "summary.json").read_bytes())
    told = summary["simulated"]
    assert [cell["arm"] for cell in told["cells"]] == ["none", "radix", "pic"]
    for cell in told["cells"]:
        assert cell["parity"]["equal"] == cell["parity"]["steps"] > 0
        assert cell["parity"]["difference"] is None
        assert (cell["requests"], cell["repeats"], cell["steps_outside_hull"]) == (6, 2, 0)
        for metric in ("ttft_s", "tpot_s", "e2e_s"):
            assert cell["errors"][metric]["spread"]["request_p95"] >= 0
    assert summary["rates_rps"]["0.6"] == pytest.approx(0.6 * summary["saturation"]["rate_rps"])
    assert [one["load"] for one in told["decisions"]] == [0.6]
    assert all(goal["cells"] == 3 for goal in told["goals"][:-1])


def test_engine_and_simulator_see_the_same_arrivals(folder: Path):
    def arrivals(path: Path) -> dict[int, float]:
        lines = map(json.loads, path.read_text().splitlines())
        return {line["request_id"]: line["arrived_s"] for line in lines}

    asked = {name: arrivals(path) for name, path in ((path.stem, path) for path in folder.glob("records/*/*.jsonl"))}
    assert len(asked) == 9
    assert all(one == asked["none-load0.6"] for one in asked.values())


def test_an_interrupted_run_goes_on_after_its_last_finished_cell(tmp_path: Path, monkeypatch):
    ran: list[str] = []
    real = measure.Bench.measure

    def counted(self, cell, trace, progress):
        if not self._files.records(cell).exists():
            if len(ran) == 1:
                ran.append("interrupted")
                raise KeyboardInterrupt
            ran.append(cell.name)
        return real(self, cell, trace, progress)

    monkeypatch.setattr(measure.Bench, "measure", counted)
    small = ("only=[none,radix]", "fidelity.repeats=1", "output.figures=false", "output.run=cut")
    with pytest.raises(KeyboardInterrupt):
        run.run_fidelity(settings(tmp_path, *small), "pic_fidelity", tmp_path)
    first = (tmp_path / "rag" / ".cut.partial" / "saturation.json").read_bytes()
    done = run.run_fidelity(settings(tmp_path, *small, "output.if_exists=resume"), "pic_fidelity", tmp_path)
    assert (done / "saturation.json").read_bytes() == first
    assert len(ran) == 3 and len(set(ran)) == 3


def test_without_a_profile_every_shape_is_measured_before_each_repeat_and_after_the_last(tmp_path: Path, monkeypatch):
    order: list[str] = []
    shapes, cell = rounds.measure, measure.Bench.measure
    monkeypatch.setattr(rounds, "measure", lambda *told: (order.append("shapes"), shapes(*told))[1])
    monkeypatch.setattr(measure.Bench, "measure", lambda *told: (order.append("cell"), cell(*told))[1])
    few = ("timing.profile=null", "fidelity.shapes=2", "only=[none]", "output.figures=false", "output.run=own")
    done = run.run_fidelity(settings(tmp_path, *few), "pic_fidelity", tmp_path)
    assert order == ["shapes", "cell", "shapes", "cell", "shapes"]
    points = [points_of(done / "calibration" / f"round{number}.jsonl") for number in range(3)]
    told = read_profile(done / "profile.json")
    assert (told.shapes, told.steps) == (2, len(points[0]))
    joined = merged(points)
    assert told.coefficients == fit(joined)
    assert [point.cycles_ns for point in joined] == [
        sum((each[at].cycles_ns for each in points), ()) for at in range(len(joined))
    ]


def test_an_interrupted_run_does_not_measure_its_shapes_again(tmp_path: Path, monkeypatch):
    def interrupted(*told):
        raise KeyboardInterrupt

    few = ("timing.profile=null", "fidelity.shapes=2", "fidelity.repeats=1", "only=[none]", "output.run=cut")
    with monkeypatch.context() as patched:
        patched.setattr(measure.Bench, "measure", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.run_fidelity(settings(tmp_path, *few, "output.figures=false"), "pic_fidelity", tmp_path)
    first = (tmp_path / "rag" / ".cut.partial" / "calibration" / "round0.jsonl").read_bytes()
    again = settings(tmp_path, *few, "output.figures=false", "output.if_exists=resume")
    done = run.run_fidelity(again, "pic_fidelity", tmp_path)
    assert (done / "calibration" / "round0.jsonl").read_bytes() == first


def test_an_arm_without_memory_is_named_and_the_others_are_compared(tmp_path: Path, monkeypatch):
    real = run.RealEngine.run

    def short(self, job, write):
        if job.steps.name.startswith("radix-"):
            raise MemoryError("out of memory")
        return real(self, job, write)

    monkeypatch.setattr(run.RealEngine, "run", short)
    small = ("only=[none,radix]", "fidelity.repeats=1", "output.figures=false", "output.run=short")
    with pytest.raises(ValueError, match=r"1 of 2 arms failed.*arms\.radix ran out of memory"):
        run.run_fidelity(settings(tmp_path, *small), "pic_fidelity", tmp_path)
    summary = json.loads((tmp_path / "rag" / "short" / "summary.json").read_bytes())
    assert list(summary["failed"]) == ["radix"]
    assert [cell["arm"] for cell in summary["simulated"]["cells"]] == ["none"]


def test_a_profile_of_another_model_is_refused_with_both_names(tmp_path: Path):
    study = settings(tmp_path, "output.run=other")
    profile(Path(study.timing.profile), model="llama-3.1-8b")
    with pytest.raises(ValueError, match=r"llama-3\.1-8b; expected model tiny$"):
        run.run_fidelity(study, "pic_fidelity", tmp_path)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("backend=sim", r"fidelity\.shares=.* with backend=sim: expected backend=engine"),
        ("arrivals.rate_rps=5", r"arrivals\.rate_rps=5\.0 with fidelity\.shares: expected 1"),
        ("seeds=[0,1]", r"seeds=\[0, 1\] with fidelity\.shares: expected one seed"),
        ("only=[pic]", r"baseline=none with fidelity\.shares: expected one of the arms"),
        ("fidelity.shares=[0.5,0.5]", r"fidelity\.shares=\[0\.5, 0\.5\]: expected different"),
        ("fidelity.shares=[0]", r"fidelity\.shares=0.*: expected a number above zero"),
        ("fidelity.repeats=0", r"fidelity\.repeats=0: expected a number above zero"),
        ("fidelity.shapes=1", r"fidelity\.shapes=1: expected 2 or more"),
        ("fidelity.shares=[]", r"fidelity\.repeats=2.* without fidelity\.shares"),
        ("fidelity.compare=true", r"fidelity\.compare=True with fidelity\.shares"),
        ("arrivals=as_given", r"arrivals\.kind=as_given and workload\.kind=rag .*expected arrivals that can be paced"),
    ],
)
def test_what_makes_no_sense_is_refused(override: str, words: str):
    more = ["arrivals.rate_rps=null"] if override == "arrivals=as_given" else []
    with pytest.raises(Exception, match=words):
        compose("pic_fidelity", [*FEW, override, *more])
