"""Requests per second of a log that the simulator serves, here and in another checkout, in turns.

    .venvs/sim/bin/python benchmarks/must_hold/log_speed.py LOG OTHER [PAIRS] [KEY=VALUE ...]

LOG is a Mooncake trace, OTHER a checkout of another commit. Each run is a process of its own: it loads the log, then
simulates one arm (512-token blocks by hash in 64 GiB, if no key says otherwise) with a full record per request; the
simulation alone is timed, in seconds of the processor, for other programs may run. Records must be equal to the byte.
Prints the ratio, this ÷ other, with its 95 % interval over PAIRS (5), and writes `log_speed.json` beside this file.
`compiled=always` builds go by `SPANLAB_COMPILED`; each checkout uses the build that it has.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
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


def once(log: str, keys: list[str]) -> dict[str, Any]:
    """Serve the log in this process."""
    import orjson
    from rich.console import Console

    from spanlab import compiled
    from spanlab.main import compose
    from spanlab.study.execution.backends import Simulator
    from spanlab.study.execution.jobs import Job
    from spanlab.study.prepare import load_workload

    study = compose("config", [*KEYS, f"+workload.path={log}", *keys])
    began = time.process_time()
    with TemporaryDirectory() as folder:
        requests = list(load_workload(study, "speed", Path(folder), Console(quiet=True)).requests)
    loaded = time.process_time()
    longest = max(request.num_tokens + request.output_len for request in requests)
    job = Job(study.arms["arm"], requests, study.batch, 0, None, 0, longest, 0, Path(os.devnull))
    records = sha256()
    row = Simulator(study).run(job, lambda record: records.update(orjson.dumps(record)))
    return {
        "load_s": loaded - began,
        "simulate_s": time.process_time() - loaded,
        "requests": len(requests),
        "steps": row.steps,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "compiled": compiled.is_used(),
        "records": records.hexdigest()[:16],
    }


def in_checkout(checkout: Path, log: str, keys: list[str]) -> dict[str, Any]:
    """Serve the log in a new process of a checkout."""
    roots = ":".join(str(checkout / name) for name in ("src", "sim", "kernels"))
    command = [sys.executable, str(HERE / "log_speed.py"), "once", log, *keys]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": roots}, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure in turns, print, write down."""
    from in_turns import commit
    from measure import machine

    from spanlab.stats import paired_ratio_interval

    log, other, *rest = sys.argv[1:]
    keys = [one for one in rest if "=" in one]
    pairs = next((int(one) for one in rest if one.isdigit()), 5)
    checkouts = {"this": ROOT, "other": Path(other)}
    runs: dict[str, list[dict[str, Any]]] = {"this": [], "other": []}
    for pair in range(pairs):
        for name in sorted(checkouts, reverse=bool(pair % 2)):
            runs[name].append(in_checkout(checkouts[name], log, keys))
    assert len({run["records"] for both in runs.values() for run in both}) == 1, "the records differ"
    seconds = {name: [run["simulate_s"] for run in both] for name, both in runs.items()}
    ratio = paired_ratio_interval(seconds["this"], seconds["other"])
    results = {
        "machine": machine(),
        "log": Path(log).name,
        "keys": keys,
        "pairs": pairs,
        "commits": {name: commit(checkout) for name, checkout in checkouts.items()},
        "runs": runs,
        "requests_per_s": {name: runs[name][0]["requests"] / statistics.median(s) for name, s in seconds.items()},
        "ratio": {"mean": ratio.mean, "low": ratio.low, "high": ratio.high},
    }
    (HERE / "log_speed.json").write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps({key: results[key] for key in ("commits", "requests_per_s", "ratio")}, indent=2))


if __name__ == "__main__":
    if sys.argv[1] == "once":
        print(json.dumps(once(sys.argv[2], sys.argv[3:])))
    else:
        main()
