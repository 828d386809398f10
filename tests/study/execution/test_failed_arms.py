"""An arm that runs out of memory is marked, the others run on, and a resumed study tries it again."""

import errno
import json
import os
import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest

from spanlab.api import load
from spanlab.cli import compose
from spanlab.errors import OutOfMemoryError, is_user_error, out_of_memory, sentence
from spanlab.study import backends
from spanlab.study.run import run_study

TOY = ("workload.documents=2", "workload.questions_per_document=4", "seeds=[0,1]", "load.rates_rps=[]", "load.arms=[]")
NAMED = (*TOY, "workers=1", "output.run=mine")
WRITTEN = 3  # records that a failing run still writes
CARD = RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB.")
ALLOCATOR = RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: 9 bytes")
ERRORS = {
    "the host": (MemoryError(), "no more memory"),
    "the card": (CARD, "CUDA out of memory; Tried to allocate 2.00 GiB"),
    "the allocator": (ALLOCATOR, "DefaultCPUAllocator: can't allocate memory: 9 bytes"),
    "the pool": (OutOfMemoryError("The pool of 4 pages has 1 free."), "The pool of 4 pages has 1 free"),
}


@pytest.fixture
def failing(monkeypatch, tmp_path) -> Callable[..., Path]:
    """Let the second seed of some arms fail midway; returns a file that gets a line for every recovery."""
    recovered = tmp_path / "recovered"

    def fail(error: BaseException, *arms: str) -> Path:
        class Failing(backends.Simulator):
            def run(self, job, write):
                if job.seed == 0 or job.steps.name.partition("-")[0] not in arms:
                    return super().run(job, write)
                records = []

                def write_some(record):
                    if len(records) == WRITTEN:
                        raise error
                    records.append(record)
                    write(record)

                return super().run(job, write_some)

            def recover(self):
                with recovered.open("a") as file:
                    file.write("once\n")

        monkeypatch.setitem(backends.BACKENDS, "sim", Failing)  # workers are forked and inherit it
        return recovered

    return fail


@pytest.fixture(scope="module")
def complete_run(tmp_path_factory):
    """The run in which nothing fails."""
    study = compose("smoke", ["output.figures=false", "tracking.kind=none", *NAMED])
    return run_study(study, "smoke", tmp_path_factory.mktemp("whole"))


def test_the_others_run_on_and_resume_tries_again(
    failing, complete_run, run_here, files_of, summary_of, capsys, monkeypatch, tmp_path: Path
):
    error, ending = ERRORS["the pool"]
    recovered = failing(error, "block_512", "dp_3")
    with pytest.raises(ValueError, match=r"^2 of 7 arms failed, the others are reported: arms.block_512 ran out"):
        run_here(tmp_path, "smoke", *NAMED)
    monkeypatch.undo()
    assert recovered.read_text() == "once\nonce\n"
    folder = tmp_path / "quality" / "mine"
    summary, expected = summary_of(folder), summary_of(complete_run)
    assert list(summary["failed"]) == ["block_512", "dp_3"]
    assert summary["failed"]["dp_3"].startswith("arms.dp_3 ran out of memory: ")
    assert summary["failed"]["dp_3"].endswith(ending)
    assert summary["arms"] == {arm: row for arm, row in expected["arms"].items() if arm not in summary["failed"]}
    lines = (folder / "records" / "dp_3.jsonl").read_bytes().splitlines()
    assert lines == (complete_run / "records" / "dp_3.jsonl").read_bytes().splitlines()[: 8 + WRITTEN]
    table = capsys.readouterr().out
    assert [line.split() for line in table.splitlines() if line.startswith("dp_3")] == [["dp_3", "failed"]]
    assert summary["failed"]["dp_3"] in " ".join(table.split())

    again = run_here(tmp_path, "smoke", *NAMED, "output.if_exists=resume")
    assert files_of(again) == files_of(complete_run)
    assert summary_of(again) == expected
    assert expected["failed"] == {}


