"""A killed study loses nothing that was finished, and its continuation equals the uninterrupted run."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from spanlab.main import compose
from spanlab.study import results
from spanlab.study.run import run_study

STUDY = ("workload.documents=10", "seeds=[0,1]", "workers=2", "load.rates_rps=[16]", "load.arms=[none,boundary]")
RESUME = "output.if_exists=resume"
ARMS = 27


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The uninterrupted run."""
    quiet = ("output.figures=false", "tracking=none")
    return run_study(compose("quality_sim", [*quiet, *STUDY]), "quality_sim", tmp_path_factory.mktemp("whole"))


def wait_until_midway(process: subprocess.Popen, root: Path) -> Path:
    """Wait until some runs are finished; returns the folder in which they are."""
    folder = root / "quality" / ".mine.partial"
    while process.poll() is None:
        if sum(path.read_bytes().count(b"\n") for path in folder.glob("runs/*.jsonl")) >= 5:
            return folder
        time.sleep(0.01)
    raise AssertionError(f"the study ended before it could be killed: {process.communicate()[1]}")


def interrupt(process: subprocess.Popen, how: signal.Signals) -> tuple[int, str]:
    """Send a signal to the study and all its workers, as a terminal does."""
    os.killpg(process.pid, how)
    said = process.communicate(timeout=60)[1]
    return process.returncode, said


def check_equal(folder: Path, whole: Path, files_of, summary_of) -> None:
    found, expected = files_of(folder), files_of(whole)
    assert list(found) == list(expected)
    assert [name for name in found if found[name] != expected[name]] == []
    assert summary_of(folder) == summary_of(whole)


@pytest.mark.parametrize("workers", [pytest.param("workers=1", marks=pytest.mark.slow), "workers=2"])
def test_kill_9_and_resume(workers, whole, started, run_here, files_of, summary_of, tmp_path: Path):
    process = started(tmp_path, "quality_sim", *STUDY, workers, "output.run=mine")
    partial = wait_until_midway(process, tmp_path)
    interrupt(process, signal.SIGKILL)
    assert len(list(partial.glob("runs/*.jsonl"))) < ARMS
    assert not (tmp_path / "quality" / "mine").exists()
    folder = run_here(tmp_path, "quality_sim", *STUDY, "output.run=mine", RESUME)
    check_equal(folder, whole, files_of, summary_of)
    assert not partial.exists()


