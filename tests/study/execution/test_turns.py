"""Engine studies interleave arms, with the baseline twice in each round, after a warm-up without records or cache."""

import json
import os
from collections import Counter
from pathlib import Path

import pytest

from spanlab.cli import compose
from spanlab.core.request import Request, Span
from spanlab.study.backends import RealEngine
from spanlab.study.jobs import Row, run_cells, schedule_tasks, warm_requests
from spanlab.study.machine import repeat_files
from spanlab.study.numbers import ArmFiles
from spanlab.study.run import calibration_rows, interleaved_calibration, run_study

SMALL = (
    "workload.documents=2",
    "workload.questions_per_document=3",
    "workload.rag.requests=null",
    "workload.rag.k=2",
    "workload.rag.passage_tokens=64",
    "workload.output_tokens=3",
    "only=[none,radix,pic]",
    "seeds=[0,1]",
    "arrivals.rate_rps=20",
    "engine.threads=1",
    "analyses=[summary]",
    "tracking.kind=none",
    "output.figures=false",
)


def files(arm: str) -> ArmFiles:
    folder = Path(arm)
    return ArmFiles(folder / "records", folder / "runs", folder / "steps", folder / "readings")


def rows_of(study, repeat: bool = True) -> list[Row]:
    arm_rows = [Row(arm, arm, files(arm), tuple(run_cells(study, arm))) for arm in study.chosen()]
    return arm_rows + ([Row("A/A", "none", files("again"), arm_rows[0].cells, is_repeat=True)] if repeat else [])


def test_arms_are_interleaved_with_the_baseline_at_both_ends():
    study = compose("pic_clean", [*SMALL, "seeds=[0,1,2,3,4,5,6,7]"])
    tasks = [task for (task,) in schedule_tasks(study, rows_of(study))]
    rounds = [tasks[start : start + 4] for start in range(0, 32, 4)]
    assert [cell.seed for task in tasks for cell in task.cells] == [seed for seed in range(8) for _ in range(4)]
    for number, round_tasks in enumerate(rounds):
        assert Counter(task.row for task in round_tasks) == {0: 1, 1: 1, 2: 1, 3: 1}
        assert {round_tasks[0].arm, round_tasks[-1].arm} == {"none"}
        assert round_tasks[0].row == (0 if number % 2 == 0 else 3), "the repeat is first in every other round"
    assert {task.files for task in tasks if task.row == 3} == {files("again")}
    assert len({tuple(task.arm for task in round_tasks) for round_tasks in rounds}) > 1, "orders differ"
    assert [task.last for task in tasks] == [False] * 28 + [True] * 4


def test_simulations_run_one_arm_after_another():
    study = compose("pic_clean", [*SMALL, "backend=sim"])
    tasks = [task for (task,) in schedule_tasks(study, rows_of(study, repeat=False))]
    assert [task.arm for task in tasks] == study.chosen()
    assert all(task.last and list(task.cells) == run_cells(study, task.arm) for task in tasks)


def test_shapes_come_before_each_repeat_and_after_the_last():
    load = ("seeds=[0]", "repeats=3", "analyses=null", "load.rates_rps=[5]", "load.arms=[none,pic]", "design.shapes=5")
    study = compose("pic_clean", [*SMALL, *load])
    requests = (prompt(0, 30), prompt(1, 20))
    shapes = calibration_rows(interleaved_calibration(study, requests), Path("shapes"))
    tasks = [task for (task,) in schedule_tasks(study, [*rows_of(study, repeat=False), *shapes])]
    per_repeat = [(task.calibrates, task.cells[0].repeat) for task in tasks]
    expected = [(calibrates, repeat) for repeat in range(4) for calibrates in (True, False) for _ in range(5)]
    assert per_repeat == expected[:-5]
    assert Counter((task.arm, *task.cells) for task in tasks if not task.calibrates).most_common(1)[0][1] == 1
    assert {cell.rate_rps for task in tasks if not task.calibrates for cell in task.cells} == {20.0, 5.0}


def prompt(id: int, length: int) -> Request:
    return Request(id, 0, (Span(list(range(length))),), output_len=2, arrived_at=id)


def test_warm_up_serves_short_and_long_prompts_twice():
    requests = [prompt(7, 5), prompt(8, 2), prompt(9, 30), prompt(10, 6)]
    selected = warm_requests(requests)
    assert [request.num_tokens for request in selected] == [5, 2, 30, 5, 2, 30, 2, 4, 8, 16]
    assert [request.id for request in selected] == list(range(10))
    arrived = [request.arrived_at for request in selected]
    assert arrived[:3] == [0, 0, 0] < arrived[3:6] and len(set(arrived[6:])) == 4 and arrived == sorted(arrived)
    assert [request.num_tokens for request in warm_requests(requests[:1])] == [5, 5, 2, 4]


def test_every_arm_warms_up_without_a_record(monkeypatch):
    pytest.importorskip("torch")
    study, jobs = compose("pic_clean", [*SMALL]), []
    monkeypatch.setattr(RealEngine, "_serve", lambda engine, job, write, clock: jobs.append(job) or ())
    RealEngine(study).warm_up([prompt(7, 5)])
    assert [job.strategy for job in jobs] == [study.arms[name] for name in study.chosen()]
    assert all(job.requests and str(job.steps) == os.devnull for job in jobs)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory) -> Path:
    """A finished study on the engine."""
    pytest.importorskip("torch")
    return run_study(compose("pic_clean", [*SMALL]), "pic_clean", tmp_path_factory.mktemp("study"))


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_study_reports_its_noise_and_keeps_the_repeat_apart(finished_run: Path):
    summary = json.loads((finished_run / "summary.json").read_bytes())
    assert len(summary["machine_noise"]["aa_ratios"]) == 2, "one for each seed"
    assert list(summary["arms"]) == ["none", "radix", "pic"]
    assert "fidelity" not in summary, "nothing is calibrated without the analysis"
    assert sorted(path.stem for path in (finished_run / "records").iterdir()) == ["none", "pic", "radix"]
    assert len(rows(finished_run / "readings.jsonl")) == 2 * 4, "one before every run"
    repeat = repeat_files(finished_run, "none")
    assert len(rows(repeat.records)) == len(rows(finished_run / "records" / "none.jsonl")) == 2 * 6
    assert summary["machine_noise"]["noisy"] == (summary["arms"]["none"]["speedup"] is None)


def test_warm_up_leaves_no_record_and_no_cached_content(finished_run: Path):
    for arm in ("none", "radix", "pic"):
        records = rows(finished_run / "records" / f"{arm}.jsonl")
        assert Counter(record["seed"] for record in records) == {0: 6, 1: 6}
        for seed in (0, 1):
            of_seed = [record for record in records if record["seed"] == seed]
            first = min(of_seed, key=lambda record: record["admitted_s"])
            assert first["seen_tokens"] == first["reused_tokens"] == 0
    assert [row["requests"] for row in rows(finished_run / "runs" / "pic.jsonl")] == [6, 6]


def test_arms_of_the_engine_have_seen_the_same_tokens(finished_run: Path):
    files = [rows(finished_run / "records" / f"{arm}.jsonl") for arm in ("none", "radix", "pic")]
    none, *others = ({(row["seed"], row["request_id"]): row["seen_tokens"] for row in file} for file in files)
    assert sum(none.values())
    assert all(other == none for other in others)
