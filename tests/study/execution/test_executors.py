"""Processes of this machine: started by a parent that has computed with torch, and killed while they answer."""

import os
import subprocess
import sys

import pytest

COMPUTED = """
import torch
from spanlab.settings import ExecutorSettings
from spanlab.study.worker import executor

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
from joblib.externals.loky.process_executor import TerminatedWorkerError
from multiprocessing.connection import Connection
from spanlab.settings import ExecutorSettings
from spanlab.study.worker import executor

def die_while_answering(worker):
    def begin(connection, answer):
        os.write(connection.fileno(), struct.pack("!i", len(answer)) + bytes(answer[:SENT]))
        os.kill(os.getpid(), signal.SIGKILL)
    Connection._send_bytes = begin

def whole(worker):
    return worker

with executor(ExecutorSettings(), 7, 2) as processes:
    try:
        processes.submit(die_while_answering).result()
    except TerminatedWorkerError:
        print([processes.submit(whole).result() for _ in range(4)])
"""


def said_by(script: str) -> tuple[str, int]:
    """Output and exit code of a new process; it has two minutes."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    ended = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    return ended.stdout + ended.stderr, ended.returncode


def test_a_worker_computes_after_its_parent_did_on_two_threads():
    assert said_by(COMPUTED) == ("134217735.0\n", 0)


@pytest.mark.parametrize("sent", [0, 5])
def test_a_worker_that_dies_while_it_answers_is_replaced(sent: int):
    assert said_by(KILLED.replace("SENT", str(sent))) == ("[7, 7, 7, 7]\n", 0)
