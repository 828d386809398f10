"""Processes of this machine start from a parent that has computed with torch."""

import os
import subprocess
import sys

SCRIPT = """
import torch
from spanlab.settings import ExecutorSettings
from spanlab.study.execution.executors import executor

def product(worker):
    import torch
    torch.set_num_threads(2)
    return float((torch.ones(512, 512) @ torch.ones(512, 512)).sum()) + worker

torch.set_num_threads(2)
product(0)
with executor(ExecutorSettings(), 7, 1) as processes:
    print(processes.submit(product).result())
"""


def test_a_worker_computes_after_its_parent_did_on_two_threads():
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, "-c", SCRIPT]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (ended.stdout, ended.returncode) == ("134217735.0\n", 0), ended.stderr
