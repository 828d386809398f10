"""Studies of several replicas: their files, and the results of the analysis."""

import json
from collections import Counter
from pathlib import Path

import orjson
import pytest

from spanlab.cli import compose
from spanlab.study.run import run_study

SMALL = (
    "workload.chat_sessions.sessions=12",
    "workload.chat_sessions.turns=3",
    "only=[none,block_hash]",
    "seeds=[0,1]",
    "warmup_fraction=0",
    "sweep=[]",
    "tracking.kind=none",
    "output.figures=false",
    "executor.kind=here",
)


def run(root: Path, *overrides: str) -> tuple[Path, dict]:
    """The folder and the summary of a small study."""
    study = compose("replicas_sim", [*SMALL, *overrides])
    folder = run_study(study, "replicas_sim", root, show=False)
    return folder, json.loads((folder / "summary.json").read_text())


def lines(folder: Path, kind: str, arm: str) -> list[dict]:
    return [orjson.loads(line) for line in (folder / kind / f"{arm}.jsonl").read_bytes().splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, dict]:
    return run(tmp_path_factory.mktemp("replicas"), "replicas.routing=session_sticky", "replicas.count=3")


@pytest.mark.parametrize("arm", ["none", "block_hash"])
def test_the_analysis_agrees_with_records(finished, arm):
    folder, summary = finished
    records, entry = lines(folder, "records", arm), summary["replicas"]["arms"][arm]
    counted = Counter(record["replica"] for record in records)
    assert entry["requests"] == [counted[number] for number in range(3)]
    for number, rate in enumerate(entry["token_hit_rate"]):
        of_replica = [record for record in records if record["replica"] == number]
        reused, prompt = (sum(record[f"{key}_tokens"] for record in of_replica) for key in ("reused", "prompt"))
        assert rate == pytest.approx(reused / prompt)
    busy = entry["busy_fraction"]
    assert entry["busiest_over_mean"] == pytest.approx(max(busy) / (sum(busy) / 3))
    assert summary["arms"][arm]["busy_fraction"] == pytest.approx(sum(busy) / 3)


def test_utilisation_is_of_all_replicas(finished, tmp_path):
    _, triple = finished
    _, single = run(tmp_path, "replicas.count=1", "replicas.routing=null", "analyses=[summary]")
    shares = [study["arms"]["none"]["utilisation"] for study in (triple, single)]
    assert shares[0] == pytest.approx(shares[1] / 3, rel=0.2)


def test_one_replica_leaves_files_as_they_were(tmp_path):
    alone = ("replicas.count=1", "replicas.routing=null", "analyses=[summary]")
    routed = ("replicas.count=1", "replicas.routing=round_robin", "analyses=[summary]", "output.run=routed")
    folders = [run(tmp_path, *overrides)[0] for overrides in (alone, routed)]
    for kind in ("records", "runs"):
        first, second = ((folder / kind / "block_hash.jsonl").read_bytes() for folder in folders)
        assert first == second
        assert b"replica" not in first
