"""The analysis `serving` of simulated runs: gaps between tokens, intervals, and caveats without gaps."""

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from spanlab.build import build_policy, build_timing, build_workload
from spanlab.cli import compose
from spanlab.study.jobs import build_arrivals
from spanlab.study.logs import LastSpanTiming, ServingLog
from spanlab.study.numbers import read_records
from spanlab.study.run import run_study
from spanlab_sim.run import simulate

SMALL = ("workload.documents=3", "workload.questions_per_document=6", "workload.output_tokens=40", "tracking.kind=none")
RUSH = ("arrivals.rate_rps=30",)
#: Batches in which prompts are cut, keep decodes waiting, or take memory from those that run.
BATCHES = {
    "mixed": ("batch.max_num_batched_tokens=512",),
    "prefill_first": ("batch.prefill_first=true",),
    "preempting": ("store.total_gib=0.45", "workload.max_prompt_tokens=3000", "workload.output_tokens=300"),
}


def gaps_step_by_step(study, requests, uncounted: frozenset[int]) -> tuple[Counter, int]:
    """Every gap of a run that takes one step at a time, from the times of all its tokens."""
    times: dict[int, list[int]] = {}

    def ran(step, now, result):
        ended = now + result.duration_ns
        for sequence in (*step.decodes, *(chunk.sequence for chunk in step.chunks if chunk.last)):
            times.setdefault(sequence.request.id, []).append(ended)

    records = []
    policy = build_policy(study, study.arms["vllm_0_32"], 0, 16384)
    timing = build_timing(study)
    simulate(requests, policy, study.batch, timing, records.append, jump=False, on_step=ran)
    assert all(len(times[record.request_id]) == record.output_tokens for record in records)
    counted = (token_times for number, token_times in times.items() if number not in uncounted)
    return Counter(b - a for token_times in counted for a, b in pairwise(token_times)), sum(
        r.preemptions for r in records
    )


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("warmup", [0, 5])
def test_gaps_are_those_of_single_steps(batch: str, warmup: int, tmp_path: Path):
    study = compose("replay", ["backend=sim", *SMALL, *RUSH, *BATCHES[batch]])
    workload = build_workload(study.workload, "")
    requests = build_arrivals(study, workload.requests, 0, study.arrivals.rate_rps)
    uncounted = frozenset(request.id for request in requests[:warmup])
    expected, preemptions = gaps_step_by_step(study, requests, uncounted)
    assert (preemptions > 0) == (batch == "preempting")
    log = ServingLog(LastSpanTiming(build_timing(study)))
    policy = build_policy(study, study.arms["vllm_0_32"], 0, 16384)
    simulate(requests, policy, study.batch, log.spans, log.finished, warmup=warmup, on_step=log.ran)
    log.write(tmp_path / "written.npz")
    assert log.gaps.counts == expected
    assert sum(expected.values()) == sum(r.output_len - 1 for r in requests if r.id not in uncounted)


def test_a_step_after_the_end_of_a_request_adds_no_gap():
    """With drafts and steps planned ahead, a request that accepted drafts end takes part in one step more."""
    ahead = ("batch.async_scheduling=true", "batch.speculation={draft_tokens: 3, acceptance: 0.7}")
    study = compose("replay", ["backend=sim", *SMALL, *RUSH, *ahead])
    workload, log, decodes = build_workload(study.workload, ""), ServingLog(), Counter()

    def ran(step, now, result):
        log.ran(step, now, result)
        decodes.update(sequence.has_ended for sequence in step.decodes)

    requests = build_arrivals(study, workload.requests, 0, study.arrivals.rate_rps)
    policy = build_policy(study, study.arms["vllm_0_32"], 0, 16384)
    simulate(requests, policy, study.batch, build_timing(study), log.finished, on_step=ran)
    assert decodes[True] > 0
    assert log.gaps.counts.total() == decodes[False]


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("serving")
    goal = "+goodput={chat: {ttft_s: 0.2, tpot_s: 0.01}, all: {e2e_s: 1000}}"
    study = compose("replay", ["backend=sim", *SMALL, *RUSH, "seeds=[0,1,2]", goal, "only=[]", "output.trace=true"])
    study.output.run = "twin"
    return run_study(study, "replay", root, show=False)


