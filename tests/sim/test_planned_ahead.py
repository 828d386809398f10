"""Steps planned ahead: jumping equal decode steps gives the records of single steps."""

import json
from dataclasses import replace
from pathlib import Path

from spanlab.core.admission import BatchRules
from spanlab.records import Record
from spanlab.schedule import PRESETS, Case, read_cases
from spanlab_sim.run import simulate
from spanlab_sim.timing import ConstantTiming

from ..oracle.vllm_cases import make_async_case

STEP_NS = 3_000_000


def served(case: Case, *, jump: bool) -> tuple[list[Record], int]:
    """The records of a case whose steps of arrival are times, and how many steps were taken."""
    requests = [replace(request, arrived_at=request.arrived_at * STEP_NS) for request in case.requests]
    requests.sort(key=lambda request: (request.arrived_at, request.id))
    rules = BatchRules(case.max_num_batched_tokens, case.max_num_seqs, async_scheduling=True)
    records: list[Record] = []
    steps: list[int] = []
    timing = ConstantTiming(1e-5, 1e-3)
    simulate(
        requests,
        PRESETS["vllm_0_32"](case),
        rules,
        timing,
        records.append,
        jump=jump,
        on_step=lambda step, now, result: steps.append(now),
    )
    return records, len(steps)


def test_jumping_and_stepping_agree(tmp_path: Path):
    path = tmp_path / "cases.json"
    path.write_text(json.dumps({str(seed): make_async_case(seed) for seed in range(500_000, 500_010)}))
    step_counts = []
    for name, case in read_cases(path).items():
        (jumped, jumped_steps), (stepped, many) = served(case, jump=True), served(case, jump=False)
        assert jumped == stepped, name
        step_counts.append((jumped_steps, many))
    assert sum(jumped_steps for jumped_steps, _ in step_counts) < sum(many for _, many in step_counts) / 2
