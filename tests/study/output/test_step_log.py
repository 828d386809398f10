"""The step log of the engine: its content, and complete times between its lines."""

from itertools import pairwise
from pathlib import Path

import pytest

from spanlab.study.logs import read_steps

pytest.importorskip("torch")

FEW = ("workload.rag.requests=4", "workload.output_tokens=3", "seeds=[0]", "only=[none,cache_blend_15]")
QUICK = ("workload.rag.k=2", "workload.rag.passage_tokens=64", "arrivals.rate_rps=1000", "engine.threads=1")


def test_a_run_leaves_its_steps_in_order_with_what_they_did(run_here, tmp_path: Path, rows_of):
    folder = run_here(tmp_path, "pic_clean", *FEW, *QUICK)
    for arm in ("none", "cache_blend_15"):
        (path,) = (folder / "steps").glob(f"{arm}-*.jsonl")
        log, records = read_steps(path), rows_of(folder / "records" / f"{arm}.jsonl")
        (run,) = rows_of(folder / "runs" / f"{arm}.jsonl")
        assert len(log) == run["steps"]
        assert all(step.started_ns <= step.ended_ns for step in log)
        arrivals = {round(row["arrived_s"] * 1e9) for row in records}
        assert log[0].started_ns in arrivals
        pauses = [after for step, after in pairwise(log) if after.started_ns != step.ended_ns]
        assert all(step.ended_ns <= after.started_ns for step, after in pairwise(log))
        assert all(after.started_ns in arrivals for after in pauses)
        assert sum(step.took_ns for step in log) == pytest.approx(run["busy_s"] * 1e9, abs=1)
        assert sum(step.features.num_first_tokens for step in log) == 4
        assert sum(step.features.num_decodes for step in log) == sum(row["output_tokens"] - 1 for row in records)
        ends = {step.ended_ns for step in log}
        assert {round(row["first_token_s"] * 1e9) for row in records} <= ends
        chunks = [chunk for step in log for chunk in step.key[0]]
        assert {chunk[0] for chunk in chunks} == {row["request_id"] for row in records}
        assert sum(step.features.prefill_tokens for step in log) == sum(chunk[-1] for chunk in chunks)
        shallow = any(step.features.shallow_token_layers for step in log)
        assert shallow == (arm == "cache_blend_15")