def metrics(folder: Path) -> dict[str, dict]:
    rows = json.loads((folder / "summary.json").read_bytes())["serving"]
    return {row["arm"]: row["metrics"] for row in rows}


def test_every_arm_has_metrics_with_intervals(ran: Path):
    by_arm = metrics(ran)
    assert set(by_arm) == {"vllm_0_32", "sglang_0_5_23", "blocks_256"}
    for values in by_arm.values():
        assert values["request_goodput:all"] == values["request_throughput"]
        assert values["request_goodput:chat"]["mean"] <= values["request_throughput"]["mean"]
        for name in ("mean_ttft_ms", "p99_itl_ms", "batch_size", "mean_waiting", "token_hit_rate"):
            mean, low, high = (values[name][end] for end in ("mean", "low", "high"))
            assert low <= mean <= high
            assert mean - low == pytest.approx(high - mean)  # Student's interval, not cut at zero


def test_mean_gap_is_decode_time_over_tokens(ran: Path):
    columns = read_records(ran / "records" / "vllm_0_32.jsonl")
    per_seed = []
    for seed in range(3):
        of_seed = columns["seed"] == seed
        decoding = (columns["finished_s"] - columns["first_token_s"])[of_seed].sum()
        per_seed.append(decoding / (columns["output_tokens"][of_seed] - 1).sum() * 1e3)
    assert metrics(ran)["vllm_0_32"]["mean_itl_ms"]["mean"] == pytest.approx(np.mean(per_seed), rel=1e-9)


def test_batch_size_follows_from_records(ran: Path):
    """Sequences of a step over busy time: prefill and decode times of all requests, where none waits in between."""
    columns = read_records(ran / "records" / "vllm_0_32.jsonl")
    runs = [json.loads(line) for line in (ran / "runs" / "vllm_0_32.jsonl").read_bytes().splitlines()]
    rows_by_run = [columns["seed"] == run["seed"] for run in runs]
    served = [(columns["finished_s"] - columns["admitted_s"])[rows].sum() for rows in rows_by_run]
    expected = np.mean([time / run["busy_s"] for time, run in zip(served, runs, strict=True)])
    assert metrics(ran)["vllm_0_32"]["batch_size"]["mean"] == pytest.approx(expected, rel=0.02)


def test_resumed_study_says_what_it_lacks(tmp_path: Path):
    settings = ["backend=sim", *SMALL, *RUSH, "output.if_exists=resume", "output.figures=false"]
    for analyses in ("[summary]", "[serving]"):
        study = compose("replay", [*settings, f"analyses={analyses}"])
        study.output.run = "again"
        folder = run_study(study, "replay", tmp_path, show=False)
    summary = json.loads((folder / "summary.json").read_bytes())
    assert "mean_itl_ms" not in summary["serving"][0]["metrics"]
    assert any("gaps between tokens were not written" in caveat for caveat in summary["caveats"])


def test_goals_that_nothing_reads_are_refused():
    with pytest.raises(
        Exception, match=r"goodput\.chat\.\w+=\S+ with analyses=\['summary'\]: expected serving among them"
    ):
        compose("smoke", ["+goodput={chat: {ttft_s: 1}}"])


def test_goal_without_limits_is_refused():
    with pytest.raises(Exception, match="goodput without a limit: expected ttft_s, tpot_s or e2e_s"):
        compose("replay", ["backend=sim", "+goodput={chat: {}}"])


def test_warm_up_of_sessions_is_that_of_records(tmp_path: Path):
    settings = ("warmup_fraction=0.3", "output.figures=false", "tracking.kind=none", "seeds=[0]", "only=[]")
    few = ("workload.chat_sessions.sessions=30",)
    study = compose(
        "sessions_sim", [*settings, *few, "analyses=[serving]", "replicas.count=2", "replicas.routing=round_robin"]
    )
    study.output.run = "sessions"
    folder = run_study(study, "sessions_sim", tmp_path, show=False)
    for arm, values in metrics(folder).items():
        columns = read_records(folder / "records" / f"{arm}.jsonl")
        counted = columns["counted"].astype(bool)
        assert 0 < counted.sum() < len(counted)
        decoding = (columns["finished_s"] - columns["first_token_s"])[counted].sum()
        expected = decoding / (columns["output_tokens"][counted] - 1).sum() * 1e3
        assert values["mean_itl_ms"]["mean"] == pytest.approx(expected, rel=1e-9)


