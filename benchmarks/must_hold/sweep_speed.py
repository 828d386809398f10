"""Wall time of a sweep of many configurations: sizes of a store, one arm, a small workload.

    .venvs/sim/bin/python benchmarks/must_hold/sweep_speed.py [CONFIGURATIONS] [KEY=VALUE ...]

One process sweeps `store.total_gib` over CONFIGURATIONS (1,000) values of the entry `smoke`, with the arm `block_512`
alone, whose runs serve 48 requests for each of two seeds. Every point is a whole run with a folder, a page and its
records. Further keys are those of the entry. Timed from outside; writes `sweep_speed.json` beside this file.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from measurements import clean_commit, timed, write_results
from pages import ROOT

from spanlab.provenance import machine

KEYS = ("only=[block_512]", "load.rates_rps=[]", "load.arms=[]", "baseline=block_512", "output.figures=false")


def main() -> None:
    """Sweep, print and write down what it took."""
    rest = sys.argv[1:]
    count = next((int(one) for one in rest if one.isdigit()), 1000)
    keys = [*KEYS, *(one for one in rest if "=" in one)]
    sizes = ",".join(f"{2 + number / 100:.2f}" for number in range(count))
    with TemporaryDirectory() as folder:
        swept = f'sweep=["store.total_gib={sizes}"]'
        output = [f"output.root={folder}", "output.run=s"]
        command = ["bash", str(ROOT / "runall.sh"), "-cn", "smoke", *keys, *output, swept]
        wall_s = timed(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL))
        points = len(json.loads((Path(folder) / "quality" / "s" / "summary.json").read_bytes())["points"])
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    told = {
        "machine": machine(),
        "commit": clean_commit(),
        "keys": keys,
        "configurations": points,
        "wall_s": wall_s,
        "processor_s": used.ru_utime + used.ru_stime,
    }
    print(write_results(HERE / "sweep_speed.json", told))


if __name__ == "__main__":
    main()
