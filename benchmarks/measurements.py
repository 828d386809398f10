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

WIDTH = 100  # characters of a line of JSON


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
    """Write the results as JSON and return their text; what fits in a line takes one."""
    text = json_lines(results)
    path.write_text(f"{text}\n")
    return text


def json_lines(value: Any, indent: int = 0, used: int = 0) -> str:
    """Return a value as JSON with lines of at most 100 characters, where its texts and keys allow that.

    `indent`  spaces before the lines of the value's items
    `used`    characters of the line in which the value begins
    """
    line = json.dumps(value)
    if not value or not isinstance(value, dict | list | tuple) or used + len(line) < WIDTH:
        return line
    inner, opening, closing = indent + 2, *("{}" if isinstance(value, dict) else "[]")
    pairs = value.items() if isinstance(value, dict) else (("", item) for item in value)
    heads = [f"{json.dumps(str(key))}: " if key else "" for key, _ in pairs]
    items = value.values() if isinstance(value, dict) else value
    lines = [
        f"{' ' * inner}{head}{json_lines(item, inner, inner + len(head))}"
        for head, item in zip(heads, items, strict=True)
    ]
    return "\n".join([opening, ",\n".join(lines), " " * indent + closing])
