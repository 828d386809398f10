"""A sweep: points are ordinary runs, equal ones run once, and one that fails stops no other."""

import csv
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from spanlab.cli import compose
from spanlab.report.sweep import SweepPoint, sweep_rows
from spanlab.settings import Study
from spanlab.study.sweep import Lane, parse_axes, run_sweep

TOY = (
    "workload.documents=2",
    "workload.questions_per_document=3",
    "seeds=[0,1]",
    "load.rates_rps=[]",
    "load.arms=[]",
    "only=[none,boundary]",
    "tracking.kind=none",
    "workers=1",
    "output.figures=false",
    "output.run=swept",
)
QUESTIONS = "workload.questions_per_document"
ARMS = 2


@pytest.fixture
def sweep(tmp_path: Path) -> Callable[..., Path]:
    """Run a sweep of the entry `smoke`; further arguments are overrides."""

    def run(*axes: str, overrides: tuple[str, ...] = ()) -> Path:
        given = [*TOY, *overrides]
        study = compose("smoke", [*given, f"sweep={json.dumps(axes)}"])
        point = lambda *point: compose("smoke", [*given, *point])  # noqa: E731
        return run_sweep(study, "smoke", tmp_path, point)

    return run


def swept_folder(root: Path) -> Path:
    return root / "quality" / "swept"


def test_rows_are_the_summaries_of_the_runs(sweep, read_points):
    folder = sweep(f"{QUESTIONS}=1,2")
    rows = sweep_rows(read_points(folder))
    assert len(rows) == 2 * ARMS
    for row in rows:
        summary = json.loads((folder.parent / f"swept__{row.axis}={row.value:g}" / "summary.json").read_bytes())
        assert row.token_hit_rate == summary["arms"][row.arm]["token_hit_rate"]
        assert row.token_hit_rate_low == summary["arms"][row.arm]["token_hit_rate_interval"][0]
        assert row.ttft_mean_s == summary["arms"][row.arm]["ttft_s"]["mean"]


def test_csv_and_summary_hold_every_row(sweep, read_points):
    folder = sweep(f"{QUESTIONS}=2,3")
    rows = sweep_rows(read_points(folder))
    with (folder / "tables" / "sweep.csv").open(newline="") as file:
        csv_rows = list(csv.DictReader(file))
    assert [float(line["token_hit_rate"]) for line in csv_rows] == [row.token_hit_rate for row in rows]
    assert len(json.loads((folder / "summary.json").read_bytes())["rows"]) == len(rows)


def test_equal_points_of_two_axes_run_once(sweep, read_points):
    folder = sweep(f"{QUESTIONS}=2,3", "arrivals.order=shuffled,as_given")
    points = read_points(folder)
    assert [point.run for point in points].count(f"swept__{QUESTIONS}=3") == 2
    assert not (folder.parent / "swept__arrivals.order=shuffled").exists()


def test_points_side_by_side_equal_points_in_turn(sweep):
    gib = "store.total_gib=1,2,3"
    files = {}
    for workers in (1, 2):
        folder = sweep(gib, overrides=("only=[none]", f"workers={workers}", f"output.run=by_{workers}"))
        runs = [folder.parent / f"by_{workers}__store.total_gib={value}" for value in (1, 2, 3)]
        files[workers] = [(run / "records" / "none.jsonl").read_bytes() for run in runs]
        files[workers].append((folder / "tables" / "sweep.csv").read_bytes())
    assert files[1] == files[2]


def test_a_failing_point_of_several_at_once_is_named(sweep):
    side_by_side = ("only=[none]", "workers=2")
    with pytest.raises(ValueError, match=r"^1 of 3 points failed, .*: store\.total_gib=0\.001: store\.total_gib"):
        sweep("store.total_gib=0.001,1,2", overrides=side_by_side)


