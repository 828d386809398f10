"""Arms that choose passages, at toy size: records and bounds of the served prompts."""

from pathlib import Path

import pytest

from spanlab.cli import compose
from spanlab.study.run import run_study

TOY = (
    "workload.documents=2",
    "workload.rag.requests=40",
    "seeds=[0,1]",
    "load.rates_rps=[]",
    "load.arms=[]",
    "store.total_gib=0.5",
    "executor.kind=here",
    "output.figures=false",
    "tracking.kind=none",
)
ARMS = ("only=[none,radix,cached_order,pic]", "+strategy@arms.cached_order=cached_order", "arms.pic.passages.view=none")


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Path:
    study = compose("pic_sim", [*TOY, *ARMS])
    return run_study(study, "pic_sim", tmp_path_factory.mktemp("served"), show=False)


def test_records_tell_the_order_of_passages(served: Path, rows_of):
    rows = {arm: rows_of(served / "records" / f"{arm}.jsonl") for arm in ("radix", "cached_order", "pic")}
    assert all(sorted(row["passages"]) == list(range(6)) for row in rows["cached_order"])
    assert any(row["passages"] != list(range(6)) for row in rows["cached_order"])
    assert all(row["passages"] == [] for row in rows["pic"])
    assert all("passages" not in row for row in rows["radix"])


def test_ordering_by_the_cache_reuses_more(served: Path, summary_of):
    arms = summary_of(served)["arms"]
    radix, ordered = (arms[arm]["tokens"] for arm in ("radix", "cached_order"))
    assert ordered["prompt"] == radix["prompt"]
    assert ordered["reused"] > 2 * radix["reused"]


def test_bounds_are_those_of_what_is_served(served: Path, summary_of):
    arms = summary_of(served)["arms"]
    bounds = arms["cached_order"]["bounds"]
    assert bounds["offline_tokens"] is None
    assert bounds["infinite_prefix_tokens"] < arms["cached_order"]["tokens"]["reused"]
    assert arms["cached_order"]["tokens"]["reused"] <= bounds["infinite_any_position_tokens"]
    assert arms["cached_order"]["finds"] == "spans anywhere"
    alone = arms["pic"]
    assert alone["tokens"]["prompt"] < arms["radix"]["tokens"]["prompt"] / 3
    assert alone["tokens"]["reused"] <= alone["bounds"]["offline_tokens"] < alone["tokens"]["prompt"]
