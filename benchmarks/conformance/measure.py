"""Our schedule beside vLLM's own, request by request and step by step, over random workloads.

    .venvs/sim/bin/python benchmarks/conformance/measure.py RELEASE FIRST STOP [PYTHON]

Seeds FIRST to STOP of the `MAKERS` in `tests/oracle/vllm_cases.py` are scheduled by RELEASE, such as vllm_0_32, which
`bash tests/run.sh -m oracle` installs into `.venvs/vllm`, and by `spanlab -cn schedule`. PYTHON may be another one that
has that vLLM, or has it in `releases/RELEASE` of its environment. What vLLM decided is kept in `outputs/conformance`,
so that a second run only repeats ours. Writes `results_RELEASE.json` and the page beside it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from measurements import clean_commit, write_results
from pages import ROOT, fill_page, table

ORACLE = ROOT / "tests" / "oracle"
KEPT = ROOT / "outputs" / "conformance"
CHUNK = 300  # cases per start of vLLM
#: Makers of cases, and the row of the table that their cases belong to; of plain ones the kind decides.
MAKERS = {
    "make_case": "",
    "make_drafted_case": "attention, drafts",
    "make_eagle_case": "attention, drafts of EAGLE",
    "make_grouped_case": "hybrid, 2 to 4 groups",
    "make_inner_case": "hybrid, states inside chunks",
    "make_drafted_hybrid_case": "hybrid, drafts",
    "make_local_case": "windows, chunks, rings and states",
    "make_modules_case": "attention, drafts of several modules",
    "make_local_modules_case": "windows, chunks and rings, drafts of several modules",
    "make_async_case": "all, async scheduling",
    "make_async_drafted_case": "attention, drafts, async scheduling",
    "make_async_drafted_hybrid_case": "hybrid, drafts, async scheduling",
    "make_continued_case": "all, answers not yet delivered",
    "make_salted_case": "all, cache salts",
    "make_whole_case": "attention, prompts in one step each",
    "make_aborted_case": "all, aborts",
    "make_priority_case": "all, priorities",
    "make_limited_case": "all, limits of prompts' tokens per step",
}


def load_cases() -> Any:
    """The module that makes the cases; tests are no package."""
    spec = importlib.util.spec_from_file_location("vllm_cases", ORACLE / "vllm_cases.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def group_of(seed: int, case: dict[str, Any], kinds: list[str]) -> str:
    """The row of the table: attention or hybrid, with its kind of workload."""
    model = "hybrid" if case.get("mamba_mode") else "attention"
    return f"{model}, {random.Random(seed).choice(kinds)}"


def drive(release: str, python: Path, asked: Path, told: Path, code: Path | None = None) -> None:
    """Let vLLM decide about the cases of a file; `code` has its release, None: the `releases` of the environment."""
    before = code or python.parents[1] / "releases" / release
    environment = os.environ | ({"PYTHONPATH": str(before)} if before.is_dir() else {})
    subprocess.run([python, ORACLE / "vllm_driver.py", asked, told], check=True, env=environment)


def theirs(release: str, python: Path, stem: str, cases: dict[str, Any]) -> dict[str, Any]:
    """What vLLM decides; from the disk where it was asked before."""
    asked, told = KEPT / f"{stem}_cases.json", KEPT / f"{stem}_{release}.json"
    KEPT.mkdir(parents=True, exist_ok=True)
    asked.write_text(json.dumps(cases))
    if not told.exists():
        drive(release, python, asked, told)
    found: dict[str, Any] = json.loads(told.read_text())
    return found


def ours(release: str, stem: str) -> dict[str, Any]:
    """What we decide about the same file."""
    asked, told = KEPT / f"{stem}_cases.json", KEPT / f"{stem}_ours.json"
    settings = [f"cases={asked}", f"out={told}", f"preset={release}"]
    subprocess.run(["bash", ROOT / "runall.sh", "-cn", "schedule", *settings], check=True)
    found: dict[str, Any] = json.loads(told.read_text())
    return found


def main() -> None:
    """Compare, count, write down."""
    release, first, stop = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    python = Path(sys.argv[4]) if len(sys.argv) > len(("", *"123")) else ROOT / ".venvs" / "vllm" / "bin" / "python"
    module, at = load_cases(), clean_commit()
    rows: dict[str, Counter[str]] = {}
    refused = 0  # cases with settings that this release does not take
    for (maker, name), start in product(MAKERS.items(), range(first, stop, CHUNK)):
        end = min(start + CHUNK, stop)
        cases = {str(seed): getattr(module, maker)(seed) for seed in range(start, end)}
        stem = f"{maker}_{start}_{end}"
        told, made = theirs(release, python, stem, cases), ours(release, stem)
        for decided in made.values():
            decided["steps"] = module.listed(decided["steps"])
        for seed, case in cases.items():
            if "refused" in told[seed]:
                refused += 1
                continue
            row = rows.setdefault(name or group_of(int(seed), case, list(module.KINDS)), Counter())
            count(row, told[seed], made[seed])
    system = f"vLLM {release.removeprefix('vllm_').replace('_', '.')}.0"
    measured = {"system": system, "commit": at, "seeds": [first, stop], "refused": refused}
    results = {**measured, "rows": dict(sorted(rows.items()))}
    write_results(HERE / f"results_{release}.json", results)
    publish(release, results)


def count(row: Counter[str], told: dict[str, Any], made: dict[str, Any]) -> None:
    """Add one case to its row."""
    row["cases"] += 1
    row["equal"] += told == made
    row["requests"] += len(told["reused_on_admission"])
    pairs = zip(told["reused_on_admission"], made["reused_on_admission"], strict=True)
    row["requests_equal"] += sum(a == b for a, b in pairs)
    row["steps"] += told["num_steps"]
    row["preemptions"] += told["preemptions"]


HEAD = ("workload", "cases", "equal in every step", "requests", "equal reuse", "steps", "preemptions")
COUNTS = ("cases", "equal", "requests", "requests_equal", "steps", "preemptions")


def publish(release: str, results: dict[str, Any]) -> None:
    """Write the table into the page beside this file."""
    total = sum(results["rows"].values(), Counter())
    counted = {**results["rows"], "**all**": total}
    rows = [(name, *(f"{row[key]:,}" for key in COUNTS)) for name, row in counted.items()]
    start, stop = results["seeds"]
    note = (
        f"{results['system']}, its own scheduler and KV-cache manager; commit {results['commit']}; "
        f"`benchmarks/conformance/measure.py {release} {start} {stop}`. Equal: tokens scheduled per request "
        "and step, tokens reused on admission, preemptions."
        + (f" Left out: {results['refused']} cases, whose settings it refuses." if results.get("refused") else "")
    )
    fill_page(HERE / "README.md", f"conformance_{release}", f"{table(HEAD, rows)}\n{note}\n")


if __name__ == "__main__":
    main()
