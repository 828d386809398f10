"""This project's scheduler as a driver of `conformance_cases`.

bash runall.sh -cn conformance_cases driver='.venvs/sim/bin/python benchmarks/conformance/drivers/spanlab_scheduler.py'
"""

from __future__ import annotations

import json
import sys
from typing import Any

from spanlab.schedule import PRESETS, Case, schedule


def steps_of(runs: list[dict[str, int]]) -> list[dict[str, int]]:
    """Return steps one by one; a run of empty ones is stored as its length."""
    return [step for run in runs for step in ([{}] * run["empty"] if "empty" in run else [run])]


def answer(case: dict[str, Any]) -> dict[str, Any]:
    """Return the decisions of the preset of the case's release."""
    if case["release"] not in PRESETS:
        return {"unsupported": f"release {case['release']}"}
    given = Case.model_validate(case["settings"] | {"requests": case["requests"]})
    made = schedule(given, PRESETS[case["release"]](given))
    return {"reused": made.reused_on_admission, "preemptions": made.preemptions, "steps": steps_of(made.steps)}


for line in sys.stdin:
    case = json.loads(line)
    print(json.dumps({"name": case["name"], **answer(case)}), flush=True)
