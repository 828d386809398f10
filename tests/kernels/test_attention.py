"""Attention over spans is dense attention over raw keys turned to their positions, in every form, whoever serves."""

import pytest
import torch

from spanlab_kernels import attention
from spanlab_kernels.attention import FORMS, reference
from spanlab_kernels.attention import triton as compiled
from spanlab_kernels.testing import agrees

from .attention_layouts import LAYOUTS, SHAPES, Shape, dense, fill, in_a_row, run

SERVERS = {"reference": reference.attend, "cpu": attention.attend, "kernel": compiled.attend}


def assert_is_dense(content, form, serve, device="cpu"):
    """Judged by the dense truth, against what torch makes of it in the same dtype: the CPU path or the reference."""
    out, lse = run(serve, content, form, device)
    true_out, true_lse = dense(content)
    torch_out, torch_lse = run(reference.attend, content, form)
    assert agrees(out, true_out, torch_out, content.shape.dtype)
    # scores of stored keys carry their rounding, which no form can undo
    assert agrees(lse, true_lse, torch_lse, content.shape.dtype)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("server", SERVERS)
def test_every_layout_is_dense(server, layout, form):
    shape = SHAPES[0] if server == "kernel" else SHAPES[list(LAYOUTS).index(layout) % len(SHAPES)]
    assert_is_dense(fill(LAYOUTS[layout], shape), form, SERVERS[server])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
@pytest.mark.parametrize("server", SERVERS)
def test_every_shape_is_dense(server, shape, form):
    assert_is_dense(fill(in_a_row([63, 70, 9], 9), shape), form, SERVERS[server])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("server", "dtype"),
    # the interpreter multiplies the bits of bfloat16 as if they were integers; the compiled kernel has it under gpu
    [("cpu", torch.bfloat16), ("cpu", torch.float16), ("kernel", torch.float16)],
    ids=str,
)
def test_half_precision_is_as_good_as_torch(server, dtype, form):
    assert_is_dense(fill(LAYOUTS["prefill and decode"], Shape(dtype=dtype)), form, SERVERS[server])


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_device_is_dense(layout, shape, form, device):
    assert_is_dense(fill(LAYOUTS[layout], shape), form, attention.attend, device)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("rows", [1, 12, 500])
def test_device_is_dense_over_a_thousand_keys(rows, head_dim, dtype, form, device):
    shape = Shape(head_dim=head_dim, rotary_dim=head_dim, kv_heads=2, group_heads=4, dtype=dtype)
    assert_is_dense(fill(in_a_row([500, 75, 1000, 63, max(1, rows)], rows), shape), form, attention.attend, device)
