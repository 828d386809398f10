"""The entry pic_decay at toy size."""

import json
from pathlib import Path

import numpy as np
import pytest

from spanlab.analyses.decay import streams_of
from spanlab.build import build_workload
from spanlab.cli import compose
from spanlab.study.numbers import read_scores
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
    assert [interval["mean"] for interval in arms["none"]["speedup"]] == pytest.approx([1.0] * 11)
    assert arms["pic"]["reused"][-1]["mean"] < arms["pic_second_touch"]["reused"][-1]["mean"]
    assert arms["radix"]["reused"][-1]["mean"] < arms["cached_order"]["reused"][-1]["mean"]
    assert all(arm["reused"][window]["mean"] <= arm["seen"][window] for arm in arms.values() for window in range(11))


def test_table_and_figure_are_written(ran: Path):
    assert (ran / "figures" / "decay.png").stat().st_size > 10_000
    rows = (ran / "tables" / "decay.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["arm", "radix", "cached_order", "pic", "pic_second_touch"]


def test_losses_of_gold_answers_are_reported_by_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("spanlab.analyses.decay.WINDOWS", 3)
    facts = "{collections: 9, passages: 4, sentences: 2, remarks: 0, hops: [1]}"
    toy = (
        "model=tiny",
        "engine.weights=random",
        "engine.threads=1",
        f"workload.questions={{requests: 24, novel: 6, k: 1, facts: {facts}}}",
        "arrivals.known_first=6",
        "store.total_gib=0.0008",
        "only=[none,pic]",
        "seeds=[3]",
    )
    study = compose("pic_decay_answers", toy)
    folder = run_study(study, "quality", tmp_path, show=False)
    arms = json.loads((folder / "summary.json").read_bytes())["decay"]
    assert [interval["mean"] for interval in arms["none"]["change"]] == [0.0] * 4
    full, pic = (read_scores(folder / "steps" / f"{arm}-seed3-rateNone.npz") for arm in ("none", "pic"))
    (stream,) = streams_of(study, build_workload(study.workload, "").requests)
    last = stream.ids[(stream.windows == 3) & ~stream.novel].tolist()
    expected = np.mean([pic[request]["nll"] - full[request]["nll"] for request in last])
    assert arms["pic"]["change"][-1]["mean"] == pytest.approx(expected)
    assert abs(expected) > 1e-4
    rows = (folder / "tables" / "decay.csv").read_text().splitlines()
    assert rows[0].endswith("change_before,change_after")


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
