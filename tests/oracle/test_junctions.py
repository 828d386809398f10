"""State hits of vllm-project/vllm issue 45238: 0 of 64, then 40 with junctions, then 48 with states at an interval.

The issue names 8 prefixes, 64 prompts and one request in flight, not the memory. The rules give 0, 48 and 56 where
nothing is evicted: a prefix's first prompt computes it, and with junctions the second one does so once more. Evictions
take the rest. `vllm_0_32_junctions.json` holds what vLLM 0.32.0 reused, with and without them.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

from spanlab.build import build_policy, build_timing, build_workload
from spanlab.cli import compose
from spanlab.core.policies.block_pool import BlockPool, BlockRules, BlockStore
from spanlab.core.policies.blocks import BlockPolicy
from spanlab.schedule import PRESETS, Case, read_cases, schedule
from spanlab.study.jobs import build_arrivals
from spanlab_sim.run import simulate

from .junction_cases import BLOCK, CASES, make_case

HERE = Path(__file__).parent
STORED = json.loads((HERE / "vllm_0_32_junctions.json").read_text())
PYTHON = Path(os.environ.get("SPANLAB_ORACLE_VLLM", HERE.parents[1] / ".venvs/vllm/bin/python"))
ARMS = ("vllm_before", "vllm_0_32", "vllm_interval")


def hits(arm: str, *overrides: str) -> int:
    """Requests of the entry that find a state."""
    study = compose("junction_sim", list(overrides))
    requests = build_workload(study.workload, "unused").requests
    arrived = build_arrivals(study, requests, 0, None)
    policy, records = build_policy(study, study.arms[arm], 0, 2200), []
    simulate(arrived, policy, study.batch, build_timing(study), records.append, clients=study.arrivals.clients)
    policy.check()
    assert len(records) == 64
    return sum(record.reused_tokens > 0 for record in records)


@pytest.mark.parametrize(("arm", "expected"), [*zip(ARMS, (0, 64 - 2 * 8, 64 - 8), strict=True)])
def test_state_hits_follow_from_the_rules(arm, expected):
    assert hits(arm) == expected


@pytest.mark.parametrize(("arm", "expected"), [*zip(ARMS, (64 - 8, 64 - 2 * 8, 64 - 8), strict=True)])
def test_chunk_ends_inside_the_prefix_help_by_chance(arm, expected):
    """1,600 shared tokens: the budget of 2,048 ends a chunk at 1,584. `retention=0` drops that state."""
    assert hits(arm, "workload.synthetic.value=1600") == expected


def read(folder: Path, cases: dict) -> dict[str, Case]:
    path = folder / "cases.json"
    path.write_text(json.dumps(cases))
    return read_cases(path)


@pytest.mark.parametrize(
    ("rules", "lengths", "expected"),
    [
        ({"junctions": False}, (1500, 700), 0),
        ({}, (1500, 700), 40),
        ({"retention": 2 * BLOCK, "cut": True}, (1500, 700), 51),
        ({"junctions": False}, (1600, 600), 53),
    ],
)
def test_evictions_of_120_pages_leave_40_hits(rules, lengths, expected, tmp_path):
    """The issue reports 0, 40, 48 and, of the last workload, 52; a state of this model takes three pages."""
    case = read(tmp_path, {"issue": make_case(*lengths, None, 120)})["issue"]
    given = BlockRules(BLOCK, "align", 3, **{"retention": None, **rules})
    found = schedule(case, BlockPolicy(given, BlockStore(BlockPool(120 - 1), 1, 1))).reused_on_admission
    assert sum(tokens > 0 for tokens in found) == expected


def reused(folder: Path, cases: dict) -> dict[str, list[int]]:
    return {
        name: schedule(case, PRESETS["vllm_0_32"](case)).reused_on_admission
        for name, case in read(folder, cases).items()
    }


@pytest.mark.parametrize("name", CASES)
def test_hits_equal_vllms_stored_ones(name, tmp_path):
    assert reused(tmp_path, {name: CASES[name]})[name] == STORED[name]


@pytest.mark.oracle
def test_hits_equal_vllms(tmp_path):
    ours = reused(tmp_path, CASES)
    out = tmp_path / "theirs.json"
    subprocess.run([PYTHON, HERE / "vllm_driver.py", tmp_path / "cases.json", out], check=True)
    theirs = json.loads(out.read_text())
    assert ours == {name: one["reused_on_admission"] for name, one in theirs.items()}
