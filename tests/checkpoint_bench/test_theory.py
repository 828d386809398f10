"""What should be is reckoned by hand, and is what the steps that really ran are held against."""

from __future__ import annotations

import pytest

from spanlab.bench.rates import Rates
from spanlab.checkpoint_bench.theory import Theory
from spanlab_sim.hardware import HardwareSpec

HARDWARE = HardwareSpec("toy", peak_flops=2e9, bandwidth_bytes_per_s=1e12, memory_gib=1.0, host_s=0.5)


@pytest.fixture(scope="module")
def theory(bed) -> Theory:
    return Theory(bed.spec, Rates(1e9, 1e15), HARDWARE)


def flops(spec, start: int, stop: int, rows: int) -> int:
    return spec.prefill_flops(start, stop) + rows * spec.head_flops


def test_where_products_are_slow_a_prefill_takes_its_flops(theory, bed):
    found = theory.resumed(128, 256, 1000)
    assert found.bound_s == pytest.approx(flops(bed.spec, 128, 256, 1) / 1e9, abs=1e-9)
    assert found.modelled_s == pytest.approx(flops(bed.spec, 128, 256, 1) / 1.2e9 + 0.5, abs=1e-9)


def test_every_step_costs_its_host_time_and_the_last_one_a_row_of_logits(theory, bed):
    found = theory.resumed(64, 256, 100)
    assert found.modelled_s == pytest.approx(flops(bed.spec, 64, 256, 1) / 1.2e9 + 2 * 0.5, abs=2e-9)


def test_where_memory_is_slow_a_state_is_loaded_once_and_keys_are_read(bed):
    spec = bed.spec
    slow = Theory(spec, Rates(1e18, 1e9), HARDWARE)
    weights, head = spec.layer_parameters * 4, spec.head_parameters * 4
    moved = weights + head + spec.kv_bytes_per_token * 256 + 3 * spec.state_bytes
    assert slow.resumed(128, 256, 1000).bound_s == pytest.approx(moved / 1e9, abs=1e-9)
    cold = weights + head + spec.kv_bytes_per_token * 256 + 2 * spec.state_bytes
    assert slow.resumed(0, 256, 1000).bound_s == pytest.approx(cold / 1e9, abs=1e-9)


def test_copies_are_read_and_written(theory, bed):
    assert theory.copied(3) == 6 * bed.spec.state_bytes / 1e15


def test_the_curve_stands_at_every_place_of_a_state_and_falls(theory):
    curve = theory.curve(300, 1000)
    assert curve["resume"] == [0, 64, 128, 192, 256]
    for side in ("bound_s", "modelled_s"):
        assert curve[side] == sorted(curve[side], reverse=True)
        assert curve[side][2] == getattr(theory.resumed(128, 300, 1000), side)


def test_what_ran_without_captures_is_what_the_curve_says(folder, read, settings, bed):
    rows, summary = read(folder)
    toy = settings()
    expected = Theory(bed.spec, Rates(**summary["rates"]), toy.hardware)
    plain = [row for row in rows if row.captured_states == 0]
    assert {row.reused_tokens for row in plain} >= {0, 128, 192}
    for row in plain:
        told = expected.resumed(row.reused_tokens, row.length, toy.token_budget)
        assert (row.bound_s, row.modelled_s) == told