@pytest.mark.usefixtures("simulating")
def test_a_killed_point_is_named_and_others_run(sweep, monkeypatch):
    run = Lane.run_here

    def run_or_die(lane: Lane, study: Study, point: str) -> SweepPoint:
        if point.endswith("=1"):
            os.kill(os.getpid(), signal.SIGKILL)
        return run(lane, study, point)

    monkeypatch.setattr(Lane, "run_here", run_or_die)
    with pytest.raises(ValueError, match=r"^1 of 3 points failed, .*: store\.total_gib=1: its process was killed"):
        sweep("store.total_gib=1,2,3", overrides=("only=[none]", "workers=2"))


def test_a_failing_point_is_named_and_others_run(sweep, tmp_path, capsys, read_points):
    with pytest.raises(ValueError, match=r"^1 of 3 points failed, .*: store\.total_gib=-1: .*expected a number above"):
        sweep("store.total_gib=-1,1,2")
    points = read_points(swept_folder(tmp_path))
    assert [point.summary is None for point in points] == [True, False, False]
    assert "store.total_gib=-1.0: expected a number above zero" in (swept_folder(tmp_path) / "report.html").read_text()
    assert "failed" in capsys.readouterr().out


def test_a_budget_that_holds_no_request_fails_alone(sweep, tmp_path, read_points):
    with pytest.raises(ValueError, match=r"store\.total_gib=0\.001: store\.total_gib=0\.001: expected at least"):
        sweep("store.total_gib=0.001,1")
    assert read_points(swept_folder(tmp_path))[1].summary is not None


def test_no_point_at_all_is_one_sentence(sweep, tmp_path):
    with pytest.raises(ValueError, match=r"^no point of the sweep completed, the first error: store"):
        sweep("store.total_gib=-1,-2")
    assert not swept_folder(tmp_path).exists()


def test_resume_keeps_finished_points(sweep, files_of):
    first = sweep(f"{QUESTIONS}=2,3")
    runs = [first.parent / f"swept__{QUESTIONS}={value}" for value in (2, 3)]
    before = [files_of(run) for run in runs]
    sweep(f"{QUESTIONS}=2,3", overrides=("output.if_exists=resume",))
    assert [files_of(run) for run in runs] == before


@pytest.mark.parametrize("axis", ["store.total_gib", "store.total_gib=1", "store.total_gib=[1,2]", "=1,2", "a=1,,2"])
def test_an_axis_needs_a_key_and_two_values(axis):
    with pytest.raises(ValueError, match=r"^sweep=") as refused:
        parse_axes([axis])
    assert str(refused.value).endswith("expected KEY=A,B,... with two values or more")


def test_axes_are_hydras_sweeps():
    (axis,) = parse_axes(["seeds=choice([0],[1,2])"])
    assert axis.values == (("[0]", "[1,2]"),)
    assert parse_axes(["store.total_gib=range(1,4)"])[0].values == (("1", "2", "3"),)


def test_an_axis_of_two_settings_runs_every_combination(sweep, read_points):
    folder = sweep(f"{QUESTIONS}=1,2 arrivals.order=shuffled,as_given")
    points = read_points(folder)
    assert [point.value for point in points] == ["1, shuffled", "1, as_given", "2, shuffled", "2, as_given"]
    assert points[2].settings == {QUESTIONS: "2", "arrivals.order": "shuffled"}
    assert points[2].run == f"swept__{QUESTIONS}=2__arrivals.order=shuffled"
    requests = [point.summary["workload"]["requests"] for point in points]
    assert requests == [2, 2, 4, 4]
    table = next(table for table in json.loads((folder / "tables.json").read_bytes()) if "hit_rate" in table["name"])
    assert len(table["rows"]) == len(points)


def test_points_of_an_axis_may_be_of_several_workloads(sweep, read_points):
    folder = sweep("workload=quality,system_prompts arrivals.order=shuffled,as_given")
    assert [point.summary["workload"]["kind"] for point in read_points(folder)] == ["quality"] * 2 + [
        "system_prompts"
    ] * 2


def test_a_fidelity_study_refuses_a_sweep():
    with pytest.raises(Exception, match=r"with load\.shares=.*expected sweep=\[\]"):
        compose("quality_fidelity", ['sweep=["store.total_gib=1,2"]'])
