"""A killed study loses nothing that was finished, and its continuation equals the uninterrupted run."""

import errno
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from spanlab.cli import compose
from spanlab.study import backends
from spanlab.study.run import run_study

from .conftest import FILES, RESUME, TOY

STUDY = (
    "only=[none,kv_only,block_hash_all,boundary,branch,dp_8]",
    *(
        "workload.documents=3",
        "workload.questions_per_document=6",
        "seeds=[0,1]",
        "workers=2",
        "load.rates_rps=[16]",
        "load.arms=[none,boundary]",
    ),
)
FREE = ("none", "kv_only", "block_hash_all")  # of a study that is held midway, and their cells
CELLS = 8


@pytest.fixture(scope="module")
def complete_run(tmp_path_factory) -> Path:
    """The uninterrupted run."""
    quiet = ("output.figures=false", "tracking.kind=none")
    return run_study(compose("quality_sim", [*quiet, *STUDY]), "quality_sim", tmp_path_factory.mktemp("whole"))


@pytest.fixture
def midway(started, paused, tmp_path: Path):
    """A study that has finished its first three arms and waits in the others, and its folder."""

    def start(*overrides: str) -> tuple[subprocess.Popen, Path]:
        process = started(tmp_path, "quality_sim", *STUDY, *overrides, "output.run=mine", env=paused[1](*FREE))
        return process, wait_until_midway(process, tmp_path)

    return start


def wait_until_midway(process: subprocess.Popen, root: Path) -> Path:
    """Wait until the arms that are free have finished; returns the folder in which they are."""
    folder = root / "quality" / ".mine.partial"
    while process.poll() is None:
        if sum(path.read_bytes().count(b"\n") for path in folder.glob("runs/*.jsonl")) == CELLS:
            return folder
        time.sleep(0.01)
    raise AssertionError(f"the study ended before it could be killed: {process.communicate()[1]}")


def interrupt(process: subprocess.Popen, how: signal.Signals) -> tuple[int, str]:
    """Send a signal to the study and all its workers, as a terminal does."""
    os.killpg(process.pid, how)
    stderr = process.communicate(timeout=60)[1]
    return process.returncode, stderr


@pytest.fixture
def check_resumed(complete_run, run_here, files_of, summary_of, tmp_path: Path) -> Callable[[], Path]:
    """Go on with the study, which then equals the uninterrupted run; returns its folder."""

    def check() -> Path:
        folder = run_here(tmp_path, "quality_sim", *STUDY, "output.run=mine", RESUME)
        files, expected = files_of(folder), files_of(complete_run)
        assert list(files) == list(expected)
        assert [name for name in files if files[name] != expected[name]] == []
        assert summary_of(folder) == summary_of(complete_run)
        return folder

    return check


