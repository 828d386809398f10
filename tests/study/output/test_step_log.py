"""The step log of the engine: what is in it, and that no time is lost between its lines."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from spanlab.study.output.step_log import read_steps

pytest.importorskip("torch")

FEW = ("workload.rag.requests=4", "workload.output_tokens=3", "seeds=[0]", "only=[none,cache_blend_15]")
QUICK = ("arrivals.rate_rps=1000", "engine.threads=1")


def test_a_run_leaves_its_steps_in_order_with_what_they_did(run_here, tmp_path: Path, rows_of):
    folder = run_here(tmp_path, "pic_clean", *FEW, *QUICK)
    for arm in ("none", "cache_blend_15"):
        (path,) = (folder / "steps").glob(f"{arm}-*.jsonl")
        log, records = read_steps(path), rows_of(folder / "records" / f"{arm}.jsonl")
        (run,) = rows_of(folder / "runs" / f"{arm}.jsonl")
        assert len(log) == run["steps"]
        assert all(one.started_ns <= one.ended_ns for one in log)
        arrivals = {round(row["arrived_s"] * 1e9) for row in records}
        assert log[0].started_ns in arrivals
        pauses = [after for one, after in pairwise(log) if after.started_ns != one.ended_ns]
        assert all(one.ended_ns <= after.started_ns for one, after in pairwise(log))
        assert all(after.started_ns in arrivals for after in pauses)
        assert sum(one.took_ns for one in log) == pytest.approx(run["busy_s"] * 1e9, abs=1)
        assert sum(one.features.num_first_tokens for one in log) == 4
        assert sum(one.features.num_decodes for one in log) == sum(row["output_tokens"] - 1 for row in records)
        ends = {one.ended_ns for one in log}
        assert {round(row["first_token_s"] * 1e9) for row in records} <= ends
        chunks = [chunk for one in log for chunk in one.key[0]]
        assert {chunk[0] for chunk in chunks} == {row["request_id"] for row in records}
        assert sum(one.features.prefill_tokens for one in log) == sum(chunk[-1] for chunk in chunks)
        shallow = any(one.features.shallow_token_layers for one in log)
        assert shallow == (arm == "cache_blend_15")