def test_without_its_baseline_a_study_has_no_speedups_and_says_so(failing, run_here, summary_of, capsys, tmp_path):
    failing(MemoryError(), "none")
    with pytest.raises(ValueError, match=r"^1 of 7 arms failed"):
        run_here(tmp_path, "smoke", *NAMED)
    summary = summary_of(tmp_path / "quality" / "mine")
    assert {arm["speedup"] for arm in summary["arms"].values()} == {None}
    assert "no speedups, for none failed" in summary["caveats"]
    assert "no speedups, for none failed" in capsys.readouterr().out


def test_figures_are_drawn_without_what_failed_and_name_it(failing, run_here, summary_of, tmp_path):
    failing(MemoryError(), "none")
    with pytest.raises(ValueError, match=r"^1 of 3 arms failed"):
        run_here(tmp_path, "smoke", *NAMED, "only=[none,radix_branch_last,boundary]", "output.figures=true")
    assert (tmp_path / "quality" / "mine" / "figures" / "pareto_ttft.png").stat().st_size > 0


def test_if_every_arm_fails_the_old_run_stays(failing, run_here, complete_run, tmp_path: Path):
    old = run_here(tmp_path, "smoke", *NAMED, "only=[none]")
    before = (old / "summary.json").read_bytes()
    failing(MemoryError(), "none", "boundary")
    with pytest.raises(ValueError, match=r"^no arm completed, the first error: arms.none ran out of memory"):
        run_here(tmp_path, "smoke", *NAMED, "only=[none,boundary]")
    assert (old / "summary.json").read_bytes() == before


@pytest.mark.usefixtures("simulating")
def test_an_arm_whose_process_is_killed_fails_alone(
    run_here, complete_run, files_of, summary_of, monkeypatch, tmp_path: Path
):
    class Killed(backends.Simulator):
        def run(self, job, write):
            if job.seed == 1 and job.steps.name.startswith("block_512-"):
                os.kill(os.getpid(), signal.SIGKILL)
            return super().run(job, write)

    monkeypatch.setitem(backends.BACKENDS, "sim", Killed)
    with pytest.raises(ValueError, match=r"^1 of 7 arms failed.*arms.block_512: its process was killed, "):
        run_here(tmp_path, "smoke", *NAMED, "workers=3")
    summary, expected = summary_of(tmp_path / "quality" / "mine"), summary_of(complete_run)
    assert list(summary["failed"]) == ["block_512"]
    assert summary["arms"] == {arm: row for arm, row in expected["arms"].items() if arm != "block_512"}
    monkeypatch.undo()
    again = run_here(tmp_path, "smoke", *NAMED, "output.if_exists=resume")
    assert files_of(again) == files_of(complete_run)
    assert summary_of(again) == summary_of(complete_run)


def test_a_worker_killed_from_outside_fails_its_arm_alone(
    started, paused, run_here, complete_run, files_of, tmp_path: Path
):
    folder, env = paused
    process = started(tmp_path, "smoke", *NAMED, "workers=2", env=env("none"))
    runs = tmp_path / "quality" / ".mine.partial" / "runs"
    while not {"kv_only", "radix_branch_last"} <= {path.stem for path in runs.glob("*")}:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)
    children = " ".join(path.read_text() for path in Path(f"/proc/{process.pid}/task").glob("*/children"))
    os.kill(int(children.split()[0]), signal.SIGKILL)
    (folder / "go").touch()
    stderr = process.communicate()[1]
    assert process.returncode == 1
    (ours,) = [line for line in stderr.splitlines() if line.startswith("spanlab: ")]
    assert "1 of 7 arms failed, the others are reported: arms." in ours
    assert ": its process was killed, most likely because memory ran out" in ours
    assert files_of(run_here(tmp_path, "smoke", *NAMED, "output.if_exists=resume")) == files_of(complete_run)


