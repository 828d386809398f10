"""Simulators as drivers of `conformance_cases`: how often each decides as vLLM did, and what it does not model.

    .venvs/sim/bin/python benchmarks/conformance/simulators.py

Installs those of `simulators.txt` into `outputs/conformance`, asks each for the cases of `RELEASE`, and writes
`simulators.json` and the table of the page beside it.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from measurements import clean_commit, write_results
from pages import ROOT, fill_page, table

from spanlab import api

RELEASE = "vllm_0_33"
OUT = ROOT / "outputs" / "conformance"
#: Name in the table by the file of the driver.
DRIVERS = {
    "spanlab_scheduler": "spanlab's scheduler",
    "dynamo_mocker": "mocker of NVIDIA Dynamo 1.6.1",
    "kvlint_blocks": "kvlint 0.1.1",
    "lru_blocks": "blocks and LRU alone, 52 lines",
}
CLAIMS = ("reused", "preemptions", "steps")


def installed() -> Path:
    """Return the folder of the foreign packages, which are installed if they are missing."""
    folder, pins = OUT / "packages", HERE / "simulators.txt"
    if not (folder / "kvlint").is_dir():
        install = f'"$uv" --quiet pip install --no-deps --require-hashes --target "{folder}" --requirements "{pins}"'
        script = f'source "{ROOT}/requirements/setup.sh"; find_python; find_uv; {install} --python "{sys.executable}"'
        subprocess.run(["bash", "-c", script], check=True)
    return folder


def counts_of(driver: str) -> dict[str, Any]:
    """Return the counts of one driver by kind."""
    words = (sys.executable, str(HERE / "drivers" / f"{driver}.py"))
    overrides = [f"driver={shlex.join(words)!r}", f"release={RELEASE}", f"output.root={OUT}", f"output.run={driver}"]
    spanlab = str(Path(sys.executable).with_name("spanlab"))
    subprocess.run([spanlab, "-cn", "conformance_cases", *overrides, "output.if_exists=replace"], check=True)
    kinds: dict[str, Any] = api.load(OUT / "conformance_cases" / driver).details["kinds"]
    return kinds


def publish(results: dict[str, Any]) -> None:
    """Write the tables into the page beside this file."""
    head = ("simulator", "cases", "modelled", "reuse equal", "of requests", "preemptions equal", "all steps equal")
    rows, reasons = [], []
    for driver, kinds in results["drivers"].items():
        total, name = kinds["all"], DRIVERS[driver]
        modelled = total["cases"] - sum(total["unsupported"].values())
        claims = [_share(total["equal"][claim], total["claimed"][claim]) for claim in CLAIMS]
        requests = _share(total["requests"]["equal"], total["requests"]["claimed"])
        rows.append((name, f"{total['cases']:,}", f"{modelled:,}", claims[0], requests, *claims[1:]))
        listed = [f"{reason} ({number:,})" for reason, number in total["unsupported"].items()]
        reasons += [f"- **{name}** does not model: {', '.join(listed)}."] if listed else []
        reasons += [
            f"- **{name}**, smallest difference of {claim}: {first['case']}, {first['difference']}."
            for claim, first in total["smallest"].items()
        ]
    note = f"Cases of {results['release']}; commit {results['commit']}; `benchmarks/conformance/simulators.py`."
    lines = "\n".join(reasons)
    fill_page(HERE / "README.md", "simulators", f"{table(head, rows)}\n{lines}\n\n{note}\n")


def _share(equal: int, claimed: int) -> str:
    return f"{equal:,} of {claimed:,}" if claimed else "–"


def main() -> None:
    """Ask every driver, and write the counts down."""
    commit = clean_commit()
    os.environ["PYTHONPATH"] = str(installed())
    results = {"release": RELEASE, "commit": commit, "drivers": {driver: counts_of(driver) for driver in DRIVERS}}
    write_results(HERE / "simulators.json", results)
    publish(results)


if __name__ == "__main__":
    main()
