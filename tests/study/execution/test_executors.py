"""Processes of this machine: started by a parent that has computed with torch, and killed while they answer."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from spanlab.errors import is_user_error
from spanlab.registry import load_plugins
from spanlab.settings import ExecutorSettings
from spanlab.study import executor as executors
from spanlab.study.executor import StoppedError, check_active, executor

COMPUTED = """
import torch
from spanlab.settings import ExecutorSettings
from spanlab.study.executor import executor

def product(worker):
    import torch
    torch.set_num_threads(2)
    return float((torch.ones(512, 512) @ torch.ones(512, 512)).sum()) + worker

torch.set_num_threads(2)
product(0)
with executor(ExecutorSettings(), 7, 1) as processes:
    print(processes.submit(product).result())
"""


KILLED = """
import os, signal, struct
from multiprocessing.connection import Connection
from spanlab.settings import ExecutorSettings
from spanlab.study.executor import ProcessKilledError, executor

def die_while_answering(worker):
    def begin(connection, answer):
        os.write(connection.fileno(), struct.pack("!i", len(answer)) + bytes(answer[:SENT]))
        os.kill(os.getpid(), signal.SIGKILL)
    Connection._send_bytes = begin

def whole(worker):
    return worker

for SENT in (0, 5):
    with executor(ExecutorSettings(), 7, 2) as processes:
        try:
            processes.submit(die_while_answering).result()
        except ProcessKilledError:
            print([processes.submit(whole).result() for _ in range(4)])
"""


def said_by(script: str) -> tuple[str, int]:
    """Output and exit code of a new process; it has two minutes."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    ended = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    return ended.stdout + ended.stderr, ended.returncode


def test_a_worker_computes_after_its_parent_did_on_two_threads():
    assert said_by(COMPUTED) == ("134217735.0\n", 0)


def test_a_worker_that_dies_while_it_answers_is_replaced():
    assert said_by(KILLED) == (2 * "[7, 7, 7, 7]\n", 0)


@pytest.fixture
def spawned(simulating: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes import all that they need, as those that replace a killed one."""
    monkeypatch.setattr(executors, "_can_fork", lambda: False)


@pytest.mark.usefixtures("spawned")
def test_fresh_processes_give_the_bytes_of_forks(toy: Callable[..., Path], files_of):
    few = ("only=[none,boundary]", "workers=1")
    assert files_of(toy(*few, below="spawned")) == files_of(toy(*few, "executor=here", below="here"))


@pytest.mark.usefixtures("spawned")
def test_a_fresh_process_reads_objects_of_plugins(tmp_path: Path):
    plugin = tmp_path / "things.py"
    plugin.write_text("class Thing(int): pass\n\ndef five(): return Thing(5)\n")
    load_plugins([str(plugin)])
    (five,) = [module.five for name, module in sys.modules.items() if name.startswith("plugin_things_")]
    with executor(ExecutorSettings(), five(), 1, [str(plugin)]) as processes:
        assert processes.submit(lambda worker, other: type(other)(worker + other), five()).result() == 10
    load_plugins([])


class TwoArgumentsError(ValueError):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


def test_an_error_that_cannot_be_sent_keeps_its_text():
    def fail(worker: int, kind: type[Exception]) -> None:
        raise kind("one", "two")

    class KeyedError(RuntimeError):
        def __init__(self, first: str, second: str) -> None:
            super().__init__(f"{first} and {second}")

    with executor(ExecutorSettings(), 7, 1) as processes:
        user, program = (processes.submit(fail, kind).exception() for kind in (TwoArgumentsError, KeyedError))
        assert processes.submit(lambda worker: worker).result() == 7
    # where distributed is loaded, errors of any class can be sent
    assert (str(user).removeprefix("TwoArgumentsError: "), is_user_error(user)) == ("one and two", True)
    assert (str(program).removeprefix("KeyedError: "), is_user_error(program)) == ("one and two", False)
    assert "in fail" in str(user.__cause__)


def test_work_in_this_process_ends_with_its_study():
    def work(worker: list[bool]) -> None:
        worker.append(True)
        while True:
            check_active()
            time.sleep(0.001)

    started: list[bool] = []
    here = executor(ExecutorSettings("here"), started, 1)
    running = here.submit(work)
    while not started:
        time.sleep(0.001)
    here.__exit__(KeyboardInterrupt)
    assert isinstance(running.exception(), StoppedError)
