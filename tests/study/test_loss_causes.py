"""A token counts as evicted only if it was evicted: in every arm, with and without limits of memory."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from spanlab.cli import compose
from spanlab.records import LOSS_CAUSES
from spanlab.study.numbers import ArmFiles
from spanlab.study.run import run_study

from .conftest import NO_LOAD

FEW = {
    "quality_sim": ("workload.documents=4", "workload.questions_per_document=3"),
    "pic_sim": ("workload.rag.requests=40",),
    "interval_sim": ("workload.synthetic.prompt_tokens=20000",),
}
FEW["hybrid_policies_sim"] = (*FEW["quality_sim"], "sweep=[]", "analyses=[summary]")
SHORT = ("executor.kind=here", "seeds=[0]", *NO_LOAD, "output.figures=false", "output.run=x", "tracking.kind=none")
UNLIMITED, TIGHT = "store=unlimited", "store.total_gib=2"
DEFAULT = [("quality_sim", "own_rules"), ("pic_sim", "presets")]
HYBRID = ("presets_hybrid", "checkpoints", "state_rules", "evictions")
ATTENTION = ("pic", "prefixes", "families_transformer", "evictions")
OTHERS = [("hybrid_policies_sim", None), ("interval_sim", None)]
OTHERS += [*(("quality_sim", arms) for arms in HYBRID), *(("pic_sim", arms) for arms in ATTENTION)]
CASES = [*DEFAULT, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS)]


def arms_of(root: Path, entry: str, *overrides: str) -> Iterator[tuple[str, int, list[dict[str, Any]], int]]:
    """Arm, bytes per token, records and evicted bytes of each arm of a small study."""
    study = compose(entry, [*SHORT, *overrides])
    folder = run_study(study, entry, root, show=False)
    for arm in study.chosen():
        files = ArmFiles.of_arm(folder, arm)
        records = [orjson.loads(line) for line in files.records.read_bytes().splitlines()]
        evicted = sum(run["evicted_bytes"] for run in files.finished())
        yield arm, study.model.kv_bytes_per_token, records, evicted


@pytest.mark.parametrize(("entry", "arms"), CASES)
@pytest.mark.parametrize("memory", [UNLIMITED, TIGHT])
def test_evicted_tokens_were_evicted(tmp_path: Path, entry: str, arms: str | None, memory: str):
    seen, shared = 0, list[dict[int, int]]()
    chosen = [] if arms is None else [f"arms={arms}"]
    for arm, token_bytes, records, evicted in arms_of(tmp_path, entry, *FEW[entry], *chosen, memory):
        booked = sum(record["lost_kv_evicted"] for record in records)
        assert booked * token_bytes <= evicted, arm
        if not evicted:
            assert not sum(record["lost_state_evicted"] for record in records), arm
        for record in records:
            lost = sum(record[f"lost_{cause}"] for cause in LOSS_CAUSES)
            assert record["reused_tokens"] + lost == record["prompt_tokens"], arm
        shared.append(seen_tokens(records))
        seen += evicted
    assert seen or memory == UNLIMITED  # a cap on states per path evicts without a limit of memory
    assert all(of_arm == shared[0] for of_arm in shared), "they follow from the requests alone"


def seen_tokens(records: list[dict[str, Any]]) -> dict[int, int]:
    return {record["request_id"]: record["seen_tokens"] for record in records}


def test_arms_over_tiers_have_seen_the_same(tmp_path: Path):
    overrides = ("workload.documents=3", "workload.questions_per_document=3", "sweep=[]")
    _, *others = shared = [seen_tokens(records) for _, _, records, _ in arms_of(tmp_path, "tiers_sim", *overrides)]
    assert sum(shared[0].values())
    assert all(other == shared[0] for other in others)
