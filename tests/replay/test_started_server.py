"""A study starts a server by itself, and no process of it is left behind."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import orjson
import pytest

from spanlab.study.servers import guard

from ..conf.conftest import spanlab as _spanlab

spanlab = _spanlab  # a fixture
PLUGIN = Path(__file__).with_name("started_server.py")
LONGEST_S = 60.0
STUDY = (
    "replay",
    f"plugins=[{PLUGIN}]",
    "server.engine=small",
    "workload=synthetic",
    "workload.synthetic.groups=2",
    "workload.synthetic.requests_per_group=3",
    "workload.synthetic.prompt_tokens=40",
    "workload.output_tokens=2",
    "model=tiny",
    "arrivals=closed_loop",
    "seeds=[0]",
    "output.figures=false",
)


def folder(root: Path) -> Path:
    (path,) = root.glob("*/*/summary.json")
    return path.parent


def processes(word: str) -> list[int]:
    """Processes whose command has a word, by /proc."""
    running = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command, state = path.read_bytes(), path.with_name("stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if word.encode() in command and state != "Z":
            running.append(int(path.parent.name))
    return running


def wait_until(condition, what: str) -> None:
    deadline = time.monotonic() + LONGEST_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def test_study_starts_a_server_and_asks_it_to_end(spanlab, tmp_path: Path):
    """The worker of a study blocks SIGTERM, its server does not."""
    done = spanlab("-cn", *STUDY, f"output.root={tmp_path}", "server.arguments=[says_goodbye]")
    assert done.code == 0, done.err
    records = (folder(tmp_path) / "records" / "vllm_0_32.jsonl").read_bytes().splitlines()
    assert [orjson.loads(line)["output_tokens"] for line in records] == [2] * 6
    assert (folder(tmp_path) / "server" / "server.log").read_text().endswith("goodbye\n")
    assert processes("says_goodbye") == []


def test_server_that_does_not_start_is_one_sentence_with_the_end_of_its_log(spanlab, tmp_path: Path):
    done = spanlab("-cn", *STUDY, f"output.root={tmp_path}", "server.arguments=[ends_before]")
    assert done.code == 1
    assert "server.engine=small: the server did not start: exit status 3" in done.err
    assert "no memory for the model" in done.err


def test_server_that_ends_while_it_serves_is_one_sentence_and_finished_runs_are_kept(spanlab, tmp_path: Path):
    words = (*STUDY, f"output.root={tmp_path}", "seeds=[0,1]", "arrivals=poisson", "output.run=kept")
    done = spanlab("-cn", *words, "server.arguments=['ends_at=8']")
    assert done.code == 1
    assert "the server ended while requests were served: exit status 7" in done.err
    assert "out of luck" in done.err
    done = spanlab("-cn", *words, "output.if_exists=resume", "server.arguments=['ends_at=8']")
    assert done.code == 0, done.err
    rows = (tmp_path / "synthetic" / "kept" / "runs" / "vllm_0_32.jsonl").read_bytes().splitlines()
    assert [orjson.loads(row)["seed"] for row in rows] == [0, 1]


def test_port_in_use_is_one_sentence(spanlab, tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = spanlab("-cn", *STUDY, f"output.root={tmp_path}", f"server.port={port}")
    assert done.code == 1
    assert f"server.port={port}: expected a free port" in done.err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["server.engine=smal"], "server.engine=smal: expected one of"),
        (["base_url=http://host"], "base_url=http://host with server.engine=small: expected server.engine=none"),
        (["server.port=70000"], "server.port=70000: expected a whole number from 1 to 65535"),
        (["server.engine=none", "base_url=http://host", "server.port=80"], "server.port=80 with server.engine=none"),
        (
            ["server.engine=none", "base_url=http://host", "server.step_log=x"],
            "server.step_log=x: expected server.reset_path too",
        ),
        (["server.engine=vllm_cpu", "only=[blocks_256]", "baseline=blocks_256"], "expected vllm_0_32"),
        (
            ["server.engine=vllm_cpu", "arms.vllm_0_32.pool.block_size=48"],
            "arms.vllm_0_32.pool.block_size=48 with server.engine=vllm_cpu: expected a multiple of 32",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_one_sentence(spanlab, words, sentence):
    done = spanlab("-cn", *STUDY, *words, "--dry")
    assert done.code == 1
    assert sentence in done.err


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux alone")
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_no_process_outlives_a_study_that_is_ended(tmp_path: Path, end: int):
    mark = f"outlives_{end}"
    command = [sys.executable, "-m", "spanlab", "-cn", *STUDY, f"output.root={tmp_path}"]
    slow = ["workload.synthetic.requests_per_group=1000", "arrivals=poisson", "arrivals.rate_rps=1"]
    study = subprocess.Popen([*command, *slow, f"server.arguments=[stays,{mark}]"], stderr=subprocess.DEVNULL)
    try:
        of_all = ("study", "worker", "guard", "server", "descendant")
        wait_until(lambda: len(processes(mark)) == len(of_all), "the server started")
        os.kill(study.pid, end)
        study.wait(LONGEST_S)
        wait_until(lambda: not processes(mark), "every process ended")
    finally:
        study.kill()


def test_guard_ends_descendants_that_left_their_group(tmp_path: Path):
    sleep = "import time; time.sleep(600)"
    start = f"subprocess.Popen([sys.executable, '-c', '{sleep}', '{tmp_path}'], start_new_session=True)"
    command = [sys.executable, "-c", f"import subprocess, sys; {start}; {sleep}"]
    process = subprocess.Popen([sys.executable, "-I", guard.__file__, *command], stdin=subprocess.PIPE)
    wait_until(lambda: len(processes(str(tmp_path))) >= 3, "all processes started")
    process.stdin.close()
    process.wait(LONGEST_S)
    assert processes(str(tmp_path)) == []


def test_reuse_of_a_server_without_a_step_log_is_compared_by_simulation(spanlab, tmp_path: Path):
    words = ["rendezvous", *STUDY[1:], f"output.root={tmp_path}", "only=[blocks_256]", "baseline=blocks_256"]
    words += ["arms.blocks_256.block_size=8", "arrivals.clients=1"]
    done = spanlab("-cn", *words, "analyses.rendezvous.fail_on=[reuse]")
    assert done.code == 1
    assert "analyses.rendezvous.fail_on=['reuse']: not equal: reuse" in done.err
    (run,) = orjson.loads((folder(tmp_path) / "summary.json").read_bytes())["rendezvous"]["runs"]
    assert (run["requests"], run["hit_rate"], run["steps"]) == (6, 0.0, None)
    assert run["our_hit_rate"] > 0
    assert run["same_reuse"] < 6
