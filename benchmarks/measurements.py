"""Facts and files of a measurement: commit, machine, versions, seconds, results."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pages import ROOT

from spanlab.provenance import run_facts


def facts() -> dict[str, Any]:
    """Return commit, machine and versions."""
    return {key: value for key, value in run_facts(0.0).items() if key != "wall_s"}


def clean_commit(checkout: Path = ROOT) -> str:
    """Return the commit of a checkout; ValueError if files differ from it."""
    git = ["git", "-C", str(checkout)]
    if changed := subprocess.check_output([*git, "status", "--porcelain"], text=True):
        raise ValueError(f"{checkout} has changes, expected a clean checkout: {changed.split()[-1]}")
    return subprocess.check_output([*git, "rev-parse", "--short=12", "HEAD"], text=True).strip()


def timed(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds that one call takes."""
    began = clock()
    work()
    return clock() - began


def write_results(path: Path, results: dict[str, Any]) -> str:
    """Write the results as JSON and return their text."""
    text = json.dumps(results, indent=2)
    path.write_text(f"{text}\n")
    return text