def test_torn_lines_are_cut_off(whole, started, run_here, files_of, summary_of, tmp_path: Path):
    process = started(tmp_path, "quality_sim", *STUDY, "output.run=mine")
    partial = wait_until_midway(process, tmp_path)
    interrupt(process, signal.SIGKILL)
    for kind in ("records", "runs"):
        for path in partial.glob(f"{kind}/*.jsonl"):
            half = path.read_bytes().splitlines()[:1] or [b'{"seed": 0, "rate']
            with path.open("ab") as file:
                file.write(half[0][: len(half[0]) // 2])
    shutil.copy(partial / "records" / "none.jsonl", partial / "records" / "boundary.jsonl")  # records without a run
    (partial / "runs" / "boundary.jsonl").unlink(missing_ok=True)
    (partial / "runs" / "branch.jsonl").write_bytes(b'{"seed"')  # a run that was torn at the very start
    check_equal(run_here(tmp_path, "quality_sim", *STUDY, "output.run=mine", RESUME), whole, files_of, summary_of)


def test_ctrl_c_says_one_sentence_and_loses_nothing(whole, started, run_here, files_of, summary_of, tmp_path: Path):
    process = started(tmp_path, "quality_sim", *STUDY, "output.run=mine")
    partial = wait_until_midway(process, tmp_path)
    code, said = interrupt(process, signal.SIGINT)
    assert code == 130
    assert "Traceback" not in said
    assert [line for line in said.splitlines() if line.startswith("spanlab: ")] == [
        "spanlab: interrupted; what was finished is kept: the same command with output.if_exists=resume goes on"
    ]
    finished = {path.name: path.read_bytes() for path in partial.glob("runs/*.jsonl")}
    assert sum(lines.count(b"\n") for lines in finished.values()) >= 5
    folder = run_here(tmp_path, "quality_sim", *STUDY, "output.run=mine", RESUME)
    check_equal(folder, whole, files_of, summary_of)
    for name, lines in finished.items():
        assert (folder / "runs" / name).read_bytes().startswith(lines[: lines.rfind(b"\n") + 1])


def test_kill_9_of_the_parent_alone_ends_its_workers(started, tmp_path: Path):
    process = started(tmp_path, "quality_sim", *STUDY, "output.run=mine")
    wait_until_midway(process, tmp_path)
    process.kill()
    process.wait(timeout=60)
    try:
        assert gone(process.pid), "workers are still there three seconds after their parent"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def gone(group: int) -> bool:
    """Whether a process group ends within a while."""
    for _ in range(30):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


TOY = ("workload.documents=2", "workload.questions_per_document=4", "workers=1", "seeds=[0]")
TOY_LOAD = ("load.rates_rps=[]", "load.arms=[]")


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("other", "named"),
    [("arrivals.rate_rps=9", "rate_rps: 8.0 there, rate_rps: 9.0 now"), ("seeds=[0,1]", "there"), ("only=[none]", "")],
)
def test_other_settings_cannot_go_on(other: str, named: str, run_here, tmp_path: Path):
    folder = run_here(tmp_path, "smoke", *TOY, *TOY_LOAD, "output.run=mine")
    before = everything(folder)
    with pytest.raises(
        ValueError, match=rf"^output.if_exists=resume: .* other settings .*{named}.*; expected the same"
    ):
        run_here(tmp_path, "smoke", *TOY, *TOY_LOAD, "output.run=mine", RESUME, other)
    assert everything(folder) == before


def test_how_a_run_is_done_may_change(run_here, files_of, summary_of, tmp_path: Path):
    first = run_here(tmp_path, "smoke", *TOY, *TOY_LOAD, "output.run=mine")
    before = files_of(first), summary_of(first)
    again = run_here(tmp_path, "smoke", *TOY, *TOY_LOAD, "output.run=mine", RESUME, "workers=2")
    assert (files_of(again), summary_of(again)) == before


def test_a_finished_run_is_reported_again(run_here, capsys, tmp_path: Path):
    run_here(tmp_path, "smoke", *TOY, *TOY_LOAD, "output.run=mine")
    shown = capsys.readouterr().out
    folder = run_here(tmp_path, "smoke", *TOY, *TOY_LOAD, "output.run=mine", RESUME)
    assert capsys.readouterr().out == shown
    assert "boundary" in shown
    assert {"config.yaml", "records", "runs", "summary.json"} == {path.name for path in folder.iterdir()}


def test_resume_without_anything_to_go_on_from_starts(run_here, files_of, tmp_path: Path):
    resumed = run_here(tmp_path / "a", "smoke", *TOY, *TOY_LOAD, RESUME)
    assert files_of(resumed) == files_of(run_here(tmp_path / "b", "smoke", *TOY, *TOY_LOAD))


def test_replace_leaves_the_old_run_until_the_new_one_is_complete(started, run_here, tmp_path: Path):
    old = run_here(tmp_path, "quality_sim", *TOY, *TOY_LOAD, "only=[none]", "output.run=mine")
    before = everything(old)
    process = started(tmp_path, "quality_sim", *STUDY, "output.run=mine")
    wait_until_midway(process, tmp_path)
    assert everything(old) == before
    interrupt(process, signal.SIGKILL)
    assert everything(old) == before
    new = run_here(tmp_path, "quality_sim", *TOY, *TOY_LOAD, "only=[boundary]", "output.run=mine")
    assert new == old
    assert [path.stem for path in new.glob("records/*")] == ["boundary"]
    assert [path.name for path in new.parent.iterdir() if path.suffix != ".lock"] == ["mine"]


def _fail(error: BaseException):
    def fail(*arguments, **options):
        raise error

    return fail


@pytest.mark.parametrize("where", ["a worker", "the comparison"])
def test_a_run_that_fails_leaves_the_old_one(where: str, run_here, monkeypatch, tmp_path: Path):
    old = run_here(tmp_path, "smoke", *TOY, *TOY_LOAD, "output.run=mine")
    before = everything(old)
    full = OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as broken:
        if where == "a worker":
            broken.setattr("spanlab_sim.run.simulate", _fail(full))  # workers are forked and inherit it
        else:
            broken.setattr(results, "compare", _fail(full))
        with pytest.raises(OSError, match="No space left"):
            run_here(tmp_path, "smoke", *TOY, *TOY_LOAD, "output.run=mine")
    full.__traceback__ = None  # its frames keep the run's lock, as a process that has ended would not
    assert everything(old) == before
    assert everything(run_here(tmp_path, "smoke", *TOY, *TOY_LOAD, "output.run=mine")).keys() == before.keys()


def test_fail_refuses_before_anything_is_done(run_here, tmp_path: Path):
    old = run_here(tmp_path, "smoke", *TOY, *TOY_LOAD, "output.run=mine")
    before = everything(old)
    with pytest.raises(ValueError, match=r"^output.run=mine: .* exists; expected a new name"):
        run_here(tmp_path, "smoke", *TOY, *TOY_LOAD, "output.run=mine", "output.if_exists=fail")
    assert everything(old) == before
    assert not old.with_name(".mine.partial").exists()
