"""Shuffled passages on a small hybrid model: spans are found where prefixes are not, under one budget."""

import json
from pathlib import Path

import pytest

from spanlab.records import LOSS_CAUSES

from .conftest import run

TOY = (
    "model=tiny-hybrid",
    "arms=hybrid_pic",
    "hardware=cpu2",
    "workload.documents=2",
    "workload.rag.requests=40",
    "arrivals.rate_rps=2",
    "seeds=[0]",
    "load.rates_rps=[]",
    "load.arms=[]",
    "executor.kind=here",
)
FORMS = ("pic_exact", "pic_exact_bf16", "pic_low_rank_4", "pic_scalar", "pic_sum", "pic_last", "pic_repaired")


@pytest.fixture(scope="module", params=[1.0, 0.03], ids=["room", "pressure"])
def study(request, tmp_path_factory) -> Path:
    return run(tmp_path_factory.mktemp("hybrid"), "pic_sim", *TOY, f"store.total_gib={request.param}")


def totals(folder: Path, arm: str) -> dict[str, int]:
    lines = (folder / "records" / f"{arm}.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    for row in rows:
        lost = sum(row[f"lost_{cause}"] for cause in LOSS_CAUSES)
        assert row["reused_tokens"] + lost == row["prompt_tokens"]
    names = ("prompt_tokens", "reused_tokens", "loaded_state_bytes", "captured_state_bytes")
    return {name: sum(row[name] for row in rows) for name in names}


def test_spans_are_reused_where_prefix_caching_finds_little(study: Path):
    prompt = totals(study, "none")["prompt_tokens"]
    prefix = max(totals(study, arm)["reused_tokens"] for arm in ("radix_branch_last", "boundary", "kv_only"))
    exact = totals(study, "pic_exact")["reused_tokens"]
    assert prefix < 0.2 * prompt < 0.4 * prompt < exact
    assert totals(study, "pic_exact")["loaded_state_bytes"] > 0


def test_smaller_maps_are_never_reused_less(study: Path):
    reused = {arm: totals(study, arm)["reused_tokens"] for arm in FORMS}
    assert reused["pic_scalar"] >= reused["pic_exact"]
    assert reused["pic_sum"] == reused["pic_last"]


def test_every_arm_stands_beside_its_bounds(study: Path):
    arms = json.loads((study / "summary.json").read_bytes())["arms"]
    for name, arm_summary in arms.items():
        bounds, reused = arm_summary["bounds"], arm_summary["tokens"]["reused"]
        assert reused <= bounds["infinite_any_position_tokens"]
        assert bounds["offline_tokens"] is None or reused <= bounds["offline_tokens"], name
        assert arm_summary["finds"] == ("spans anywhere" if name in FORMS else "prefixes")
