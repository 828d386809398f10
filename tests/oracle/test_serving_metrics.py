"""Metrics of serving equal those of vLLM's own benchmark function.

`vllm_0_32_serving.json` holds what `calculate_metrics` of vLLM 0.32.0 returned for its cases; the marker `oracle` runs
it again over cases that nobody has seen.
"""

import json
import math
import os
import subprocess
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from spanlab.analyses.serving import Gaps, Goal, serving_values

HERE = Path(__file__).parent
KNOWN = json.loads((HERE / "vllm_0_32_serving.json").read_text())
PYTHON = Path(os.environ.get("SPANLAB_ORACLE_VLLM", HERE.parents[1] / ".venvs/vllm/bin/python"))
KEYS = {"ttft": "ttft_s", "tpot": "tpot_s", "e2el": "e2e_s"}


def make_case(seed: int) -> dict:
    """Requests with whole microseconds: several limits, outputs of one token among them."""
    rng = np.random.default_rng(seed)
    requests = []
    for _ in range(12):
        at = int(rng.integers(0, 5_000_000))
        steps = rng.integers(2_000, 90_000, rng.integers(0, 12))
        times = at + int(rng.integers(10_000, 900_000)) + np.concatenate([[0], np.cumsum(steps)])
        requests.append({"at": at / 1e6, "times": (times / 1e6).tolist(), "prompt": int(rng.integers(1, 4000))})
    limits = {"ttft": 600.0, "tpot": 50.0, "e2el": 900.0}
    chosen = [name for name in limits if rng.random() < 0.7] or ["ttft"]
    return {"requests": requests, "goodput_ms": {name: limits[name] for name in chosen}}


def ours(case: dict) -> dict[str, float]:
    requests = case["requests"]
    columns = {
        "arrived_s": np.array([one["at"] for one in requests]),
        "first_token_s": np.array([one["times"][0] for one in requests]),
        "finished_s": np.array([one["times"][-1] for one in requests]),
        "prompt_tokens": np.array([one["prompt"] for one in requests]),
        "output_tokens": np.array([len(one["times"]) for one in requests]),
        "reused_tokens": np.zeros(len(requests)),
    }
    counts = Counter(round((b - a) * 1e9) for one in requests for a, b in pairwise(one["times"]))
    gaps = Gaps(*(np.array(column) for column in zip(*sorted(counts.items()), strict=True)))
    limits = dict.fromkeys(KEYS.values(), math.inf)
    limits |= {KEYS[name]: limit / 1e3 for name, limit in case["goodput_ms"].items()}
    found = serving_values(columns, gaps, {"own": Goal(**limits)})
    return found | {"request_goodput": found["request_goodput:own"]}


def check(case: dict) -> None:
    found = ours(case)
    for name, value in case["metrics"].items():
        assert found[name] == pytest.approx(value, rel=1e-9), name


@pytest.mark.parametrize("number", range(len(KNOWN)))
def test_metrics_equal_vllms_printed_ones(number: int):
    assert set(KNOWN[number]["metrics"]) >= {"p99_itl_ms", "std_tpot_ms", "request_goodput", "median_e2el_ms"}
    check(KNOWN[number])


@pytest.mark.oracle
def test_metrics_equal_vllms_on_random_cases(tmp_path: Path):
    given, told = tmp_path / "cases.json", tmp_path / "told.json"
    given.write_text(json.dumps([make_case(seed) for seed in range(100, 140)]))
    subprocess.run([PYTHON, HERE / "vllm_metrics_driver.py", given, told], check=True)
    for case in json.loads(told.read_text()):
        check(case)