# -- the trace file ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def events(ran: Path) -> list[dict]:
    files = sorted(path.name for path in (ran / "traces").iterdir())
    assert files == [f"{arm}-seed0-rate30.0.json" for arm in ("blocks_256", "sglang_0_5_23", "vllm_0_32")]
    trace = json.loads((ran / "traces" / "vllm_0_32-seed0-rate30.0.json").read_bytes())
    assert trace["displayTimeUnit"] == "ms"
    return trace["traceEvents"]


def first_run(ran: Path) -> tuple[dict[str, np.ndarray], dict]:
    columns = read_records(ran / "records" / "vllm_0_32.jsonl")
    run = json.loads((ran / "runs" / "vllm_0_32.jsonl").read_bytes().splitlines()[0])
    return {name: values[columns["seed"] == 0] for name, values in columns.items()}, run


def test_every_event_has_what_its_phase_needs(events: list[dict]):
    needed = {
        "M": {"args"},
        "X": {"ts", "dur"},
        "C": {"ts", "args"},
        "b": {"ts", "id", "cat"},
        "e": {"ts", "id", "cat"},
    }
    for event in events:
        assert needed[event["ph"]] | {"name", "pid"} <= event.keys()
        assert event.get("dur", 0) >= 0


def test_steps_follow_each_other_and_fill_busy_time(ran: Path, events: list[dict]):
    columns, run = first_run(ran)
    steps = [event for event in events if event["ph"] == "X"]
    for step, next_step in pairwise(steps):
        assert step["ts"] + step["dur"] <= next_step["ts"] + 1e-3
    assert sum(event["dur"] for event in steps) * 1e-6 == pytest.approx(run["busy_s"])
    assert sum(event["args"]["repeats"] for event in steps) == run["steps"]
    decoded = sum(event["args"]["decodes"] * event["args"]["repeats"] for event in steps)
    assert decoded == (columns["output_tokens"] - 1).sum()
    computed = columns["computed_tokens"].sum() + columns["recomputed_tokens"].sum()
    assert sum(event["args"]["prefill_tokens"] for event in steps) == computed


def test_phases_nest_and_equal_records(ran: Path, events: list[dict]):
    columns, _ = first_run(ran)
    spans: dict[tuple[int, str], list[float]] = {}
    for event in events:
        if event["ph"] in "be":
            spans.setdefault((event["id"], event["name"]), []).append(event["ts"])
    ends = ("arrived_s", "admitted_s", "first_token_s", "finished_s")
    for row, number in enumerate(columns["request_id"].tolist()):
        times = [columns[name][row] * 1e6 for name in ends]
        assert spans.pop((number, f"request {number}")) == pytest.approx([times[0], times[-1]])
        for index, name in enumerate(("queued", "prefill", "decode")):
            assert spans.pop((number, name)) == pytest.approx(times[index : index + 2])
    assert spans == {}


def test_counters_end_at_zero_and_hold_peak(ran: Path, events: list[dict]):
    _, run = first_run(ran)
    queues = [event for event in events if event["ph"] == "C" and event["name"] == "requests"]
    assert queues[-1]["args"] == {"waiting": 0, "running": 0}
    assert [event["ts"] for event in queues] == sorted(event["ts"] for event in queues)
    kv_bytes = [event["args"]["KV"] for event in events if event["name"] == "bytes held"]
    assert 0 < max(kv_bytes) <= run["kv_resident_peak_bytes"]


def test_no_trace_without_the_key(tmp_path: Path):
    study = compose("replay", ["backend=sim", *SMALL, *RUSH, "output.figures=false"])
    assert not (run_study(study, "replay", tmp_path, show=False) / "traces").exists()
