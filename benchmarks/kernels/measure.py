"""Time the kernels: position-independent attention in three forms, re-rotation, gather and copy.

    python benchmarks/kernels/measure.py [--device cpu|cuda] [--out FILE] [--only TEXT]

Every arm of a case is first held against the truth; one that does not agree is refused, not timed, and the script ends
with 1. Writes FILE (results_<device>.json beside this file, which also fills README.md) and prints a Markdown table.
Without a CUDA device it says "not measured: no CUDA device" and ends with 0.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from cases import CASES, DTYPES, ONE_SPAN, SDPA
from pages import fill_page, table
from timing import time_together

from spanlab.engine.load import measure as measure_rates
from spanlab.provenance import commit, machine

HEAD = (*("case", "arm", "median, ms", "quartiles, ms"), *("to one span", "to SDPA", "of copy rate", "of matmul rate"))


def measure(case: Any, dtype: torch.dtype, device: str) -> list[dict[str, Any]]:
    """Judge and time all arms of a case; a row for each, without times where it was refused."""
    work = case.build(dtype, device)
    verdicts = {name: arm.verdict(dtype) for name, arm in work.arms.items()}
    times = time_together({name: arm.call for name, arm in work.arms.items() if verdicts[name]}, device)
    rows = []
    for name, verdict in verdicts.items():
        row: dict[str, Any] = {"case": str(case), "arm": name, "verdict": asdict(verdict), "agrees": bool(verdict)}
        row |= {"moved_bytes": work.moved_bytes, "operations": work.operations}
        rows.append(row | times.get(name, {}))
    medians = {row["arm"]: row["median_s"] for row in rows if row["agrees"]}
    for row in rows:
        for key, other in (("to_one_span", ONE_SPAN), ("to_sdpa", SDPA)):
            if row["agrees"] and other in medians:
                row[key] = row["median_s"] / medians[other]
    return rows


def rates_of(dtype: torch.dtype, device: str) -> dict[str, float]:
    """What the machine can do: bytes copied and operations of a product per second."""
    rates = measure_rates(dtype, torch.device(device))
    return {"copy_bytes_per_s": rates.bytes_per_s, "matmul_operations_per_s": rates.flops_per_s}


def shares(row: dict[str, Any], rates: dict[str, float]) -> None:
    """Note in a row the share of both rates that it reached."""
    if row["agrees"]:
        row["of_copy_rate"] = row["moved_bytes"] / row["median_s"] / rates["copy_bytes_per_s"]
        row["of_matmul_rate"] = row["operations"] / row["median_s"] / rates["matmul_operations_per_s"]


def page(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    rates = results["rates"]
    lines = [
        f"Measured on {results['device']}: {results['machine']}, {results['threads']} threads, "
        f"load {results['load_before']:.1f} before, {results['dtype']}, "
        f"{', '.join(f'{name} {number}' for name, number in results['versions'].items())}, "
        f"commit {results['commit']}.",
        f"Copy {rates['copy_bytes_per_s'] / 1e9:.4g} GB/s (read and written), "
        f"matmul {rates['matmul_operations_per_s'] / 1e12:.3g} TFLOP/s.",
        "",
        table(HEAD, map(cells, results["rows"])),
    ]
    return "\n".join(lines)


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A row of the table."""
    if not row["agrees"]:
        verdict = row["verdict"]
        told = f"refused: error {verdict['error']:.1e} of {verdict['error_allowed']:.1e} allowed, "
        told += f"relative RMS {verdict['relative_rms']:.1e} of {verdict['relative_rms_allowed']:.0e}"
        return row["case"], row["arm"], told, "", "", "", "", ""
    median, *quartiles = (f"{1e3 * seconds:.3g}" for seconds in (row["median_s"], *row["quartiles_s"]))
    ratios = (f"{row[key]:.2f}" if key in row else "" for key in ("to_one_span", "to_sdpa"))
    of_rates = (f"{100 * row[key]:.0f} %" for key in ("of_copy_rate", "of_matmul_rate"))
    return row["case"], row["arm"], median, " to ".join(quartiles), *ratios, *of_rates


def facts(device: str) -> dict[str, Any]:
    """Machine, versions and commit."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    try:
        found["triton"] = version("triton")
    except PackageNotFoundError:
        found["triton"] = "absent"
    if device == "cuda":
        found["CUDA"] = str(torch.version.cuda)
    return {
        "device": device,
        "machine": torch.cuda.get_device_name() if device == "cuda" else machine(),
        "threads": torch.get_num_threads(),
        "load_before": os.getloadavg()[0],
        "versions": found,
        "commit": commit(),
    }


def run(device: str, only: str = "") -> dict[str, Any]:
    """Everything that is known of this device, of the cases whose name contains `only`."""
    dtype, rows = DTYPES[device], []
    known = facts(device)
    rates = rates_of(dtype, device)
    for case in (case for case in CASES[device] if only in str(case)):
        rows += measure(case, dtype, device)
        print(f"{case}: {len(rows)} arms so far", file=sys.stderr, flush=True)
    for row in rows:
        shares(row, rates)
    return known | {"dtype": str(dtype).removeprefix("torch."), "rates": rates, "rows": rows}


def main() -> int:
    """Measure, write, print; 1 where an arm was refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=tuple(CASES), default="cuda")
    parser.add_argument("--out", type=Path, help="where the JSON goes instead; README.md is left alone then")
    parser.add_argument("--only", default="", help="part of a case's name, for instance '32768 keys'")
    options = parser.parse_args()
    device = options.device
    if device == "cuda" and not torch.cuda.is_available():
        print("not measured: no CUDA device")
        return 0
    results = run(device, options.only)
    (options.out or HERE / f"results_{device}.json").write_text(json.dumps(results, indent=2) + "\n")
    if options.out is None:
        fill_page(HERE / "README.md", f"table:{device}", page(results))
    print(page(results))
    return 0 if all(row["agrees"] for row in results["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
