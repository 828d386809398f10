"""Value of perfect eviction on synthetic arms, and its table and figure."""

import numpy as np
import pytest

from spanlab.analyses.base import MeasuredArm
from spanlab.analyses.perfect_eviction import arms_table, draw_perfect_eviction, perfect_eviction, points_table
from spanlab.report.sweep import SweepPoint

from ..support.figures import PROVENANCE

SECONDS = 1.0 + np.random.default_rng(0).random((2, 30))


def arm(name: str, hits: float, factor: float, verdict: str = "steady") -> MeasuredArm:
    """An arm whose requests all take `factor` times as long as those of the baseline, and as much more work."""
    summary = {
        "stationarity": {"verdict": verdict},
        "ttft_s": {"mean": None if verdict == "saturated" else factor * float(SECONDS.mean())},
        "token_hit_rate": hits,
        "utilisation": 0.4 * factor,
        "tokens": {"prompt": 1_000},
        "bounds": {"offline_tokens": 700, "regret_points": 70 - 100 * hits, "least_ttft_s": 0.5, "ttft_regret_s": 0.2},
    }
    return MeasuredArm(name, summary, factor * SECONDS)


def compare(verdict: str = "steady"):
    arms = [arm("lru", 0.3, 1.0, verdict), arm("sieve", 0.35, 0.9), arm("fifo", 0.2, 1.2)]
    clairvoyants = [arm("belady_size", 0.5, 0.6), arm("belady", 0.65, 0.5)]
    return perfect_eviction([*arms, *clairvoyants], "lru", {"belady", "belady_size"})


def test_the_best_of_each_kind_are_compared():
    worth = compare()
    assert [worth.usual.arm, worth.best.arm, worth.known.arm] == ["lru", "sieve", "belady"]
    assert (worth.bound, worth.least_s, worth.known.regret_points) == (0.7, 0.5, pytest.approx(5.0))
    assert (worth.gain.mean, worth.throughput) == (pytest.approx(2.0), pytest.approx(2.0))


def test_a_growing_queue_has_no_gain_of_ttft():
    worth = compare("saturated")
    assert worth.gain is None
    assert worth.throughput == pytest.approx(2.0)
    assert arms_table(worth.plain()).title == "Perfect eviction: TTFT –, throughput 2.00 ×"


def point(workload: str, gib: str) -> SweepPoint:
    summary = PROVENANCE | {"perfect_eviction": compare().plain()}
    return SweepPoint("workload store.total_gib", "", "", summary, "", {"workload": workload, "store.total_gib": gib})


def test_points_become_rows_and_panels():
    points = [point(workload, gib) for workload in ("quality", "rag") for gib in ("8", "16")]
    table = points_table("worth", points)
    assert [row[0].value for row in table.rows][1] == "workload=quality store.total_gib=16"
    values = dict(zip([column.name for column in table.columns], [cell.value for cell in table.rows[0]], strict=True))
    assert (values["known"], values["bound"], values["gain_of_throughput"]) == (0.65, 0.7, pytest.approx(2.0))
    upper, other, lower, _ = draw_perfect_eviction(points).axes
    assert [axes.get_title(loc="left") for axes in (upper, other)] == ["quality", "rag"]
    clairvoyant = next(line for line in upper.lines if line.get_label() == "clairvoyant (belady)")
    assert clairvoyant.get_ydata().tolist() == [65.0, 65.0]
    assert [line.get_ydata().tolist() for line in lower.lines if line.get_label() == "bound"] == [[500.0, 500.0]]
    unnamed = [point("quality", "8"), point("quality", "16")]
    named = [
        SweepPoint(unnamed_point.axis, "", "", unnamed_point.summary, "", {"order": "a"}) for unnamed_point in unnamed
    ]
    assert draw_perfect_eviction(named) is None
