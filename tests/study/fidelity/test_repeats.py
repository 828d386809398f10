"""Fidelity studies at their smallest: loads by saturation, repeats, calibration in turns, resume."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")

from spanlab.analyses.fit_profile import fit, points_of
from spanlab.cli import compose
from spanlab.core.request import Request, Span
from spanlab.core.step import StepFeatures
from spanlab.provenance import machine
from spanlab.study.backends import RealEngine
from spanlab.study.numbers import ArmFiles
from spanlab.study.run import interleaved_calibration, run_study
from spanlab_sim.timings import TERMS, Profile, read_profile

FEW = (
    "fidelity=quick",
    "workload.rag.requests=null",
    "workload.output_tokens=3",
    "workload.rag.k=2",
    "workload.rag.passage_tokens=64",
    "only=[none,radix,pic]",
    "engine.threads=1",
    "tracking.kind=none",
)
OWN = ("timing.profile=null", "design.shapes=2", "only=[none]", "output.figures=false")
PRICES = dict.fromkeys(TERMS, 0.0) | {"step": 1e6, "prefill_token": 1e5}
ROOMY = dict.fromkeys(StepFeatures._fields, (0, 1 << 40))


def profile(path: Path, **others) -> Path:
    """A profile of `tiny` on this machine that was never measured."""
    fields = {"model": "tiny", "machine": machine(), "device": "cpu", "threads": 1, "dtype": "float32", "versions": {}}
    fields |= {"date": "2026-01-01", "commit": "none", "coefficients": PRICES, "hull": ROOMY, "left_out": {}}
    Profile(**fields | {"shapes": 2, "steps": 2, "longest": 1 << 40} | others).write(path)
    return path


def settings(root: Path, *overrides: str):
    named = profile(root / "made_up.json")
    return compose("pic_fidelity", [*FEW, f"timing.profile={named}", f"output.root={root}", *overrides])


def run(root: Path, *overrides: str) -> Path:
    return run_study(settings(root, *overrides), "pic_fidelity", root)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A whole run of three arms at two loads, twice."""
    return run(tmp_path_factory.mktemp("outputs"), "load.shares=[0.3,0.6]", "output.run=whole")


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Ends studies with an error after so many runs of the engine."""
    real = RealEngine.run

    def stop(after: int) -> None:
        ran = []

        def limited(self, job, write):
            if len(ran) == after:
                raise ZeroDivisionError
            ran.append(job)
            return real(self, job, write)

        monkeypatch.setattr(RealEngine, "run", limited)

    return stop


def test_records_hold_every_load_and_repeat(folder: Path):
    rate = json.loads((folder / "summary.json").read_bytes())["saturation"]["rate_rps"]
    for arm in ("none", "radix", "pic"):
        lines = [json.loads(line) for line in (folder / "runs" / f"{arm}.jsonl").read_text().splitlines()]
        cells = [(line["rate_rps"], line.get("repeat", 0)) for line in lines]
        assert cells == [(share * rate, repeat) for repeat in (0, 1) for share in (0.3, 0.6)]
        assert {line["requests"] for line in lines} == {6}
    assert len(list((folder / "steps").iterdir())) == len(list((folder / "simulated").iterdir())) * 2 == 12
    drawn = {path.name for path in (folder / "figures").iterdir()}
    assert drawn == {f"{n}.{k}" for n in ("predicted_measured", "error_by_load", "ranking") for k in ("png", "pdf")}


def test_every_step_is_composed_alike_and_every_request_compared(folder: Path):
    summary = json.loads((folder / "summary.json").read_bytes())
    fidelity = summary["fidelity"]
    arms = ["none", "radix", "pic"]
    assert [(cell["load"], cell["arm"]) for cell in fidelity["cells"]] == [
        (load, arm) for load in (0.3, 0.6) for arm in arms
    ]
    for cell in fidelity["cells"]:
        assert cell["parity"]["equal"] == cell["parity"]["steps"] > 0
        assert cell["parity"]["difference"] is None
        assert (cell["requests"], cell["repeats"], cell["steps_outside_hull"]) == (6, 2, 0)
        for metric in ("ttft_s", "tpot_s", "e2e_s"):
            assert cell["errors"][metric]["spread"]["request_p95"] >= 0
    rates = [share * summary["saturation"]["rate_rps"] for share in (0.3, 0.6)]
    assert [rate["rate_rps"] for rate in fidelity["rates"]] == pytest.approx(rates)
    assert all(goal["cells"] == 6 for goal in fidelity["goals"][:-1])
    assert len(summary["machine_noise"]["aa_ratios"]) == 2, "one for each load"


def test_engine_and_simulator_see_the_same_arrivals(folder: Path):
    arrivals: dict[float, set[tuple]] = {}
    for path in (*folder.glob("records/*.jsonl"), *folder.glob("simulated/*.jsonl")):
        for line in map(json.loads, path.read_text().splitlines()):
            arrivals.setdefault(line["rate_rps"], set()).add((line["request_id"], line["arrived_s"]))
    assert [len(times) for times in arrivals.values()] == [6, 6], "each request arrives at one time"


def test_an_interrupted_run_goes_on_after_its_last_finished_cell(tmp_path: Path, stopped):
    small = ("only=[none,radix]", "repeats=1", "output.figures=false", "output.run=cut")
    stopped(1)  # of each process: saturation has another one
    with pytest.raises(ZeroDivisionError):
        run(tmp_path, *small)
    work = tmp_path / "rag" / ".cut.partial"
    before = {path.relative_to(work): path.read_bytes() for path in work.glob("**/*.jsonl") if path.stat().st_size}
    assert Path("saturation/runs.jsonl") in before
    stopped(1)  # the other arm
    resumed = run(tmp_path, *small, "output.if_exists=resume")
    contents = {path: (resumed / path).read_bytes() for path in before}
    assert all(now.startswith(before[path]) for path, now in contents.items())
    assert contents[Path("saturation/runs.jsonl")] == before[Path("saturation/runs.jsonl")]


def test_without_a_profile_shapes_take_turns_with_the_repeats(tmp_path: Path):
    folder = run(tmp_path, *OWN, "output.run=own")
    measured = read_profile(folder / "profile.json")
    study = interleaved_calibration(settings(tmp_path, *OWN), (Request(0, 0, (Span(list(range(20))),)),))
    assert study.analyses.compare_backends.repeats == 3
    folder = folder / "calibration"
    files = ArmFiles.of_arm(folder, "none")
    assert [row.get("repeat", 0) for row in files.finished()] == [0, 0, 1, 1, 2, 2]
    points = points_of(study, {"none": files})
    assert (measured.shapes, measured.steps) == (2, len(points))
    assert measured.coefficients == fit(points)
    assert all(len(point.cycles_ns) == 3 for point in points)


def test_an_interrupted_run_does_not_measure_its_shapes_again(tmp_path: Path, stopped):
    small = (*OWN, "repeats=1", "output.run=cut")
    stopped(3)  # two shapes and the arm
    with pytest.raises(ZeroDivisionError):
        run(tmp_path, *small)
    path = Path("calibration/records/none.jsonl")
    first = (tmp_path / "rag" / ".cut.partial" / path).read_bytes()
    stopped(2)  # the shapes after the last repeat
    resumed = run(tmp_path, *small, "output.if_exists=resume")
    assert first
    assert (resumed / path).read_bytes().startswith(first)


def test_an_arm_without_memory_is_named_and_the_others_are_compared(tmp_path: Path, monkeypatch):
    real = RealEngine.run

    def short(self, job, write):
        if job.steps.name.startswith("radix-"):
            raise MemoryError("out of memory")
        return real(self, job, write)

    monkeypatch.setattr(RealEngine, "run", short)
    with pytest.raises(ValueError, match=r"1 of 2 arms failed.*arms\.radix ran out of memory"):
        run(tmp_path, "only=[none,radix]", "repeats=1", "output.figures=false", "output.run=short")
    summary = json.loads((tmp_path / "rag" / "short" / "summary.json").read_bytes())
    assert list(summary["failed"]) == ["radix"]
    assert [cell["arm"] for cell in summary["fidelity"]["cells"]] == ["none"]


def test_a_profile_of_another_model_is_refused_with_both_names(tmp_path: Path):
    study = settings(tmp_path, "output.run=other")
    profile(Path(study.timing.profile), model="llama-3.1-8b")
    with pytest.raises(ValueError, match=r"llama-3\.1-8b; expected model tiny$"):
        run_study(study, "pic_fidelity", tmp_path)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("backend=sim", r"load\.shares=.* with backend=sim: expected backend=engine"),
        ("arrivals.rate_rps=5", r"arrivals\.rate_rps=5\.0 with load\.shares: expected 1"),
        ("seeds=[0,1]", r"seeds=\[0, 1\] with load\.shares: expected one seed"),
        ("only=[pic]", r"baseline=none with load\.shares: expected one of the arms"),
        ("load.shares=[0.5,0.5]", r"load\.shares=\[0\.5, 0\.5\]: expected different"),
        ("load.shares=[0]", r"load\.shares=0.*: expected a number above zero"),
        ("repeats=0", r"repeats=0: expected a number above zero"),
        ("design.shapes=1", r"design\.shapes=1: expected 2 or more"),
        ("load.rates_rps=[2]", r"load\.rates_rps=\[2\.0\] with load\.shares: expected none"),
        ("arrivals=as_given", r"arrivals\.kind=as_given and workload\.kind=rag .*expected arrivals that can be paced"),
    ],
)
def test_what_makes_no_sense_is_refused(override: str, message: str):
    more = ["arrivals.rate_rps=null"] if override == "arrivals=as_given" else []
    more += ["load.arms=[none]"] if override.startswith("load.rates") else []
    with pytest.raises(Exception, match=message):
        compose("pic_fidelity", [*FEW, override, *more])
