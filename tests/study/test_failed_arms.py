"""An arm that runs out of memory is marked, the others run on, and a resumed study tries it again."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from spanlab.shortage import ShortageError, shortage
from spanlab.study import backends

TOY = ("workload.documents=2", "workload.questions_per_document=4", "seeds=[0,1]", "load.rates_rps=[]", "load.arms=[]")
NAMED = (*TOY, "workers=1", "output.run=mine")
WRITTEN = 3  # records that a failing run still writes
CARD = RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB.")
ALLOCATOR = RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: 9 bytes")
ERRORS = {
    "the host": (MemoryError(), "no more memory"),
    "the card": (CARD, "CUDA out of memory; Tried to allocate 2.00 GiB"),
    "the allocator": (ALLOCATOR, "DefaultCPUAllocator: can't allocate memory: 9 bytes"),
    "the pool": (ShortageError("The pool of 4 pages has 1 free."), "The pool of 4 pages has 1 free"),
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
                written = []

                def write_some(record):
                    if len(written) == WRITTEN:
                        raise error
                    written.append(record)
                    write(record)

                return super().run(job, write_some)

            def recover(self):
                with recovered.open("a") as file:
                    file.write("once\n")

        monkeypatch.setitem(backends.BACKENDS, "sim", Failing)  # workers are forked and inherit it
        return recovered

    return fail


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run in which nothing fails."""
    from spanlab.main import compose
    from spanlab.study.run import run_study

    study = compose("smoke", ["output.figures=false", "tracking=none", *NAMED])
    return run_study(study, "smoke", tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("what", ERRORS)
def test_the_others_run_on_and_resume_tries_again(
    what: str, failing, whole, run_here, files_of, summary_of, capsys, monkeypatch, tmp_path: Path
):
    error, said = ERRORS[what]
    recovered = failing(error, "block_512", "dp_3")
    with pytest.raises(ValueError, match=r"^2 of 7 arms failed, the others are reported: arms.block_512 ran out"):
        run_here(tmp_path, "smoke", *NAMED)
    monkeypatch.undo()
    assert recovered.read_text() == "once\nonce\n"
    folder = tmp_path / "quality" / "mine"
    told, expected = summary_of(folder), summary_of(whole)
    assert list(told["failed"]) == ["block_512", "dp_3"]
    assert told["failed"]["dp_3"].startswith("arms.dp_3 ran out of memory: ")
    assert told["failed"]["dp_3"].endswith(said)
    assert told["arms"] == {arm: row for arm, row in expected["arms"].items() if arm not in told["failed"]}
    kept = (folder / "records" / "dp_3.jsonl").read_bytes().splitlines()
    assert kept == (whole / "records" / "dp_3.jsonl").read_bytes().splitlines()[: 8 + WRITTEN]
    table = capsys.readouterr().out
    assert [line.split() for line in table.splitlines() if line.startswith("dp_3")] == [["dp_3", "failed"]]
    assert told["failed"]["dp_3"] in " ".join(table.split())

    again = run_here(tmp_path, "smoke", *NAMED, "output.if_exists=resume")
    assert files_of(again) == files_of(whole)
    assert summary_of(again) == expected
    assert expected["failed"] == {}


def test_without_its_baseline_a_study_has_no_speedups_and_says_so(failing, run_here, summary_of, capsys, tmp_path):
    failing(MemoryError(), "none")
    with pytest.raises(ValueError, match=r"^1 of 7 arms failed"):
        run_here(tmp_path, "smoke", *NAMED)
    told = summary_of(tmp_path / "quality" / "mine")
    assert {arm["speedup"] for arm in told["arms"].values()} == {None}
    assert "no speedups, for none failed" in told["caveats"]
    assert "no speedups, for none failed" in capsys.readouterr().out


def test_figures_are_drawn_without_what_failed_and_name_it(failing, run_here, summary_of, tmp_path):
    failing(MemoryError(), "none")
    with pytest.raises(ValueError, match=r"^1 of 3 arms failed"):
        run_here(tmp_path, "smoke", *NAMED, "only=[none,radix_branch_last,boundary]", "output.figures=true")
    assert (tmp_path / "quality" / "mine" / "figures" / "pareto_ttft.png").stat().st_size > 0


def test_where_every_arm_fails_there_is_one_sentence_and_the_old_run_stays(failing, run_here, whole, tmp_path: Path):
    old = run_here(tmp_path, "smoke", *NAMED, "only=[none]")
    before = (old / "summary.json").read_bytes()
    failing(MemoryError(), "none", "boundary")
    with pytest.raises(ValueError, match=r"^no arm ran to its end, the first for this: arms.none ran out of memory"):
        run_here(tmp_path, "smoke", *NAMED, "only=[none,boundary]")
    assert (old / "summary.json").read_bytes() == before


def test_an_arm_whose_process_is_killed_fails_alone(run_here, whole, files_of, summary_of, monkeypatch, tmp_path: Path):
    class Killed(backends.Simulator):
        def run(self, job, write):
            if job.seed == 1 and job.steps.name.startswith("block_512-"):
                os.kill(os.getpid(), signal.SIGKILL)
            return super().run(job, write)

    monkeypatch.setitem(backends.BACKENDS, "sim", Killed)
    with pytest.raises(ValueError, match=r"^1 of 7 arms failed.*arms.block_512 ended with its process, which was kill"):
        run_here(tmp_path, "smoke", *NAMED)
    assert list(summary_of(tmp_path / "quality" / "mine")["failed"]) == ["block_512"]
    monkeypatch.undo()
    again = run_here(tmp_path, "smoke", *NAMED, "output.if_exists=resume")
    assert files_of(again) == files_of(whole)
    assert summary_of(again) == summary_of(whole)


def test_any_other_error_still_ends_the_study(failing, run_here, tmp_path: Path):
    failing(RuntimeError("shapes do not match"), "dp_3")
    with pytest.raises(RuntimeError, match="shapes do not match"):
        run_here(tmp_path, "smoke", *NAMED)
    assert not (tmp_path / "quality" / "mine").exists()


def test_what_torch_says_where_memory_runs_out_is_understood():
    torch = pytest.importorskip("torch")
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50, dtype=torch.float64)
    assert shortage(caught.value)
    assert shortage(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")) is not None
    assert shortage(RuntimeError("CUDA error: device-side assert triggered")) is None


def test_a_failure_is_kept_as_plain_json(failing, run_here, tmp_path: Path):
    failing(CARD, "boundary")
    with pytest.raises(ValueError, match="expected more memory"):
        run_here(tmp_path, "smoke", *NAMED, "only=[none,boundary]")
    told = json.loads((tmp_path / "quality" / "mine" / "summary.json").read_bytes())
    assert told["failed"] == {
        "boundary": "arms.boundary ran out of memory: CUDA out of memory; Tried to allocate 2.00 GiB"
    }
