"""The entry pic_decay at toy size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spanlab.main import compose
from spanlab.study.run import run_study

TOY = (
    "workload.documents=3",
    "workload.rag.requests=100",
    "workload.rag.novel=30",
    "arrivals.known_first=30",
    "store.total_gib=0.75",
    "seeds=[0,1]",
    "only=[none,radix,cached_order,pic,pic_second_touch]",
    "workers=1",
)


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> Path:
    return run_study(compose("pic_decay", list(TOY)), "pic_decay", tmp_path_factory.mktemp("decay"), show=False)


def test_admission_prevents_what_novel_requests_displace(ran: Path):
    arms = json.loads((ran / "summary.json").read_bytes())["decay"]
    assert set(arms) == {"none", "radix", "cached_order", "pic", "pic_second_touch"}
    assert [one["mean"] for one in arms["none"]["speedup"]] == pytest.approx([1.0] * 11)
    assert arms["pic"]["reused"][-1]["mean"] < arms["pic_second_touch"]["reused"][-1]["mean"]
    assert arms["radix"]["reused"][-1]["mean"] < arms["cached_order"]["reused"][-1]["mean"]
    assert all(one["reused"][at]["mean"] <= one["seen"][at] for one in arms.values() for at in range(11))


def test_table_and_figure_are_written(ran: Path):
    assert (ran / "figures" / "decay.png").stat().st_size > 10_000
    rows = (ran / "tables" / "decay.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["arm", "radix", "cached_order", "pic", "pic_second_touch"]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (["arrivals=poisson"], "arrivals.kind=poisson with analyses=decay: expected novel_stream"),
        (["only=[pic]"], "baseline=none with analyses=decay: expected one of the arms that run"),
    ],
)
def test_decay_without_a_stream_or_baseline_is_refused(override: list[str], expected: str):
    with pytest.raises(ValueError, match="^" + expected):
        compose("pic_decay", override)
