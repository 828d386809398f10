"""Time and memory of a million requests: a Mooncake trace that repeats.

    .venvs/sim/bin/python benchmarks/must_hold/million.py LOG [REQUESTS] [KEY=VALUE ...]

LOG is a Mooncake trace. It is written again and again, each time one trace later, until there are REQUESTS (1,000,000).
One process of its own loads that log, then simulates one arm (512-token blocks by hash in 64 GiB, if no key says
otherwise) with a full record per request. Seconds are those of the processor, for other programs may run; peak memory
is the kernel's. Writes `million.json` beside this file.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from hashlib import sha256
from itertools import count, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson
from rich.console import Console

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from measurements import clean_commit, write_results

from spanlab import compiled
from spanlab.cli import compose
from spanlab.provenance import machine
from spanlab.study.backends import Simulator
from spanlab.study.jobs import Job
from spanlab.study.prepare import load_workload

KEYS = (
    "workload=log",
    "arrivals=as_given",
    "model=llama-3.1-8b",
    "hardware=h100",
    "store=gib_64",
    "+strategy@arms.arm=block_hash",
    "baseline=arm",
    "arms.arm.block_size=512",
    "tracking=none",
)


def repeated(rows: list[dict[str, object]]) -> Iterator[dict[str, object]]:
    """The rows of a trace without end; a trace lasts as long as it does, and one mean gap."""
    times = [int(str(row["timestamp"])) for row in rows]
    lasts = (times[-1] - times[0]) * len(rows) // (len(rows) - 1)
    for turn in count():
        for row, at in zip(rows, times, strict=True):
            yield row | {"timestamp": at + turn * lasts}


def once(log: str, keys: list[str]) -> dict[str, Any]:
    """Serve the log in this process."""
    gc.set_threshold(1_000_000)  # as the console script does
    study = compose("config", [*KEYS, f"+workload.path={log}", *keys])
    began = time.process_time()
    with TemporaryDirectory() as folder:
        requests = list(load_workload(study, "speed", Path(folder), Console(quiet=True)).requests)
    loaded = time.process_time()
    longest = max(request.num_tokens + request.output_len for request in requests)
    job = Job(study.arms["arm"], requests, study.batch, 0, None, 0, longest, 0, Path(os.devnull))
    records = sha256()
    row = Simulator(study).simulate(job, lambda record: records.update(orjson.dumps(record)))
    return {
        "load_s": loaded - began,
        "simulate_s": time.process_time() - loaded,
        "requests": len(requests),
        "steps": row.steps,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "compiled": compiled.is_used(),
        "records": records.hexdigest()[:16],
    }


def main() -> None:
    """Write the log, serve it, print and write down what it took."""
    log, *rest = sys.argv[1:]
    requests = next((int(one) for one in rest if one.isdigit()), 1_000_000)
    keys = [one for one in rest if "=" in one]
    rows = [orjson.loads(line) for line in Path(log).read_bytes().splitlines()]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "repeated.jsonl"
        with path.open("wb") as file:
            for row in islice(repeated(rows), requests):
                file.write(orjson.dumps(row) + b"\n")
        command = [sys.executable, __file__, "once", str(path), *keys]
        printed = subprocess.check_output(command, text=True)
    run = json.loads(printed.splitlines()[-1])
    told = {"machine": machine(), "commit": clean_commit(), "log": Path(log).name, "keys": keys, "run": run}
    print(write_results(HERE / "million.json", told))


if __name__ == "__main__":
    if sys.argv[1] == "once":
        print(json.dumps(once(sys.argv[2], sys.argv[3:])))
    else:
        main()