@pytest.mark.parametrize("workers", [pytest.param("workers=1", marks=pytest.mark.slow), "workers=2"])
def test_kill_9_and_resume_where_lines_are_torn(workers, midway, check_resumed, tmp_path: Path):
    process, partial = midway(workers)
    interrupt(process, signal.SIGKILL)
    assert not (tmp_path / "quality" / "mine").exists()
    for kind in ("records", "runs"):
        for path in partial.glob(f"{kind}/*.jsonl"):
            half = path.read_bytes().splitlines()[:1] or [b'{"seed": 0, "rate']
            with path.open("ab") as file:
                file.write(half[0][: len(half[0]) // 2])
    shutil.copy(partial / "records" / "none.jsonl", partial / "records" / "boundary.jsonl")  # records without a run
    (partial / "runs" / "boundary.jsonl").unlink(missing_ok=True)
    (partial / "runs" / "branch.jsonl").write_bytes(b'{"seed"')  # a run that was torn at the very start
    check_resumed()
    assert not partial.exists()


@pytest.mark.parametrize(("how", "ends_with"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_says_one_sentence_and_loses_nothing(how, ends_with, midway, check_resumed):
    process, partial = midway()
    code, stderr = interrupt(process, how)
    assert code == ends_with
    assert "Traceback" not in stderr
    assert [line for line in stderr.splitlines() if line.startswith("spanlab: ")] == [
        "spanlab: interrupted; what was finished is kept: the same command with output.if_exists=resume goes on"
    ]
    finished = {path.name: path.read_bytes() for path in partial.glob("runs/*.jsonl")}
    assert sum(lines.count(b"\n") for lines in finished.values()) == CELLS
    folder = check_resumed()
    for name, lines in finished.items():
        assert (folder / "runs" / name).read_bytes().startswith(lines[: lines.rfind(b"\n") + 1])


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


OTHERS = {
    "arrivals.rate_rps=9": "arrivals.rate_rps: 8.0 there, arrivals.rate_rps: 9.0 now",
    "arms.block_512.placement.interval=1024": "arms.block_512.placement.interval: 512 there",
    "workload.questions_per_document=3": "workload.questions_per_document: 4 there",
}


def test_other_settings_cannot_go_on(toy):
    folder = toy()
    before = everything(folder)
    for other, named in OTHERS.items():
        said = rf"^output.if_exists=resume: .* other settings .*{named}.*; expected the same"
        with pytest.raises(ValueError, match=said):
            toy(RESUME, other)
        assert everything(folder) == before


def test_how_a_run_is_done_may_change(toy, files_of, summary_of):
    first = toy()
    before = files_of(first), summary_of(first)
    again = toy(RESUME, "workers=2")
    assert (files_of(again), summary_of(again)) == before


def test_a_finished_run_is_reported_again(toy, capsys):
    toy()
    shown = capsys.readouterr().out
    folder = toy(RESUME)
    assert capsys.readouterr().out == shown
    assert "boundary" in shown
    assert {path.name for path in folder.iterdir()} == FILES


def test_resume_without_anything_to_go_on_from_starts(toy, files_of):
    resumed = toy(RESUME, below="a")
    assert files_of(resumed) == files_of(toy(below="b"))


def test_replace_leaves_the_old_run_until_the_new_one_is_complete(midway, run_here, capsys, tmp_path: Path):
    old = run_here(tmp_path, "quality_sim", *TOY, "only=[none]", "output.run=mine")
    before = everything(old)
    process, _ = midway()
    assert everything(old) == before
    process.kill()
    process.wait()
    with suppress(ProcessLookupError):
        while True:  # for ever, if a worker outlives its parent
            os.killpg(process.pid, 0)
            time.sleep(0.01)
    assert everything(old) == before
    new = run_here(tmp_path, "quality_sim", *TOY, "only=[boundary]", "output.run=mine")
    assert new == old
    assert [path.stem for path in new.glob("records/*")] == ["boundary"]
    (previous,) = set(new.parent.glob("[!.]*")) - {new}
    assert everything(previous) == before
    assert f"the previous run was moved to {previous}\n" in capsys.readouterr().err


def test_every_replaced_run_is_kept(toy):
    for seed in range(4):
        folder = toy("only=[none]", f"seeds=[{seed}]")
        os.utime(folder / "summary.json", (0, 0))
    configs = {path: path.joinpath("config.yaml").read_text() for path in folder.parent.glob("[!.]*")}
    assert sorted(text.partition("seeds:\n  - ")[2][0] for text in configs.values()) == ["0", "1", "2", "3"]
    assert "seeds:\n  - 3" in configs[folder]


def test_a_process_killed_while_it_published_hides_no_run(toy):
    old = toy("only=[none]")
    before = everything(old)
    os.rename(old, old.with_name(".mine.old"))
    toy("only=[boundary]")
    (previous,) = set(old.parent.glob("[!.]*")) - {old}
    assert everything(previous) == before


LOAD = ("load.rates_rps=[4]", "load.arms=[none]")


class OnlyNew(backends.Simulator):
    """Refuses cells that were there before."""

    def run(self, job, write):
        assert (job.seed, job.rate_rps) != (0, 8.0) or "boundary" in job.steps.name, "a finished cell is run again"
        return super().run(job, write)


@pytest.mark.parametrize("partial", [False, True])
def test_resume_adds_seeds_loads_and_arms(partial, toy, files_of, summary_of, monkeypatch):
    more = ("seeds=[0,1]", "only=[none,boundary,block_512]", *LOAD)
    complete_run = toy(*more, below="whole")
    smaller = toy("only=[none,block_512]")
    if partial:
        os.rename(smaller, smaller.with_name(".mine.partial"))
    monkeypatch.setitem(backends.BACKENDS, "sim", OnlyNew)
    grown = toy(*more, RESUME)
    assert files_of(grown) == files_of(complete_run)
    assert summary_of(grown) == summary_of(complete_run)


def test_resume_keeps_cells_that_are_not_asked_for(toy, files_of, summary_of):
    smaller = ("seeds=[1]", "only=[none]")
    alone = toy(*smaller, below="alone")
    many = toy("seeds=[0,1]", *LOAD)
    before = files_of(many)
    again = toy(*smaller, RESUME)
    assert summary_of(again) == summary_of(alone)
    assert {name: sorted(lines.splitlines()) for name, lines in files_of(again).items() if "records" in name} == {
        name: sorted(lines.splitlines()) for name, lines in before.items() if "records" in name
    }


def _fail(error: BaseException):
    def fail(*arguments, **options):
        raise error

    return fail


@pytest.mark.parametrize("failure", ["a worker", "the comparison"])
def test_a_run_that_fails_leaves_the_old_one(failure: str, toy, monkeypatch):
    old = toy()
    before = everything(old)
    full = OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as broken:
        if failure == "a worker":
            broken.setattr("spanlab.study.backends.Run", _fail(full))  # workers are forked and inherit it
        else:
            broken.setattr("spanlab.analyses.summary.study_tables", _fail(full))
        with pytest.raises(OSError, match="No space left"):
            toy()
    full.__traceback__ = None  # its frames keep the run's lock, as a process that has ended would not
    assert everything(old) == before
    assert everything(toy()).keys() == before.keys()


def test_fail_refuses_before_anything_is_done(toy):
    old = toy()
    before = everything(old)
    with pytest.raises(ValueError, match=r"^output.run=mine: .* exists; expected a new name"):
        toy("output.if_exists=fail")
    assert everything(old) == before
    assert not old.with_name(".mine.partial").exists()
