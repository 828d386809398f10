"""The order of passages at toy size: figure and summaries agree with the records."""

from pathlib import Path

import pytest

from spanlab.cli import compose
from spanlab.report.sweep import SweepPoint, sweep_rows
from spanlab.study.sweep import run_sweep

ORDERS = ("shuffled", "ranked", "fixed")
ARMS = ("none", "block_hash_16", "radix", "pic", "lego_link_16", "cache_blend_15")
LLAMA_KV_BYTES = 2 * 32 * 8 * 128 * 2  # keys and values, layers, heads, width, bf16
KEY = "workload.rag.order"
TOY = (
    "workload.documents=2",
    "workload.rag.requests=40",
    "seeds=[0,1]",
    "load.rates_rps=[]",
    "load.arms=[]",
    "store.total_gib=0.5",
    "executor.kind=here",
)


@pytest.fixture(scope="module")
def swept(tmp_path_factory) -> Path:
    """A folder with one toy run of the entry for each order, and the sweep of them."""
    quiet = [*TOY, "output.figures=false", "tracking.kind=none", "output.run=pic_sim"]
    study = compose("pic_sim", [*quiet, f'sweep=["{KEY}={",".join(ORDERS)}"]'])
    point = lambda swept: compose("pic_sim", [*quiet, swept])  # noqa: E731
    return run_sweep(study, "pic_sim", tmp_path_factory.mktemp("swept"), point).parent


@pytest.fixture(scope="module")
def points(swept: Path, read_points) -> list[SweepPoint]:
    return read_points(swept / "pic_sim")


def rows(swept: Path, rows_of, order: str, arm: str) -> list[dict]:
    return rows_of(swept / f"pic_sim__{KEY}={order}" / "records" / f"{arm}.jsonl")


def test_the_sweep_shows_the_records_by_order(swept: Path, rows_of, points):
    rates = {(row.arm, row.value): row.token_hit_rate for row in sweep_rows(points)}
    for arm in ARMS:
        told = [rows(swept, rows_of, order, arm) for order in ORDERS]
        expected = [sum(r["reused_tokens"] for r in rs) / sum(r["prompt_tokens"] for r in rs) for rs in told]
        assert [rates[arm, order] for order in ORDERS] == pytest.approx(expected, rel=1e-12)
    assert rates["radix", "fixed"] > rates["radix", "shuffled"]


def test_every_order_asks_for_the_same_passages(swept: Path, rows_of):
    lengths = [
        sorted((row["seed"], row["request_id"], row["prompt_tokens"]) for row in rows(swept, rows_of, order, "none"))
        for order in ORDERS
    ]
    assert lengths[0] == lengths[1] == lengths[2]


def test_repairs_and_copies_are_summed_and_causes_make_the_prompt(swept: Path, rows_of, points):
    runs = points
    for run in runs:
        for arm, told in run.summary["arms"].items():
            found = rows(swept, rows_of, str(run.value), arm)
            tokens = told["tokens"]
            for name in ("repaired", "copied"):
                assert tokens[name] == sum(row[f"{name}_tokens"] for row in found)
            assert tokens["reused"] + sum(tokens["lost_by_cause"].values()) == tokens["prompt"]
            assert (tokens["repaired"] > 0) == (arm in ("lego_link_16", "cache_blend_15"))
            assert (tokens["copied"] > 0) == (arm == "cache_blend_15")


def test_copies_are_held_from_admission_to_the_last_token(swept: Path, rows_of, points):
    name = f"pic_sim__{KEY}=fixed"
    told = points[2].summary["arms"]["cache_blend_15"]
    makespan = {run["seed"]: run["makespan_s"] for run in rows_of(swept / name / "runs" / "cache_blend_15.jsonl")}
    held = [
        sum(
            row["copied_tokens"] * LLAMA_KV_BYTES * (row["finished_s"] - row["admitted_s"])
            for row in rows(swept, rows_of, "fixed", "cache_blend_15")
            if row["seed"] == seed
        )
        / makespan[seed]
        for seed in (0, 1)
    ]
    assert told["bytes"]["copied_mean"] == pytest.approx(sum(held) / 2, rel=1e-9)
    assert told["bytes"]["copied_mean"] > 0


def test_each_arm_has_the_bound_of_its_lookup(swept: Path, rows_of, points):
    for run in points:
        arms = run.summary["arms"]
        for arm, told in arms.items():
            found = rows(swept, rows_of, str(run.value), arm)
            prefixes = sum(min(r["seen_tokens"], r["prompt_tokens"] - 1) for r in found)
            anywhere = told["bounds"]["infinite_any_position_tokens"]
            assert told["own_bound_tokens"] == (prefixes if arm in ARMS[:3] else anywhere)
            assert told["finds"] == ("prefixes" if arm in ARMS[:3] else "spans anywhere")
            assert told["share_of_bound"] == told["tokens"]["reused"] / told["bound_tokens"] <= 1
        assert {told["bound_tokens"] for told in arms.values()} == {max(a["own_bound_tokens"] for a in arms.values())}
        assert arms["pic"]["own_bound_tokens"] > arms["radix"]["own_bound_tokens"]


def test_unknown_quality_is_reported_once_without_prefix_caches(run_here, summary_of, capsys, tmp_path: Path):
    for only, said in (("[none,radix]", 0), ("[none,pic,lego_link_16]", 1)):
        told = summary_of(run_here(tmp_path, "pic_sim", *TOY, f"only={only}"))
        unknown = [caveat for caveat in told["caveats"] if "how good the answers are" in caveat]
        assert len(unknown) == said
        assert " ".join(capsys.readouterr().out.split()).count("how good the answers are") == said
