"""A scan of one row of each sequence, in plain torch or by a kernel, is a token of the recurrence of each."""

from functools import partial

import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5

from spanlab.engine.scan import ScanInputs, Segment, scan_rows, scan_rows_by_kernel

from .test_chunk_scan import KEY, VALUE, inputs_of, token_by_token

SCANS = {
    "in torch": scan_rows,
    "by a kernel": partial(scan_rows_by_kernel, modeling_qwen3_5.torch_recurrent_gated_delta_rule),
}
ROWS, HEADS = 5, 4


def states_of(rows: int) -> torch.Tensor:
    return torch.randn(rows, HEADS, KEY, VALUE, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("scan", SCANS.values(), ids=SCANS)
@pytest.mark.parametrize("key_heads", [2, HEADS])
def test_every_row_is_a_token_of_its_recurrence(key_heads, scan):
    inputs, before = inputs_of(ROWS, key_heads, HEADS), states_of(ROWS)
    out, after = scan(inputs, before.clone())
    for row in range(ROWS):
        outputs, state = token_by_token(inputs, Segment(row, (row + 1,)), before[row])
        assert torch.allclose(out[row].double(), outputs[0], atol=1e-5)
        assert torch.allclose(after[row].double(), state, atol=1e-5)


@pytest.mark.parametrize("scan", SCANS.values(), ids=SCANS)
def test_bfloat16_inputs_are_scanned_in_float32(scan):
    inputs, before = ScanInputs(*(each.bfloat16() for each in inputs_of(1, HEADS, HEADS))), states_of(1)
    out, after = scan(inputs, before.clone())
    outputs, state = token_by_token(inputs, Segment(0, (1,)), before[0])
    assert out.dtype == torch.bfloat16 and after.dtype == torch.float32
    assert torch.allclose(after[0].double(), state, atol=1e-5)
    assert torch.allclose(out.double(), outputs, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("scan", SCANS.values(), ids=SCANS)
def test_no_row_sees_another(scan):
    """Padding rows may have any contents."""
    inputs, before = inputs_of(ROWS, 2, HEADS), states_of(ROWS)
    out, after = scan(inputs, before.clone())
    before[-1] = torch.nan
    for each in inputs:
        each[-1] = torch.nan
    other, then = scan(inputs, before.clone())
    assert torch.equal(out[:-1], other[:-1]) and torch.equal(after[:-1], then[:-1])
    assert other[-1].isnan().all() and then[-1].isnan().all()
