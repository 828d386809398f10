"""The analysis `plan`: closed forms of queues, memory thresholds known by hand, and reasons where nothing helps."""

import json
import re
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from spanlab.cli import compose
from spanlab.study.prepare import check_memory
from spanlab.study.run import run_study

from ..support.files import write_lines
from ..support.queues import mg1_wait

SERVICE_S = 0.1
TOKEN_GIB = 131_072 / 2**30  # KV of a token of llama-3.1-8b
ONE_BY_ONE = (
    "timing=constant",
    "timing.seconds_per_computed_token=0.001",
    "batch.max_num_seqs=1",
    "batch.enable_chunked_prefill=false",
)


def planned(root: Path, *overrides: str) -> dict[str, Any]:
    study = compose("plan", ["output.figures=false", "output.run=x", "executor.kind=here", *ONE_BY_ONE, *overrides])
    folder = run_study(study, "plan", root, show=False)
    assert folder == root / "plan" / "x"
    assert (folder / "report.html").is_file()
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_bytes())
    return summary


def lengths(folder: Path, count: int, gap_s: float, tokens: int = 100, output: int = 1) -> Path:
    """A log of lengths: equal requests at equal distances."""
    times = (datetime(2024, 1, 1) + timedelta(seconds=index * gap_s) for index in range(count))
    rows = (f"{time:%Y-%m-%d %H:%M:%S.%f},{tokens},{output}" for time in times)
    return write_lines(folder / "lengths.csv", "TIMESTAMP,ContextTokens,GeneratedTokens", *rows)


def taking_turns(folder: Path, prompts: int, rounds: int, tokens: int, gap_s: float) -> Path:
    """A log of prompts that repeat in turn, far enough apart that no two run together."""
    all_prompts = [list(range(1000 * number, 1000 * number + tokens)) for number in range(prompts)] * rounds
    rows = ({"timestamp": index * gap_s, "input_ids": ids} for index, ids in enumerate(all_prompts))
    return write_lines(folder / "turns.jsonl", *rows)


def test_highest_load_of_equal_gaps_is_service_rate(tmp_path: Path):
    log = lengths(tmp_path, 100, gap_s=1.0)
    settings = "plan.search=[load]", "plan.shakes=1", "plan.resolution=0.01", "slo.queue_mean_s=0.0001"
    summary = planned(tmp_path, f"log={log}", *settings)
    served = 1.0 / SERVICE_S
    assert served / 1.01 <= summary["highest_load"] <= served
    assert summary["highest_rate_rps"] == pytest.approx(summary["highest_load"], rel=1e-6)
    assert summary["meets"]
    assert summary["verdict"].startswith("a load of up to ")


