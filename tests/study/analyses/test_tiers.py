"""Studies with tiers: columns of their rows, tables and break-even lengths."""

import json
from pathlib import Path

import numpy as np
import pytest

from spanlab.analyses.tiers import break_even, tiers_of_points
from spanlab.cli import compose
from spanlab.records import Record, RunRow
from spanlab.report.sweep import SweepPoint
from spanlab.study.run import run_study

TOY = (
    "sweep=[]",
    "workload.documents=8",
    "workload.questions_per_document=4",
    "workload.max_prompt_tokens=8192",
    "store.total_gib=2",
    "output.figures=false",
    "executor.kind=here",
)


def run(root: Path, *overrides: str) -> Path:
    return run_study(compose("tiers_sim", [*TOY, *overrides]), "tiers_sim", root)


def rows(folder: Path, kind: str, arm: str) -> list[dict]:
    return [json.loads(line) for line in (folder / kind / f"{arm}.jsonl").read_bytes().splitlines()]


@pytest.fixture(scope="module")
def slow(tmp_path_factory) -> Path:
    return run(tmp_path_factory.mktemp("slow"), "store.tiers.host.bandwidth_gb_s=1")


def test_a_slow_tier_finds_more_and_answers_later(slow: Path):
    """As reported of a real system: hits and TTFT rise together; the break-even rule loads nothing."""
    summary = json.loads((slow / "summary.json").read_bytes())
    arms = summary["tiers"]["arms"]
    alone, always, break_even = (arms[name] for name in ("device_alone", "load_always", "break_even"))
    assert always["token_hit_rate"] > 2 * alone["token_hit_rate"]
    assert always["ttft_mean_s"] > 2 * alone["ttft_mean_s"]
    assert break_even["ttft_mean_s"] == pytest.approx(alone["ttft_mean_s"])
    assert break_even["loaded_share"] == 0 < break_even["declined_share"]
    assert always["critical_load_s"] > always["ttft_mean_s"] / 2


def test_columns_of_tiers_stand_where_tiers_are(slow: Path):
    tier_columns = {"loaded_tokens", "declined_tokens", "critical_load_s", "loaded_bytes"}
    assert set(rows(slow, "records", "device_alone")[0]) == set(Record.__dataclass_fields__)
    assert set(rows(slow, "records", "load_always")[0]) == set(Record.__dataclass_fields__) | tier_columns
    run_fields = {*RunRow.__dataclass_fields__, "records_end"} - {"replicas"}  # of one engine
    assert set(rows(slow, "runs", "device_alone")[0]) == run_fields
    assert set(rows(slow, "runs", "load_always")[0]) == run_fields | {"tiers"}


def test_bytes_of_records_are_those_of_the_tier(slow: Path):
    records, (row,) = rows(slow, "records", "load_always"), rows(slow, "runs", "load_always")
    (tier,) = row["tiers"]
    assert tier["loaded_bytes"] == sum(record["loaded_bytes"]["host"] for record in records) > 0
    assert tier["resident_peak_bytes"] <= tier["capacity_bytes"]
    token = compose("tiers_sim", [*TOY]).model.kv_bytes_per_token
    assert tier["loaded_bytes"] == token * sum(record["loaded_tokens"] for record in records)


def test_bounds_count_the_memory_of_tiers(slow: Path):
    arms = json.loads((slow / "summary.json").read_bytes())["arms"]
    assert all(arm["tokens"]["reused"] <= arm["bounds"]["offline_tokens"] for arm in arms.values())
    assert arms["device_alone"]["bounds"]["offline_tokens"] < arms["load_always"]["bounds"]["offline_tokens"]


def test_points_of_a_sweep_show_hits_and_ttft(slow: Path):
    summary = json.loads((slow / "summary.json").read_bytes())
    key = "store.tiers.host.bandwidth_gb_s"
    points = [SweepPoint(key, rate, "run", summary, settings={key: f"{rate:g}"}) for rate in (1.0, 2.0)]
    findings = tiers_of_points(points)
    (table,) = findings.tables
    arms = summary["tiers"]["arms"]
    assert [row[1].value for row in table.rows] == [*arms, *arms]
    assert [row[2].value for row in table.rows[:3]] == [arm["token_hit_rate"] for arm in arms.values()]
    assert table.rows[0][-1].text == f"host {summary['tiers']['break_even_tokens']['host']:,}"
    hits, ttft = findings.figures["tiers_1"]().axes
    for axes, name, factor in ((hits, "token_hit_rate", 100), (ttft, "ttft_mean_s", 1000)):
        drawn = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
        assert drawn == {arm: [factor * entry[name]] * 2 for arm, entry in arms.items()}


def test_break_even_lengths_fall_with_the_bandwidth():
    lengths = []
    for rate in (1, 6, 20, 50, 400):
        study = compose("tiers_sim", [*TOY, f"store.tiers.host.bandwidth_gb_s={rate}"])
        lengths.append(break_even(study)["host"])
    ordered = [np.inf if length is None else length for length in lengths]
    assert ordered == sorted(ordered, reverse=True)
    assert lengths[0] is None or lengths[0] > 100_000
    assert lengths[-1] < 1_000


def test_quantised_tiers_say_that_answers_change(tmp_path: Path):
    settings = ("only=[load_always]", "store.tiers.host.gib=1", "store.tiers.host.action=quantise")
    folder = run(tmp_path, *settings, "store.tiers.host.quantise_to=int4", "baseline=load_always")
    summary = json.loads((folder / "summary.json").read_bytes())
    assert any("answers change" in caveat for caveat in summary["caveats"])
    assert summary["tiers"]["arms"]["load_always"]["tiers"][0]["quantised_blocks"] > 0
