"""The roofline's price of spans equals the counts of the attention kernel (benchmarks/kernels/static.json)."""

import json
from pathlib import Path

import pytest

from spanlab_kernels.attention.triton import ROTATE_ONCE_ENTRIES
from spanlab_sim import timing

STATIC = Path(__file__).parents[2] / "benchmarks" / "kernels" / "static.json"
ROWS = json.loads(STATIC.read_text(encoding="utf-8"))["rows"]


def cycles(kernel: str, phase: str) -> tuple[float, float]:
    """Cycles of a tile of 64 keys and of a span on sm_90 at head_dim 128: issue and products in turn."""
    (row,) = [
        row
        for row in ROWS
        if (row["capability"], row["head_dim"], row["kernel"], row["phase"]) == (90, 128, kernel, phase)
    ]
    per_instruction = row["warps"] / 4  # four parts of a multiprocessor issue at once
    return row["tile"] * per_instruction + row["matrix_cycles"], row["span"] * per_instruction


@pytest.mark.parametrize(
    ("phase", "percent", "keys"),
    [
        ("prefill", timing.ROTATED_PREFILL_PERCENT, timing.KEYS_PER_PREFILL_SPAN),
        ("decode", timing.ROTATED_DECODE_PERCENT, timing.KEYS_PER_DECODE_SPAN),
    ],
)
def test_prices_of_spans_follow_the_counted_kernel(phase: str, percent: int, keys: int):
    assert round(100 * (cycles("KR", phase)[0] / cycles("MAT", phase)[0] - 1)) == percent
    tile, span = cycles("QR", phase)
    assert round(64 * span / tile) == keys


def test_simulator_and_kernel_copy_spans_from_the_same_length_on():
    assert timing.ROTATE_ONCE_ENTRIES == ROTATE_ONCE_ENTRIES
