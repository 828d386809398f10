"""Prices in `explain`: what a log cost by the provider's counts, and what caches and fixes would have cost."""

from pathlib import Path
from typing import Any

import pytest

from spanlab.cli import compose

from ..support.files import write_lines
from .explained import explained, invented

PRICES = ("price.input=3", "price.cached=0.3", "price.write=3.75", "price.output=15")
HISTORY = invented(300)


def usage_log(folder: Path, *, reports: bool = True) -> Path:
    """Return a log of three calls of Anthropic with the same beginning; the last one reports no usage."""
    counts: list[dict[str, int]] = [
        {"input_tokens": 10, "cache_creation_input_tokens": 400, "cache_read_input_tokens": 0, "output_tokens": 7},
        {"input_tokens": 20, "cache_creation_input_tokens": 50, "cache_read_input_tokens": 400, "output_tokens": 9},
    ]
    rows: list[dict[str, Any]] = [
        {
            "timestamp": 10.0 * number,
            "messages": [{"role": "user", "content": HISTORY}, {"role": "user", "content": f"question {number}"}],
            "max_tokens": 9,
        }
        for number in range(3)
    ]
    for row, usage in zip(rows, counts, strict=False):
        if reports:
            row["response"] = {"usage": usage}
    return write_lines(folder / "log.jsonl", *rows)


def test_logged_cost_is_that_of_the_counts(tmp_path: Path):
    summary = explained(tmp_path, f"log={usage_log(tmp_path)}", *PRICES)
    sums, money = summary["reported"]["sums"], summary["money"]
    assert (sums["fresh_tokens"], sums["created_tokens"], sums["cached_tokens"]) == (30, 450, 400)
    expected = (30 * 3 + 400 * 0.3 + 450 * 3.75 + sums["output_tokens"] * 15) / 1e6
    assert money["logged"] == pytest.approx(expected)
    assert money["requests"] == 2
    prompt = summary["tokens"]["prompt"]
    outputs = summary["tokens"]["output"]
    assert money["caches"]["no_cache"]["cost"] == pytest.approx((prompt * 3 + outputs * 15) / 1e6)
    vllm = summary["presets"]["vllm_0_32"]["reused_tokens"]
    assert money["caches"]["vllm_0_32"] == {
        "cost": pytest.approx(((prompt - vllm) * 3.75 + vllm * 0.3 + outputs * 15) / 1e6),
        "reused_tokens": vllm,
    }
    assert any(line.startswith("by price.*, the log cost") for line in summary["measured"])


def test_money_of_a_fix_follows_its_tokens(tmp_path: Path):
    summary = explained(tmp_path, f"log={usage_log(tmp_path)}", *PRICES)
    for fix in summary["fixes"]:
        same_prompts = fix["prompt_tokens"] == summary["tokens"]["prompt"]
        if same_prompts:
            assert fix["saved_money"] == pytest.approx(fix["saved_tokens"] * (3.75 - 0.3) / 1e6, abs=1e-9)
    by_prefix = [fix for fix in summary["fixes"] if fix["name"].startswith(("as_", "block_", "memory_"))]
    assert by_prefix
    assert all(fix["prefill_s"] is not None for fix in by_prefix)


def test_prices_default_to_that_of_input(tmp_path: Path):
    summary = explained(tmp_path, f"log={usage_log(tmp_path)}", "price.input=2")
    money = summary["money"]
    assert {round(cache["cost"], 12) for cache in money["caches"].values()} == {
        round(summary["tokens"]["prompt"] * 2 / 1e6, 12)
    }
    assert money["logged"] == pytest.approx(880 * 2 / 1e6)


def test_log_without_counts_has_no_logged_cost(tmp_path: Path):
    summary = explained(tmp_path, f"log={usage_log(tmp_path, reports=False)}", "price.input=2")
    assert summary["money"]["logged"] is None
    assert any(line.startswith("by price.*, the log would cost") for line in summary["measured"])


def test_no_price_shows_no_money(tmp_path: Path):
    summary = explained(tmp_path, f"log={usage_log(tmp_path)}")
    assert summary["money"] is None
    assert {fix["saved_money"] for fix in summary["fixes"]} == {None}
    assert not any("price" in line for line in summary["measured"])


@pytest.mark.parametrize(
    ("setting", "message"),
    [("price.cached=1", "price.cached=1 with price.input=null: expected both"), ("price.input=-1", "price.input=-1")],
)
def test_senseless_prices_are_refused(setting: str, message: str):
    with pytest.raises(ValueError, match=message):
        compose("explain", [setting])
