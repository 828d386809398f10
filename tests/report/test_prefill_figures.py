"""Figures of prefills, from entries of one point or of many; without data, no figure."""

import pytest

from spanlab.analyses import prefill
from spanlab.analyses.prefill import prefill_table
from spanlab.analyses.prefill_data import PrefillData

PARTS = ("plan_s", "copy_s", "fill_s", "repair_s", "prefill_s", "other_s")


def entry(arm: str, kind: str, length: float, reused: float = 0.0, states: float = 0.0, fast: float = 1.0) -> dict:
    ttft_s = length / 1000 / fast
    return {
        "arm": arm,
        "family": arm,
        "kind": kind,
        "requests": 5,
        "prompt_tokens": length,
        "token_hit_rate": reused / length,
        "reused_tokens": reused,
        "computed_tokens": length - reused,
        "repaired_tokens": 0.0,
        "captured_states": states,
        "captured_bytes": states * 1000,
        "ttft_s": {"p25": 0.9 * ttft_s, "p50": ttft_s, "p75": 1.2 * ttft_s, "least": 0.8 * ttft_s},
        "parts_s": dict.fromkeys(PARTS, ttft_s / 6),
        "bound_s": ttft_s / 3,
        "of_bound": 1 / 3,
        "logit_gap": None,
        "speedup": None if arm == "none" else {"mean": fast, "low": 0.8 * fast, "high": 1.3 * fast},
        "ratio_of_bounds": None if arm == "none" else fast,
        "plain_s": None,
        "over_plain": None,
    }


def entries(*lengths: float) -> list[dict]:
    rows = []
    for length in lengths:
        rows += [entry("none", kind, length) for kind in ("cold", "warm")]
        rows += [entry("block", "cold", length, states=4, fast=0.95)]
        rows += [entry("block", "warm", length, reused=0.9 * length, fast=6)]
    return rows


def data(rows: list[dict]) -> PrefillData:
    return PrefillData(rows, ("kind",), "none", "a footer")


@pytest.mark.parametrize(
    "draw", [getattr(prefill, f"draw_prefill_{name}") for name in ("ttft", "speedup", "parts", "reuse", "capture")]
)
def test_every_figure_is_drawn_over_many_lengths(draw):
    figure = draw(data(entries(1000, 2000, 8000)))
    assert figure.axes
    assert all(ax.lines or ax.patches or ax.collections for ax in figure.axes if ax.axison)


@pytest.mark.parametrize("draw", [prefill.draw_prefill_speedup, prefill.draw_prefill_ttft])
def test_curves_over_length_need_two_lengths(draw):
    assert draw(data(entries(1000))) is None


def test_no_speedup_figure_without_speedups():
    withheld = [row | {"speedup": None} for row in entries(1000, 2000)]
    assert prefill.draw_prefill_speedup(data(withheld)) is None
    assert prefill.draw_prefill_capture(data(withheld)) is None


def test_simulated_entries_have_no_parts_and_no_bounds():
    simulated = [row | {"parts_s": {}, "bound_s": None, "of_bound": None} for row in entries(1000)]
    assert prefill.draw_prefill_parts(data(simulated)) is None
    assert prefill.draw_prefill_reuse(data(simulated)) is None


def test_table_hides_columns_that_no_entry_has():
    table = prefill_table([entry("none", "cold", 1000)], ["kind"], "none")
    headings = {column.name: column.heading for column in table.columns}
    assert headings["captured_states"] == headings["speedup"] == ""
    assert headings["bound_s"]
    shown = prefill_table(entries(1000), ["kind"], "none")
    assert all(column.heading for column in shown.columns if column.name in ("captured_states", "speedup"))