def pairs(folder: Path, gap_s: float) -> Path:
    """A log of 60 pairs of equal requests, one pair a second."""
    times = (datetime(2024, 1, 1) + timedelta(seconds=index // 2 + index % 2 * gap_s) for index in range(120))
    rows = (f"{time:%Y-%m-%d %H:%M:%S.%f},100,1" for time in times)
    return write_lines(folder / "pairs.csv", "TIMESTAMP,ContextTokens,GeneratedTokens", *rows)


@pytest.mark.parametrize("gap_s", [0.01, 0.0001])
def test_load_is_searched_down_to_the_answer(tmp_path: Path, gap_s: float):
    settings = "plan.search=[load]", "plan.shakes=1", "plan.resolution=0.02", "slo.ttft_mean_s=0.12"
    summary = planned(tmp_path, f"log={pairs(tmp_path, gap_s)}", *settings)
    wait = 2 * (0.12 - SERVICE_S)  # of the second of a pair, which arrives the gap ÷ the load after the first
    highest = gap_s / (SERVICE_S - wait)
    assert highest / 1.02 <= summary["highest_load"] <= highest * 1.0001
    assert summary["verdict"].startswith("a load of up to ")
    loads = [point["times"] for point in summary["curves"]["load"]]
    assert loads == sorted(set(loads))


def test_requests_that_come_together_meet_at_no_load(tmp_path: Path):
    settings = f"log={pairs(tmp_path, 1e-6)}", "plan.search=[load]", "plan.shakes=1"
    summary = planned(tmp_path, *settings, "slo.ttft_mean_s=0.12")
    assert summary["highest_load"] is None
    assert summary["verdict"] == (
        "this will not help: no load meets ttft_mean_s ≤ 0.12 with 16 GiB, though one request at a time does: "
        "with 3,600 s between requests on average, ttft_mean_s is 147 [147, 147] ms, for some come close together"
    )
    below = planned(tmp_path / "below", *settings, "slo.ttft_mean_s=0.05")["verdict"]
    assert (
        "less load will not help: one request at a time, ttft_mean_s is 100 [100, 100] ms, more than 0.05 s:" in below
    )


def test_highest_load_of_md1_meets_closed_form(tmp_path: Path):
    log = lengths(tmp_path, 300, gap_s=1.0)
    drawn = "arrivals=poisson", "arrivals.rate_rps=1.0", "plan.search=[load]", "plan.resolution=0.02"
    summary = planned(tmp_path, f"log={log}", *drawn, "slo.queue_mean_s=0.2")
    highest = 2 * 0.2 / (SERVICE_S + 2 * 0.2) / SERVICE_S  # W = ρ S / 2 (1 − ρ) solved for the rate
    assert 0.9 * highest <= summary["highest_load"] <= 1.02 * highest
    curve = summary["curves"]["load"]
    stable = [point for point in curve if point["times"] * SERVICE_S < 0.9 and not point["queue_grows"]]
    assert len(stable) >= 4
    for point in stable:
        interval, wait = point["queue_mean_s"], mg1_wait(point["times"], SERVICE_S, SERVICE_S**2)
        reach = 2 * (interval["high"] - interval["mean"])  # a bound of 99.9 % or more
        assert abs(interval["mean"] - wait) <= reach + 0.02 * wait


def test_least_memory_holds_prompts_that_take_turns(tmp_path: Path):
    log = taking_turns(tmp_path, prompts=8, rounds=9, tokens=320, gap_s=1.0)
    settings = "plan.search=[memory]", "plan.shakes=1", "plan.resolution=0.005"
    summary = planned(tmp_path, f"log={log}", *settings, "workload.output_tokens=1", "slo.ttft_p50_s=0.0165")
    blocks = 8 * 20
    assert blocks <= summary["least_gib"] / (16 * TOKEN_GIB) <= 1.005 * (blocks + 3)
    by_size = {point["gib"] / (16 * TOKEN_GIB): point["ttft_p50_s"]["mean"] for point in summary["curves"]["memory"]}
    assert all(median >= 0.032 for size, median in by_size.items() if size < blocks)
    assert all(median == pytest.approx(0.016) for size, median in by_size.items() if size > blocks + 3)
    assert {size < blocks for size in by_size} == {True, False}


def test_target_below_prefill_says_prefill_is_why(tmp_path: Path):
    log = taking_turns(tmp_path, prompts=4, rounds=4, tokens=320, gap_s=1.0)
    summary = planned(tmp_path, f"log={log}", "plan.shakes=1", "slo.ttft_mean_s=0.01")
    assert (summary["least_gib"], summary["highest_load"], summary["meets"]) == (None, None, False)
    why = "this will not help: memory will not help: one request at a time and memory without limit, ttft_mean_s is "
    assert summary["verdict"].startswith(why)
    assert "prefill alone takes longer; hits are bounded by 71.2 % of the prompt tokens" in summary["verdict"]
    floor = summary["references"]["floor"]
    assert floor["ttft_mean_s"]["mean"] == pytest.approx((4 * 0.32 + 12 * 0.016) / 16)
    assert floor["token_hit_rate"] == pytest.approx(3 / 4 * 304 / 320)


def test_overload_is_why_memory_does_not_help(tmp_path: Path):
    log = lengths(tmp_path, 120, gap_s=SERVICE_S / 2)
    summary = planned(tmp_path, f"log={log}", "plan.shakes=1", "slo.ttft_p50_s=0.2")
    assert "memory will not help: the load exceeds saturation, 2 times what can be served" in summary["verdict"]
    assert summary["least_gib"] is None
    assert 0.5 / 1.05 <= summary["highest_load"] <= 0.55  # half the saturating load, plus the margin of a short queue


def test_log_without_times_has_no_load(tmp_path: Path):
    rows = ({"input_ids": list(range(start, start + 40))} for start in range(0, 1000, 100))
    log = write_lines(tmp_path / "untimed.jsonl", *rows)
    summary = planned(tmp_path, f"log={log}", "slo.ttft_mean_s=1")
    assert summary["highest_load"] is None
    assert summary["least_gib"] is not None
    assert summary["verdict"].endswith("expected a log with times, or arrivals=poisson arrivals.rate_rps=RATE")
    assert summary["curves"]["load"] == []


@pytest.mark.parametrize(("blocks", "meets"), [(200, True), (120, False)])
def test_memory_search_ends_at_what_the_device_holds(tmp_path: Path, blocks: int, meets: bool):
    log = taking_turns(tmp_path, prompts=8, rounds=9, tokens=320, gap_s=1.0)
    room = blocks * 16 * TOKEN_GIB
    device = "timing=roofline", f"hardware.memory_gib={room + 14.95703125}", "hardware.host_s=0"
    settings = "plan.search=[memory]", "plan.shakes=1", "workload.output_tokens=1", "store=unlimited"
    overrides = [f"log={log}", *settings, "slo.ttft_p50_s=0.006"]
    folder = run_study(
        compose("plan", ["output.figures=false", "output.run=x", "executor.kind=here", *overrides, *device]),
        "plan",
        tmp_path,
        show=False,
    )
    summary = json.loads((folder / "summary.json").read_bytes())
    sizes = [point["gib"] for point in summary["curves"]["memory"]]
    assert (summary["least_gib"] is not None) == meets
    for size in sizes:
        check_memory(compose("plan", [*overrides, *device, f"store.total_gib={size!r}"]))
    if not meets:
        assert sizes[-1] == pytest.approx(room, rel=1e-4)
        why = (
            "this will not help: memory of one device will not help: one h200 holds 0.23437 GiB beside the weights of "
        )
        assert summary["verdict"].startswith(why)
        assert summary["verdict"].endswith("; more memory meets ttft_p50_s ≤ 0.006, so it needs tiers or replicas")


def test_several_targets_hold_at_once(tmp_path: Path):
    log = lengths(tmp_path, 60, gap_s=1.0, output=11)
    settings = "timing.seconds_per_decode_token=0.05", "plan.search=[memory]", "plan.shakes=1"
    both = planned(tmp_path, f"log={log}", *settings, "slo.ttft_mean_s=0.2", "slo.tpot_mean_s=0.01")
    assert both["references"]["own"]["ttft_mean_s"]["mean"] == pytest.approx(0.1)
    assert both["references"]["own"]["tpot_mean_s"]["mean"] == pytest.approx(0.05)
    assert "a decode step alone takes longer" in both["verdict"]


def test_shaken_runs_widen_intervals(tmp_path: Path):
    log = lengths(tmp_path, 60, gap_s=0.13)
    settings = f"log={log}", "plan.search=[load]", "plan.resolution=0.03", "slo.queue_mean_s=0.005"
    once, often = (planned(tmp_path, *settings, f"plan.shakes={shakes}") for shakes in (1, 3))
    a, b = (summary["references"]["own"]["queue_mean_s"] for summary in (once, often))
    assert a["mean"] == a["high"] == pytest.approx(0, abs=1e-9)
    assert b["mean"] > 0 or often["references"]["own"]["meets"]
    assert often["highest_load"] < once["highest_load"]


def test_resumed_plan_takes_up_points_of_other_targets(tmp_path: Path):
    log = lengths(tmp_path, 100, gap_s=1.0)
    settings = f"log={log}", "plan.search=[load]", "plan.shakes=1"
    planned(tmp_path, *settings, "slo.ttft_mean_s=0.2")
    points = tmp_path / "plan" / "x" / "points.jsonl"
    before = points.read_bytes()
    summary = planned(tmp_path, *settings, "slo.ttft_mean_s=0.3", "output.if_exists=resume")
    assert set(before.splitlines()) <= set(points.read_bytes().splitlines())
    assert summary["targets"] == {"ttft_mean_s": 0.3}


def test_order_of_points_is_that_of_the_search(tmp_path: Path):
    log = lengths(tmp_path, 100, gap_s=1.0)
    settings = f"log={log}", "plan.search=[load]", "plan.shakes=2", "slo.ttft_mean_s=0.2"
    planned(tmp_path, *settings)
    points = tmp_path / "plan" / "x" / "points.jsonl"
    lines = points.read_bytes().splitlines(keepends=True)
    assert len(lines) > 4
    points.write_bytes(b"".join(lines[:1:-1]))  # runs that ended in another order, and a part of them
    planned(tmp_path, *settings, "output.if_exists=resume")
    assert points.read_bytes() == b"".join(lines)


def test_ratio_of_hybrids_stands_beside_rules_of_thumb(tmp_path: Path):
    log = taking_turns(tmp_path, prompts=6, rounds=4, tokens=640, gap_s=3.0)
    hybrid = "model=qwen3.5-0.8b", "arms=engines_hybrid", "baseline=sglang_0_5_23_hybrid", "store.total_gib=0.5"
    settings = "plan.search=[ratio,interval]", "plan.shakes=1", "workload.output_tokens=1", "slo.ttft_mean_s=0.5"
    study = compose("plan", [*hybrid, "slo.ttft_mean_s=0.5"])
    summary = planned(tmp_path, f"log={log}", *hybrid, *settings)
    marks = summary["searches"]["ratio"]["marks"]
    formula = 5 * study.model.state_bytes / (study.model.kv_bytes_per_token * 641)
    assert marks == {"SGLang's default": 0.9, "SGLang's formula": pytest.approx(formula)}
    ratios = [point["ratio"] for point in summary["curves"]["ratio"]]
    assert 0.9 in ratios
    assert ratios == sorted(ratios)
    assert summary["ratio"] in ratios
    assert {point["interval"] for point in summary["curves"]["interval"]} == {64, 128, 256, 512}


def test_least_tier_holds_what_the_device_cannot(tmp_path: Path):
    log = taking_turns(tmp_path, prompts=8, rounds=9, tokens=320, gap_s=1.0)
    device = f"store.total_gib={3 * 320 * TOKEN_GIB:.9f}"
    host = "+tier@store.tiers.host=dram", "store.tiers.host.bandwidth_gb_s=1e6", "store.tiers.host.latency_s=0"
    settings = "plan.search=[tier]", "plan.shakes=1", "plan.resolution=0.01", "workload.output_tokens=1"
    summary = planned(tmp_path, f"log={log}", device, *host, *settings, "slo.ttft_p50_s=0.0165")
    assert summary["references"]["own"]["ttft_p50_s"]["mean"] == pytest.approx(0.016, rel=0.01)
    blocks = summary["least_tier_gib"] / (16 * TOKEN_GIB)
    assert 8 * 20 - 3 * 20 <= blocks <= 1.01 * (8 * 20 + 2)
    assert "GiB of host beside" in summary["verdict"]


def test_fewest_replicas_share_out_equal_gaps(tmp_path: Path):
    log = lengths(tmp_path, 120, gap_s=SERVICE_S / 3.5)
    settings = "plan.search=[replicas]", "plan.shakes=1", "replicas.routing=least_loaded", "slo.queue_mean_s=0.001"
    summary = planned(tmp_path, f"log={log}", *settings)
    assert summary["fewest_replicas"] == 4
    assert [point["replicas"] for point in summary["curves"]["replicas"]][-1] == 14
    assert summary["verdict"].startswith("4 replicas with 16 GiB each meet queue_mean_s")


def test_states_that_are_held_count_as_needed(tmp_path: Path):
    log = taking_turns(tmp_path, prompts=3, rounds=3, tokens=640, gap_s=3.0)
    hybrid = "model=qwen3.5-0.8b", "arms=engines_hybrid", "baseline=sglang_0_5_23_hybrid"
    settings = "plan.search=[memory]", "plan.shakes=1", "plan.points=2", "workload.output_tokens=400"
    summary = planned(tmp_path, f"log={log}", *hybrid, *settings, "slo.ttft_p50_s=9")
    model = compose("plan", [*hybrid, "slo.ttft_p50_s=9"]).model
    least = (1039 * model.kv_bytes_per_token + 2 * model.state_bytes) / 2**30
    assert summary["least_gib"] == pytest.approx(least, rel=1e-4)


def test_block_sizes_cut_what_is_shared(tmp_path: Path):
    log = taking_turns(tmp_path, prompts=4, rounds=4, tokens=160, gap_s=1.0)
    summary = planned(tmp_path, f"log={log}", "plan.search=[block]", "plan.shakes=1", "slo.ttft_mean_s=0.2")
    shared = {point["block_size"]: point["token_hit_rate"] for point in summary["curves"]["block"]}
    assert {size: shared[size] for size in (16, 64, 128, 256)} == {16: 0.675, 64: 0.6, 128: 0.6, 256: 0.0}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([], "slo is empty with analyses=plan: expected a target, as in slo.ttft_p95_s=0.5"),
        (["slo.ttft_p95_s=0"], "slo.ttft_p95_s=0.0: expected a number above zero"),
        (["slo.ttft_p95_s=1", "plan.search=[room]"], "plan.search=room: expected one of"),
        (["slo.ttft_p95_s=1", "plan.search=[]"], "plan.search=[]: expected one or more of memory, load"),
        (["slo.ttft_p95_s=1", "plan.points=1"], "plan.points=1: expected 2 to 100"),
        (["slo.ttft_p95_s=1", "plan.shakes=0"], "plan.shakes=0: expected a number above zero"),
        (["slo.ttft_p95_s=1", "store.kv_gib=1"], "store.kv_gib=1.0 with analyses=plan: expected None"),
        (["slo.ttft_p95_s=1", "only=[]"], "only="),
        (["slo.ttft_p95_s=1", "sweep=['seeds=[0],[1]']"], "sweep="),
        (
            ["slo.ttft_p95_s=1", "analyses=[summary]"],
            "slo.ttft_p95_s=1.0 with analyses=['summary']: expected plan among them",
        ),
        (["plan.points=4", "analyses=[summary]"], "plan.points=4 with analyses=['summary']: expected plan among them"),
    ],
)
def test_settings_that_say_nothing_are_refused(settings: list[str], message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        compose("plan", settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["plan.search=[ratio]", "slo.ttft_mean_s=1"], "expected a hybrid model and an arm that keeps a tree"),
        (["plan.search=[interval]", "slo.ttft_mean_s=1"], "expected a hybrid model and an arm that keeps a tree"),
        (["plan.search=[load]", "arrivals=saturating", "slo.ttft_mean_s=1"], "all requests come at once"),
        (["plan.search=[tier]", "slo.ttft_mean_s=1"], "store.tiers={} with plan.search=tier: expected a tier"),
        (["plan.search=[replicas]", "slo.ttft_mean_s=1"], "replicas.routing=null with plan.search=replicas: expected"),
        (["plan.search=[memory]", "slo.tpot_mean_s=1"], "expected a request with two output tokens or more"),
        (["store.total_gib=0.001", "slo.ttft_mean_s=1"], "store.total_gib=0.001: expected at least"),
    ],
)
def test_searches_that_cannot_be_done_are_refused(tmp_path: Path, settings: list[str], message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        planned(tmp_path, f"log={lengths(tmp_path, 20, gap_s=1.0)}", *settings)
