"""The presets of SGLang decide as SGLang does, operation by operation."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from .replay import Replay
from .sequences import random_case

HERE = Path(__file__).parent
STORED = json.loads((HERE / "sglang_0_5_23.json").read_text())
CASES = list(zip(STORED["cases"], STORED["results"], strict=True))
ORACLE = os.environ.get("SPANLAB_ORACLE_SGLANG", str(HERE.parents[1] / ".venvs" / "vllm" / "bin" / "python"))


def compared(case, result):
    """What both sides print: trees that cannot list their nodes print none, models without states track none."""
    return [
        {key: value for key, value in row.items() if value is not None and (case["hybrid"] or key != "state")}
        for row in result
    ]


def check(case, expected):
    found = Replay(case).run(case["ops"])
    for op, ours, theirs in zip(case["ops"], compared(case, found), compared(case, expected), strict=True):
        assert {key: ours[key] for key in theirs} == theirs, op


@pytest.mark.parametrize(("case", "expected"), CASES)
def test_preset_equals_sglang_on_stored_cases(case, expected):
    check(case, expected)


@pytest.mark.oracle
@pytest.mark.parametrize("tree", ["python", "rust"])  # the newest release serves with the latter by default
def test_preset_equals_sglang_on_random_cases(tmp_path, tree):
    first, stop = map(int, os.environ.get("SPANLAB_ORACLE_SEEDS", "1000,1020").split(","))
    cases = [random_case(seed, hybrid) for hybrid in (False, True) for seed in range(first, stop)]
    asked, answer = tmp_path / "cases.json", tmp_path / "results.json"
    asked.write_text(json.dumps(cases))
    driver = [ORACLE, str(HERE / "sglang_driver.py"), "--tree", tree, str(asked), str(answer)]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment["PYTHONPATH"] = os.environ.get("SPANLAB_ORACLE_SGLANG_PATH", "")
    subprocess.run(driver, check=True, env=environment)
    for case, expected in zip(cases, json.loads(answer.read_text()), strict=True):
        check(case, expected)
