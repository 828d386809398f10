"""The analysis `explain`: known bounds, fields of the summary, order of fixes, and messages of rejected settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spanlab.main import compose
from spanlab.study.explain.facts import Facts
from spanlab.study.numbers.bounds import BoundCrossedError
from spanlab.study.run import run_study

from ..support.files import write_lines
from ..support.shared import TRACES, needs

GIVEN = ("output.figures=false", "output.run=x")


def explained(root: Path, *overrides: str) -> dict[str, Any]:
    study = compose("explain", [*GIVEN, *overrides])
    folder = run_study(study, "explain", root, show=False)
    assert folder == root / "explain" / "x"
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_bytes())
    assert (folder / "report.html").is_file()
    return summary


def write_log(folder: Path, prompts: list[list[int]], **more: Any) -> Path:
    rows = ({"timestamp": index, "input_ids": tokens, **more} for index, tokens in enumerate(prompts))
    return write_lines(folder / "log.jsonl", *rows)


@pytest.fixture(scope="module")
def usual(tmp_path_factory) -> dict[str, Any]:
    """The analysis of the first requests of the packaged log."""
    return explained(tmp_path_factory.mktemp("usual"), "workload.log.requests=400")


@needs(TRACES)
def test_mooncake_ceilings_come_out_exactly(tmp_path: Path):
    path = TRACES / "mooncake-fast25" / "conversation_trace.jsonl"
    summary = explained(tmp_path, f"log={path}")
    curve = {point["blocks"]: round(100 * point["token_hit_rate"], 3) for point in summary["capacity_curve"]}
    expected = {1_000: 4.541, 3_000: 6.661, 10_000: 21.575, 30_000: 33.215, 50_000: 36.153, 100_000: 37.084}
    assert {blocks: curve[blocks] for blocks in expected} == expected
    assert round(100 * summary["bounds"]["prefix"], 3) == 37.362
    assert summary["capacity_curve"][-1]["token_hit_rate"] == summary["bounds"]["prefix"]
    assert (summary["requests"], summary["tokens"]["prompt"]) == (12_031, 144_793_823)
    assert summary["bounds"]["any_position"] is None


@pytest.mark.parametrize("source", ["shape", pytest.param("local", marks=needs(TRACES))])
def test_ragpulse_bounds_come_out_exactly(tmp_path: Path, source: str):
    settings = [f"log={TRACES / 'ragpulse'}"] if source == "local" else []
    summary = explained(tmp_path, *settings)
    assert summary["tokens"]["prompt"] == 20_851_449
    bounds = {name: round(share * 20_851_449) for name, share in summary["bounds"].items()}
    assert (bounds["prefix"], bounds["any_position"]) == (6_574_248, 15_018_605)  # 31.5 and 72.0 %


def test_summary_says_what_a_log_tells(usual):
    assert usual["requests"] == 400
    assert set(usual["presets"]) == {"vllm_0_32", "sglang_0_5_23", "blocks_256"}
    preset, total = usual["presets"]["vllm_0_32"], usual["tokens"]["prompt"]
    assert usual["lost_by_cause"] == preset["lost_by_cause"]
    assert preset["reused_tokens"] + sum(usual["lost_by_cause"].values()) == total
    assert preset["token_hit_rate"] == preset["reused_tokens"] / total
    assert preset["token_hit_rate"] <= usual["bounds"]["offline_optimum"] <= usual["bounds"]["prefix"]
    assert {"blocks", "gib", "token_hit_rate"} == set(usual["capacity_curve"][0])
    assert set(usual["losses"]) == {"requests", "sessions"}


def test_fixes_are_ranked_by_gain_per_byte(usual):
    fixes = usual["fixes"]
    assert [fix["rank"] for fix in fixes] == list(range(1, len(fixes) + 1))
    helpful = [fix for fix in fixes if fix["helps"]]
    assert fixes[: len(helpful)] == helpful
    free = [fix["gain"] for fix in helpful if not fix["extra_gib"] and not fix["is_bound"]]
    paid = [fix["gain_per_gib"] for fix in helpful if fix["extra_gib"]]
    assert free == sorted(free, reverse=True)
    assert paid == sorted(paid, reverse=True)
    assert {"pic", "lego_link", "cache_blend", "cached_order", "eviction_optimum"} <= {fix["name"] for fix in fixes}


def test_nothing_helps_where_nothing_is_shared(tmp_path: Path):
    log = write_log(tmp_path, [list(range(start, start + 64)) for start in range(0, 6400, 64)])
    summary = explained(tmp_path, f"log={log}")
    assert summary["verdict"].startswith("nothing will help, because prompts share 0.0 % of their tokens")
    assert not any(fix["helps"] for fix in summary["fixes"])


def test_more_memory_helps_where_prompts_take_turns(tmp_path: Path):
    prompts = [list(range(1000 * number, 1000 * number + 320)) for number in range(8)] * 5
    tokens = 4 * 320
    log = write_log(tmp_path, prompts)
    summary = explained(tmp_path, f"log={log}", f"store.total_gib={tokens * 131_072 / 2**30}")
    assert summary["presets"]["vllm_0_32"]["reused_tokens"] == 0
    best = next(fix for fix in summary["fixes"] if fix["helps"] and fix["extra_gib"])
    assert best["name"] == "memory_for_all"
    assert best["token_hit_rate"] == pytest.approx(4 / 5 * 304 / 320)


def test_small_block_helps_short_prompts_of_hybrids(tmp_path: Path):
    shared = list(range(240))
    log = write_log(tmp_path, [[*shared, *range(1000 * number, 1000 * number + 60)] for number in range(1, 60)])
    summary = explained(tmp_path, f"log={log}", "model=qwen3.5-0.8b", "arms=engines_hybrid")
    assert summary["presets"]["vllm_0_32"]["token_hit_rate"] == 0
    assert summary["lost_by_cause"]["alignment"] > 0.7 * summary["tokens"]["prompt"]
    assert summary["fixes"][0]["gain"] > 0.5
    assert summary["checkpoint_positions"][0]["position"] == 240


def test_tenants_are_told_apart(tmp_path: Path):
    rows = [{"timestamp": index, "input_ids": list(range(64)), "tenant": "ab"[index % 2]} for index in range(6)]
    log = write_lines(tmp_path / "log.jsonl", *rows)
    tenants = explained(tmp_path, f"log={log}")["losses"]["tenants"]
    assert {tenant["name"]: tenant["requests"] for tenant in tenants} == {"a": 3, "b": 3}


def test_lengths_alone_give_no_hit_rate(tmp_path: Path):
    log = tmp_path / "azure.csv"
    log.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,374,44\n2023-11-16 18:15:50,396,109\n")
    summary = explained(tmp_path, f"log={log}")
    assert summary["bounds"] == {"prefix": None, "any_position": None, "offline_optimum": None}
    assert (summary["tokens"]["prompt"], summary["presets"], summary["fixes"]) == (770, {}, [])
    assert any("lengths only" in caveat for caveat in summary["caveats"])


def test_limit_ends_with_a_sentence_and_a_report(tmp_path: Path):
    with pytest.raises(ValueError, match=r"^fail_on=token_hit_rate<0.6: token_hit_rate of vllm_0_32 is 0\.\d+$"):
        explained(tmp_path, "workload.log.requests=50", "fail_on='token_hit_rate<0.6'")
    assert (tmp_path / "explain" / "x" / "summary.json").is_file()
    explained(tmp_path, "workload.log.requests=50", "fail_on='token_hit_rate<0.01'")


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["store.total_gib=0.01"], r"^store.total_gib=0.01: expected at least 0\.\d+ GiB, for request \d+ of the log"),
        (["fail_on=hits"], r"^fail_on=hits: expected METRIC<SHARE"),
        (["fail_on='token_hit_rate<60'"], r"^fail_on=token_hit_rate<60: expected METRIC<SHARE"),
        (["arrivals=poisson"], r"^arrivals.kind=poisson with analyses=explain: expected as_given"),
        (["baseline=none"], r"^baseline=none with analyses=explain: expected one of the arms"),
        (["workload.documents=3"], r"^workload.documents=3 with workload.kind=log"),
        (["arms.sglang_0_5_23.eviction=lfu"], r"^arms.sglang_0_5_23.eviction=lfu with analyses=explain: expected lru"),
        (["+strategy@arms.mine=cache_blend"], r"^arms.mine.spans with analyses=explain .*: expected strategy pic or"),
        (["store.kv_gib=3"], r"^store.kv_gib=3.0 with analyses=explain: expected store.total_gib"),
        (["workload.log.piece=0"], r"^workload.log.piece=0: expected a number above zero"),
        (["log=no_such_file"], r"^log=no_such_file: no such file; expected a log"),
    ],
)
def test_what_cannot_be_explained_is_refused(tmp_path: Path, overrides: list[str], sentence: str):
    with pytest.raises(ValueError, match=sentence):
        explained(tmp_path, *overrides)


def test_log_is_refused_where_nothing_reads_it():
    with pytest.raises(ValueError, match=r"^log=x with workload.kind=quality: expected -cn explain log=FILE"):
        compose("smoke", ["log=x"])
    with pytest.raises(ValueError, match=r"^fail_on=token_hit_rate<0.5 with analyses=.*: expected \[explain\]"):
        compose("smoke", ["fail_on='token_hit_rate<0.5'"])


@pytest.mark.parametrize(("bad", "stands"), [(1, True), (40, False)])
def test_no_verdict_over_an_unread_share(tmp_path: Path, bad: int, stands: bool):
    rows = [{"timestamp": index, "input_ids": list(range(start, start + 64))} for index, start in enumerate([0] * 200)]
    log = write_lines(tmp_path / "log.jsonl", *rows[:-1], *[{"timestamp": 199, "input_ids": ["a"] * 64}] * bad)
    summary = explained(tmp_path, f"log={log}", "workload.log.bad_lines=skip")
    assert summary["unread"]["bytes_left_out"].keys() == {"bad lines (input_ids, first in line 200)"}
    assert (summary["unread"]["share"] <= 0.01) == stands
    assert summary["verdict"].startswith("no verdict stands, ") != stands
    assert any(note.startswith("left out of ") and "bad lines" in note for note in summary["caveats"])


def test_page_without_a_true_bound_is_refused(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(Facts, "offline_optimum", lambda facts, rules: 0)
    with pytest.raises(BoundCrossedError, match=r"^arms\.vllm_0_32 reuses .* expected at most 0\.0000%, the bound off"):
        explained(tmp_path, "workload.log.requests=400")


@pytest.mark.parametrize("length", [1055, 1056, 1057])
def test_best_eviction_holds_where_prompts_are_whole_blocks(tmp_path: Path, length: int):
    prompts = [[*range(first, first + length)] for first in (0, 0, 5000, 5000)]
    settings = (f"log={write_log(tmp_path, prompts)}", "model=qwen3.5-4b", "arms=engines_hybrid", "store=gib_64")
    summary = explained(tmp_path, *settings)
    blocks = (length - 1) // 528  # the last token of a prompt is computed
    assert summary["presets"]["vllm_0_32"]["reused_tokens"] == 2 * blocks * 528
    assert summary["bounds"]["offline_optimum"] == 2 * blocks * 528 / (4 * length)
