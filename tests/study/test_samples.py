"""Rates, arms and popularity: all compared arms get the same draws."""

from collections import Counter
from pathlib import Path

import pytest

from spanlab.build import build_workload
from spanlab.cli import compose
from spanlab.study.jobs import build_arrivals

from .conftest import NO_LOAD

TOY = ("workload.documents=3", "workload.questions_per_document=8", "executor.kind=here", "seeds=[0,1]")


@pytest.mark.parametrize("kind", ["poisson", "gamma", "deterministic", "poisson_per_group"])
def test_another_rate_stretches_the_same_sample_path(kind: str, run_here, rows_of, tmp_path: Path):
    loads = ("load.rates_rps=[2, 32]", "load.arms=[none]", "load.seeds=[0,1]", "arrivals.rate_rps=8", "only=[none]")
    folder = run_here(tmp_path, "smoke", *TOY, *loads, f"arrivals={kind}")
    rows = rows_of(folder / "records" / "none.jsonl")

    def path(seed: int, rate: float) -> list[tuple[int, float]]:
        found = [row for row in rows if (row["seed"], row["rate_rps"]) == (seed, rate)]
        return sorted((row["request_id"], row["arrived_s"] * rate) for row in found)

    for seed in (0, 1):
        for rate in (2.0, 32.0):
            assert [request for request, _ in path(seed, rate)] == [request for request, _ in path(seed, 8.0)]
            stretched = [unit for _, unit in path(seed, rate)]
            assert stretched == pytest.approx([unit for _, unit in path(seed, 8.0)], abs=1e-7)
    if kind != "deterministic":
        assert path(0, 8.0) != path(1, 8.0)


def test_every_arm_sees_the_same_arrivals(run_here, rows_of, tmp_path: Path):
    folder = run_here(tmp_path, "smoke", *TOY, *NO_LOAD)
    seen = {
        tuple(sorted((row["seed"], row["request_id"], row["arrived_s"]) for row in rows_of(path)))
        for path in folder.glob("records/*.jsonl")
    }
    assert len(seen) == 1


def test_a_subset_of_arms_has_the_records_of_the_full_run(run_here, files_of, tmp_path: Path):
    full = files_of(run_here(tmp_path / "full", "smoke", *TOY))
    some = files_of(run_here(tmp_path / "some", "smoke", *TOY, "only=[boundary,dp_3]"))
    assert list(some) == ["records/boundary", "records/dp_3", "runs/boundary", "runs/dp_3"]
    assert some.items() <= full.items()


def test_more_seeds_keep_the_records_of_the_first(run_here, rows_of, tmp_path: Path):
    few = rows_of(run_here(tmp_path / "few", "smoke", *TOY, *NO_LOAD) / "records" / "dp_3.jsonl")
    many = rows_of(run_here(tmp_path / "many", "smoke", *TOY, *NO_LOAD, "seeds=[0,1,2]") / "records" / "dp_3.jsonl")
    assert [row for row in many if row["seed"] < 2] == few
    assert len(many) == 3 * len(few) // 2


def drawn(*overrides: str, seed: int = 0) -> list[int]:
    """The group of each request in the order of arrival."""
    study = compose("quality_sim", ["workload.popularity.requests=2000", *overrides])
    requests = build_workload(study.workload, "unused").requests
    return [request.group_id for request in build_arrivals(study, requests, seed, study.arrivals.rate_rps)]


def test_popularity_draws_as_many_requests_as_asked(run_here, rows_of, summary_of, tmp_path: Path):
    popular = ("workload.popularity.requests=40", "workload.popularity.zipf=1", "only=[none,boundary]", *NO_LOAD)
    folder = run_here(tmp_path, "smoke", *TOY, *popular)
    for arm in ("none", "boundary"):
        rows = rows_of(folder / "records" / f"{arm}.jsonl")
        assert Counter(row["seed"] for row in rows) == {0: 40, 1: 40}
        assert sorted(row["request_id"] for row in rows if row["seed"] == 0) == list(range(40))
    assert summary_of(folder)["arms"]["none"]["requests"] == 80


def test_zipf_asks_about_few_documents_most_of_the_time():
    even, skewed = (Counter(drawn(f"workload.popularity.zipf={s}")) for s in (0, 1.5))
    weights = [rank**-1.5 for rank in range(1, 49)]
    expected = 2000 * weights[0] / sum(weights)
    deviation = (expected * (1 - weights[0] / sum(weights))) ** 0.5
    assert abs(max(skewed.values()) - expected) < 4 * deviation
    assert len(even) == 48
    assert max(even.values()) < 2000 / 48 + 5 * (2000 / 48) ** 0.5


def test_the_same_seed_draws_the_same_requests_at_another_rate():
    slow, fast = (drawn("workload.popularity.zipf=1", f"arrivals.rate_rps={rate}") for rate in (1, 100))
    assert slow == fast
    assert drawn("workload.popularity.zipf=1", seed=1) != slow
