"""Arms that alternate: turns at idle times, and results that are equal to those of arms that run one after another."""

import itertools
from functools import partialmethod
from pathlib import Path

import orjson
import pytest

from spanlab.build import build_workload
from spanlab.cli import compose
from spanlab.study.backends import RealEngine
from spanlab.study.bounds import ArmFailure
from spanlab.study.jobs import Row, run_cells, schedule_tasks
from spanlab.study.numbers import ArmFiles, RunCell
from spanlab.study.worker import Worker

from .test_turns import SMALL

pytest.importorskip("torch")
from spanlab.engine.engine import Engine

CLOSED = ("arrivals=closed_loop", "arrivals.rate_rps=null", "seeds=[0]")
REQUESTS = 6
MEASURED = {"arrived_s", "admitted_s", "first_token_s", "finished_s"}


class NotingWorker(Worker):
    """Worker that notes the rows in which requests finish."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.finished: list[int] = []

    def _progress(self, row: int, finished: int) -> None:
        self.finished += [row] * finished
        super()._progress(row, finished)


def study_of(*settings: str):
    return compose("pic_clean", [*SMALL, *CLOSED, *settings])


def run(study, folder: Path) -> tuple[NotingWorker, list[ArmFiles], list]:
    """Run every arm in this process; returns the worker, the arms' files and the outcomes of all turns."""
    folder.mkdir()
    counts = folder / "counts"
    counts.write_bytes(bytes(8 * len(study.chosen())))
    files = [
        ArmFiles(folder / f"{arm}.records", folder / f"{arm}.runs", folder / "steps", folder / "readings")
        for arm in study.chosen()
    ]
    rows = [Row(arm, arm, of, tuple(run_cells(study, arm))) for arm, of in zip(study.chosen(), files, strict=True)]
    worker = NotingWorker(study, build_workload(study.workload, str(folder)).requests, counts)
    outcomes = [outcome for tasks in schedule_tasks(study, rows) for outcome in worker.run(tasks)]
    return worker, files, outcomes


def decisions(files: ArmFiles) -> list[dict]:
    """Records of an arm without measured times."""
    records = [orjson.loads(line) for line in files.records.read_bytes().splitlines()]
    return [{key: value for key, value in record.items() if key not in MEASURED} for record in records]


def test_runs_on_the_same_arrivals_form_a_turn():
    study = study_of("engine.alternate=true", "seeds=[0,1]")
    files = ArmFiles(Path("records"), Path("runs"), Path("steps"), None)
    rows = [Row(arm, arm, files, tuple(run_cells(study, arm))) for arm in study.chosen()]
    repeat = Row("A/A", "none", files, tuple(run_cells(study, "none")), is_repeat=True)
    groups = schedule_tasks(study, [*rows, repeat])
    assert [{task.cells for task in tasks} for tasks in groups] == [{(RunCell(seed, None),)} for seed in (0, 1)]
    assert [{tasks[0].arm, tasks[-1].arm} for tasks in groups] == [{"none"}] * 2
    assert [sorted(task.row for task in tasks) for tasks in groups] == [[0, 1, 2, 3]] * 2


def test_arms_take_turns_request_by_request_with_equal_decisions_and_times(tmp_path, monkeypatch):
    ticks = itertools.count()  # a clock that advances with each reading, of whichever arm
    monkeypatch.setattr(Engine, "__init__", partialmethod(Engine.__init__, counter=lambda: next(ticks) * 1_000_000))
    worker, files, outcomes = run(study_of("engine.alternate=true"), tmp_path / "alternating")
    assert len(outcomes) == 3
    rounds = [worker.finished[start : start + 3] for start in range(0, 3 * REQUESTS, 3)]
    assert len(worker.finished) == 3 * REQUESTS
    assert rounds == [rounds[0]] * REQUESTS
    assert sorted(rounds[0]) == [0, 1, 2]
    one_by_one, alone, _ = run(study_of(), tmp_path / "alone")
    assert len(set(one_by_one.finished[:REQUESTS])) == 1
    assert [decisions(of) for of in files] == [decisions(of) for of in alone]
    assert [delays(of) for of in files] == [delays(of) for of in alone]


def delays(files: ArmFiles) -> list[float]:
    """Milliseconds from arrival to the last token of each request."""
    records = [orjson.loads(line) for line in files.records.read_bytes().splitlines()]
    return [round(1000 * (record["finished_s"] - record["arrived_s"])) for record in records]


def test_an_arm_that_runs_out_of_memory_leaves_the_others_running(tmp_path, monkeypatch):
    serve = RealEngine._serve

    def fail_late(self, job, write, clock):
        written = []

        def write_some(record):
            written.append(record)
            if len(written) == 3 and job.steps.name.startswith("radix"):
                raise MemoryError
            write(record)

        return serve(self, job, write_some, clock)

    monkeypatch.setattr(RealEngine, "_serve", fail_late)
    worker, files, outcomes = run(study_of("engine.alternate=true"), tmp_path / "run")
    failures = [outcome for outcome in outcomes if isinstance(outcome, ArmFailure)]
    assert [failure.arm for failure in failures] == ["radix"]
    assert [len(of.finished()) for of in files] == [1, 0, 1]
    assert worker.finished.count(0) == worker.finished.count(2) == REQUESTS


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("arrivals.clients=2", "engine.alternate=true with arrivals.clients=2: expected arrivals=closed_loop with 1"),
        ("engine.clock=wall", "engine.alternate=true with engine.clock=wall: expected virtual"),
        (
            "engine.teacher=baseline engine.record=tokens",
            "engine.alternate=true with engine.teacher=baseline: expected gold",
        ),
    ],
)
def test_settings_that_need_whole_runs_are_refused(setting, expected):
    with pytest.raises(ValueError, match=expected):
        study_of("engine.alternate=true", *setting.split())
