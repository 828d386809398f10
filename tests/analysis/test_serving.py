"""Metrics of serving against a plain count over stored token times, request by request."""

import math
import statistics
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from spanlab.analyses.serving import Gaps, Goal, pooled_percentile, queues, serving_values

GOALS = {"chat": Goal(0.5, 0.05, math.inf), "batch": Goal(math.inf, math.inf, 3.0), "strict": Goal(0.2, 0.03, 1.0)}


def made_runs(seed: int, count: int = 60) -> list[dict]:
    """Requests with the time of every token."""
    rng = np.random.default_rng(seed)
    requests = []
    for number in range(count):
        arrived = float(rng.uniform(0, 20))
        gaps = rng.choice([0.01, 0.02, 0.05, 0.3], rng.integers(0, 30))
        admitted = arrived + rng.uniform(0, 0.2)
        times = (admitted + rng.uniform(0.05, 0.5) + np.concatenate([[0.0], np.cumsum(gaps)])).tolist()
        prompt = int(rng.integers(1, 500))
        reused = int(rng.integers(0, prompt))
        requests.append(
            {"at": arrived, "in": admitted, "times": times, "prompt": prompt, "reused": reused, "id": number}
        )
    return requests


def columns_of(requests: list[dict]) -> dict[str, np.ndarray]:
    return {
        "arrived_s": np.array([request["at"] for request in requests]),
        "admitted_s": np.array([request["in"] for request in requests]),
        "first_token_s": np.array([request["times"][0] for request in requests]),
        "finished_s": np.array([request["times"][-1] for request in requests]),
        "prompt_tokens": np.array([request["prompt"] for request in requests]),
        "output_tokens": np.array([len(request["times"]) for request in requests]),
        "reused_tokens": np.array([request["reused"] for request in requests]),
    }


def gaps_of(requests: list[dict]) -> Gaps:
    counts = Counter(round(b * 1e9) - round(a * 1e9) for request in requests for a, b in pairwise(request["times"]))
    return Gaps(*(np.array(column) for column in zip(*sorted(counts.items()), strict=True)))


def expected(requests: list[dict]) -> dict[str, float]:
    """The definitions, one request after another, on lists of Python numbers."""
    ttfts, tpots, itls, e2els, queued, good = [], [], [], [], [], dict.fromkeys(GOALS, 0)
    for request in requests:
        times, ttft, e2el = request["times"], request["times"][0] - request["at"], request["times"][-1] - request["at"]
        tpot = 0.0
        if len(times) > 1:
            tpot = (e2el - ttft) / (len(times) - 1)
            tpots.append(tpot)
        itls += [b - a for a, b in pairwise(times)]
        ttfts.append(ttft)
        e2els.append(e2el)
        queued.append(request["in"] - request["at"])
        for name, goal in GOALS.items():
            good[name] += ttft <= goal.ttft_s and tpot <= goal.tpot_s and e2el <= goal.e2e_s
    duration = max(request["times"][-1] for request in requests) - min(request["at"] for request in requests)
    output, prompt = sum(len(request["times"]) for request in requests), sum(request["prompt"] for request in requests)
    metrics = {
        "request_throughput": len(requests) / duration,
        "output_throughput": output / duration,
        "total_token_throughput": (output + prompt) / duration,
        "token_hit_rate": sum(request["reused"] for request in requests) / prompt,
    }
    for name, values in (("ttft", ttfts), ("tpot", tpots), ("itl", itls), ("e2el", e2els), ("queue", queued)):
        metrics |= {
            f"mean_{name}_ms": statistics.fmean(values) * 1e3,
            f"std_{name}_ms": statistics.pstdev(values) * 1e3,
        }
        metrics[f"median_{name}_ms"] = statistics.median(values) * 1e3
        metrics |= {f"p{q}_{name}_ms": linear_percentile(values, q) * 1e3 for q in (90, 95, 99)}
    for name, count in good.items():
        metrics |= {f"request_goodput:{name}": count / duration, f"slo_attainment:{name}": count / len(requests)}
    return metrics


def linear_percentile(values: list[float], percent: float) -> float:
    ordered, position = sorted(values), (len(values) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(values) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


@pytest.mark.parametrize("seed", range(5))
def test_metrics_equal_count_over_token_times(seed: int):
    requests = made_runs(seed)
    metrics = serving_values(columns_of(requests), gaps_of(requests), GOALS)
    for name, value in expected(requests).items():
        assert metrics[name] == pytest.approx(value, rel=1e-6), name


def test_one_token_has_no_tpot_and_keeps_its_limit():
    columns = columns_of([{"at": 0.0, "in": 0.0, "times": [0.1], "prompt": 5, "reused": 0, "id": 0}])
    metrics = serving_values(columns, None, {"tight": Goal(1.0, 1e-9, 1.0)})
    assert "mean_tpot_ms" not in metrics
    assert "mean_itl_ms" not in metrics
    assert metrics["slo_attainment:tight"] == 1.0


@pytest.mark.parametrize("percent", [0, 1, 50, 90, 99, 99.9, 100])
def test_pooled_percentile_is_that_of_all_values(percent: float):
    rng = np.random.default_rng(1)
    for size in (1, 2, 3, 50):
        values, counts = np.sort(rng.random(size)), rng.integers(1, 9, size)
        every = np.percentile(np.repeat(values, counts), percent)
        assert pooled_percentile(values, counts, percent) == pytest.approx(every, rel=1e-12)


def test_queues_obey_littles_law():
    requests = made_runs(9)
    columns, over_time = columns_of(requests), queues(columns_of(requests))
    end = columns["finished_s"].max()
    values = over_time.values()
    waited = (columns["admitted_s"] - columns["arrived_s"]).sum()
    ran = (columns["finished_s"] - columns["admitted_s"]).sum()
    assert values["mean_waiting"] * end == pytest.approx(waited, rel=1e-9)
    assert values["mean_running"] * end == pytest.approx(ran, rel=1e-9)
    assert (over_time.waiting[-1], over_time.running[-1]) == (0, 0)
    time_s = over_time.time_s[len(over_time.time_s) // 2]
    inside = (columns["arrived_s"] <= time_s) & (columns["admitted_s"] > time_s)
    assert over_time.waiting[len(over_time.time_s) // 2] == inside.sum()


def test_server_without_report_has_no_hit_rate():
    columns = columns_of(made_runs(2))
    columns["reused_tokens"] = columns["reused_tokens"].astype(float)
    columns["reused_tokens"][3] = np.nan
    assert "token_hit_rate" not in serving_values(columns, None, {})
