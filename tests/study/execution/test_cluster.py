"""A study on a real Dask scheduler with a worker or two: the bytes of a local run, and what its failures say."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("distributed")

import distributed
from dask import config

from spanlab.cli import compose
from spanlab.study import executor
from spanlab.study.run import run_study

TOY = ("workload.documents=2", "workload.questions_per_document=4", "seeds=[0,1]", "output.run=mine")


@pytest.fixture(scope="module")
def dask() -> Iterator[Any]:
    """A scheduler with a worker process, which tries lost work once more."""
    with (
        config.set({"distributed.scheduler.allowed-failures": 1}),
        distributed.LocalCluster(n_workers=1, threads_per_worker=2, dashboard_address=None) as local_cluster,
    ):
        yield local_cluster


def run_on_cluster(dask: Any, root: Path, *overrides: str) -> Path:
    there = ("executor=dask", f"executor.address={dask.scheduler_address}")
    study = compose(
        "smoke", ["output.figures=false", "tracking.kind=none", "analyses=[summary]", *TOY, *there, *overrides]
    )
    return run_study(study, "smoke", root)


def test_a_scheduler_gives_the_bytes_of_this_machine(dask, run_here, files_of, summary_of, tmp_path: Path):
    here = run_here(tmp_path / "here", "smoke", *TOY, "workers=1")
    folder = run_on_cluster(dask, tmp_path / "there")
    assert files_of(folder) == files_of(here)
    assert summary_of(folder) == summary_of(here)
    assert (folder / "config.yaml").read_bytes() == (here / "config.yaml").read_bytes()


@pytest.mark.slow
def test_a_killed_worker_of_the_scheduler_fails_its_arm_alone(dask, run_here, files_of, summary_of, tmp_path: Path):
    def kill_in(arm: str) -> None:
        from spanlab.study import backends

        class Killed(backends.Simulator):
            def run(self, job, write):
                if arm and job.steps.name.startswith(f"{arm}-"):
                    os.kill(os.getpid(), signal.SIGKILL)
                return super().run(job, write)

        backends.BACKENDS["sim"] = Killed

    dask.scale(2)
    with distributed.Client(dask, set_as_default=False) as client:
        client.wait_for_workers(2)
        client.run(kill_in, "block_512")
        with pytest.raises(ValueError, match=r"^1 of 7 arms failed.*arms.block_512: its process was killed, "):
            run_on_cluster(dask, tmp_path)
        client.wait_for_workers(2)
        client.run(kill_in, "")
    assert list(summary_of(tmp_path / "quality" / "mine")["failed"]) == ["block_512"]
    again = run_on_cluster(dask, tmp_path, "output.if_exists=resume", "output.figures=true")
    assert list(again.glob("figures/*.png"))
    assert files_of(again) == files_of(run_here(tmp_path / "here", "smoke", *TOY))


def test_work_that_was_given_up_ends(dask):
    def work() -> None:
        while executor._is_executing():
            time.sleep(0.01)

    with distributed.Client(dask, set_as_default=False) as client:
        future = client.submit(work, pure=False)
        while not any(client.processing().values()):
            time.sleep(0.01)
        future.cancel()
        while any(client.run(lambda dask_worker: len(dask_worker.state.executing)).values()):
            time.sleep(0.01)


def test_a_scheduler_that_does_not_answer_gets_a_sentence(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(executor, "_CONNECT_S", 0.1)
    overrides = ("tracking.kind=none", *TOY, "executor=dask", "executor.address=tcp://127.0.0.1:9")
    with pytest.raises(ValueError, match=r"^executor.address=tcp://127.0.0.1:9: expected a Dask scheduler that "):
        run_study(compose("smoke", [*overrides]), "smoke", tmp_path)


def test_a_folder_that_a_worker_does_not_see_is_refused(dask, monkeypatch, tmp_path: Path):
    worker_state = executor._worker_state
    monkeypatch.setattr(executor, "_worker_state", lambda file: worker_state(Path("elsewhere")))
    with pytest.raises(ValueError, match=r"^output.root: expected a folder that all workers see, tcp://"):
        run_on_cluster(dask, tmp_path)


def test_workers_of_another_commit_are_refused(dask, monkeypatch, tmp_path: Path):
    monkeypatch.setattr(executor, "commit", lambda: "another")
    with pytest.raises(ValueError, match=r"^executor.address=.*: worker tcp://.* runs commit .*, expected another$"):
        run_on_cluster(dask, tmp_path)