def test_a_process_killed_while_it_draws_gets_a_sentence(run_here, monkeypatch, tmp_path: Path):
    monkeypatch.setattr("spanlab.report.style.write_figure", lambda *arguments: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(
        ValueError, match=r"^workers: a process was killed, most likely because memory ran out; expected"
    ):
        run_here(tmp_path, "smoke", *NAMED, "only=[none]", "output.figures=true")
    assert (tmp_path / "quality" / "mine" / "summary.json").exists()


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("error", "begins"),
    [
        (MemoryError(), "memory ran out outside an arm (no more memory); expected more memory"),
        (ImportError("libarrow.so: failed to map segment from shared object"), "memory ran out outside an arm (lib"),
        (FULL, "output.root: the disk is full"),
        (OSError(errno.EMFILE, "Too many open files"), "[Errno 24] Too many open files"),
    ],
)
def test_a_lack_outside_an_arm_gets_its_sentence(error: Exception, begins: str):
    assert is_user_error(error)
    assert sentence(error).startswith(begins)


@pytest.mark.parametrize("error", [FULL, KeyboardInterrupt()], ids=repr)
def test_run_stopped_while_it_draws_is_marked_until_resumed(error, run_here, monkeypatch, tmp_path: Path):
    drawing = ("smoke", *NAMED, "only=[none,kv_only]", "output.figures=true")

    def write_figure(draw, stem):
        stem.parent.mkdir(exist_ok=True)
        stem.with_name(f".{stem.name}.pdf.31360").touch()  # as a killed process leaves it
        raise error

    with monkeypatch.context() as broken:
        broken.setattr("spanlab.report.style.write_figure", write_figure)
        with pytest.raises(type(error)) as caught:
            run_here(tmp_path, *drawing, "executor=here")
    folder = tmp_path / "quality" / "mine"
    caught.value.__traceback__ = None  # its frames keep the run's lock
    said = f"{folder} has all results, but its figures or its report are unfinished: output.if_exists=resume goes on"
    assert caught.value.__notes__ == [said]
    if error is FULL:
        assert sentence(caught.value).endswith(f"; {said}")
    assert json.loads((folder / "summary.json").read_bytes())["report"] == "unfinished"
    assert [path for path in folder.rglob(".*") if path.is_file()] == []
    with pytest.raises(ValueError, match=re.escape(said)):
        _ = load(folder).report
    again = run_here(tmp_path, *drawing, "output.if_exists=resume")
    assert "report" not in json.loads((again / "summary.json").read_bytes())
    assert load(again).report.is_file()
    assert (again / "figures" / "pareto_ttft.png").is_file()
    assert list(again.parent.glob("mine.*")) == []


@pytest.mark.parametrize("name", ERRORS)
def test_each_lack_of_memory_is_described(name: str):
    error, ending = ERRORS[name]
    assert str(out_of_memory(error)).endswith(ending)
    assert is_user_error(error)
    assert sentence(error)


def test_a_lack_of_threads_is_a_users_error_and_others_are_faults():
    assert is_user_error(RuntimeError("can't start new thread"))
    assert sentence(RuntimeError("can't start new thread"))
    assert not is_user_error(RuntimeError("shapes do not match"))


@pytest.mark.parametrize("error", [BrokenProcessPool(), CancelledError(), TimeoutError(), OSError(), ValueError()])
def test_no_mistake_has_an_empty_sentence(error: Exception):
    assert is_user_error(error)
    assert sentence(error)


def test_any_other_error_still_ends_the_study(failing, run_here, tmp_path: Path):
    failing(RuntimeError("shapes do not match"), "dp_3")
    with pytest.raises(RuntimeError, match="shapes do not match"):
        run_here(tmp_path, "smoke", *NAMED)
    assert not (tmp_path / "quality" / "mine").exists()


def test_what_torch_says_where_memory_runs_out_is_understood():
    torch = pytest.importorskip("torch")
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50, dtype=torch.float64)
    assert out_of_memory(caught.value)
    assert out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")) is not None
    assert out_of_memory(RuntimeError("CUDA error: device-side assert triggered")) is None


def test_a_failure_is_kept_as_plain_json(failing, run_here, tmp_path: Path):
    failing(CARD, "boundary")
    with pytest.raises(ValueError, match="expected more memory"):
        run_here(tmp_path, "smoke", *NAMED, "only=[none,boundary]")
    summary = json.loads((tmp_path / "quality" / "mine" / "summary.json").read_bytes())
    assert summary["failed"] == {
        "boundary": "arms.boundary ran out of memory: CUDA out of memory; Tried to allocate 2.00 GiB"
    }
