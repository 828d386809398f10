"""Attention over spans equals dense attention over raw keys rotated to their positions, in every form and path."""

from itertools import product

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from spanlab_kernels import attention
from spanlab_kernels.attention import cpu
from spanlab_kernels.attention import triton as compiled
from spanlab_kernels.attention.batch import FORMS
from spanlab_kernels.attention.reference import attend

from ..support.products import in_turn
from .attention_layouts import (
    LAYOUTS,
    SCALE,
    SHAPES,
    Layout,
    Prompt,
    Shape,
    Use,
    assert_is_dense,
    direct,
    fill,
    in_a_row,
    rotate,
    run,
)

PATHS = {"reference": direct(attend), "cpu": attention.attend, "kernel": direct(compiled.attend)}


@pytest.mark.parametrize(  # the interpreter is slow
    ("layout", "form", "path"), [*product(LAYOUTS, FORMS, ("reference", "cpu")), *in_turn(LAYOUTS, FORMS, ["kernel"])]
)
def test_every_layout_is_dense(path, layout, form):
    shape = SHAPES[0] if path == "kernel" else SHAPES[list(LAYOUTS).index(layout) % len(SHAPES)]
    assert_is_dense(fill(LAYOUTS[layout], shape), form, PATHS[path])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", ["same document twice", "scattered rows", "first keys replaced"])
def test_flex_attention_agrees(layout, form):
    content = fill(LAYOUTS[layout], SHAPES[0])
    (prompt,) = content.layout.prompts
    q = rotate(content.query, prompt.shifts, content.shape).float()
    uses = [(use, slice(use.first, use.first + use.length)) for use in prompt.uses]
    key_indices = [torch.arange(use.index, use.index + use.length) for use, _ in uses]
    positions = torch.cat([torch.arange(use.position, use.position + use.length) for use, _ in uses])
    k = rotate(
        torch.cat([content.keys[use.document][document_range] for use, document_range in uses]),
        positions,
        content.shape,
    ).float()
    v = torch.cat([content.values[use.document][document_range] for use, document_range in uses])
    rows, keys = torch.tensor(prompt.rows), torch.cat(key_indices)

    def mask_unseen(score, batch, head, row, key):
        return torch.where(keys[key] <= rows[row], score, -torch.inf)

    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    expected = flex_attention(q, k, v, score_mod=mask_unseen, scale=SCALE, enable_gqa=True)[0].transpose(0, 1)
    out, _ = run(attention.attend, content, form)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)


def test_outputs_merged_in_blocks_are_dense(monkeypatch):
    monkeypatch.setattr(cpu, "MERGED_ROWS", 20)  # two spans for nine rows
    assert_is_dense(fill(in_a_row([63, 70, 9, 80, 31], 9), SHAPES[0]), "QR", direct(cpu.attend))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("read_in_place", [1, 8, 64])
@pytest.mark.parametrize("page_size", [1, 64])
def test_rows_that_share_documents_are_dense(monkeypatch, page_size, read_in_place, form):
    """Consecutive keys of the pool are read in place, by all rows at once; other keys are copied."""
    monkeypatch.setattr(cpu, "READ_IN_PLACE", read_in_place)
    prompts = [
        Prompt([172], [Use(0, 0, 0, 100), Use(1, 100, 100, 70), Use(2, 170, 170, 3)]),
        Prompt([173], [Use(1, 0, 0, 70), Use(0, 70, 70, 100), Use(3, 170, 170, 4)]),
        Prompt([20, 21], [Use(0, 0, 0, 22)]),
        Prompt([50], [Use(0, 10, 10, 100)]),
    ]
    content = fill(Layout([100, 70, 3, 4], prompts), Shape(page_size, kv_heads=2))
    for seed in range(3):
        assert_is_dense(content, form, attention.attend, seed=seed)


def every_shape():
    """Each path, shape and form; under the slow interpreter each shape has one form, in rotation."""
    for path, (index, shape), form in product(PATHS, enumerate(SHAPES[1:]), FORMS):
        fast = path != "kernel" or form == FORMS[index % len(FORMS)]
        yield pytest.param(path, shape, form, marks=() if fast else pytest.mark.slow)


@pytest.mark.parametrize(("path", "shape", "form"), [*every_shape()], ids=str)
def test_every_shape_is_dense(path, shape, form):
    assert_is_dense(fill(in_a_row([63, 70, 9], 9), shape), form, PATHS[path])


@pytest.mark.usefixtures("bfloat16")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("path", ["cpu", "kernel"])
def test_half_precision_is_as_good_as_torch(path, dtype, form):
    assert_is_dense(fill(LAYOUTS["prefill and decode"], Shape(dtype=dtype)), form, PATHS[path])


ON_DEVICE = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@ON_DEVICE
@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_device_is_dense(layout, shape, form):
    assert_is_dense(fill(LAYOUTS[layout], shape), form, attention.attend, "cuda")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("rows", [1, 12, 500])
@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=[pytest.mark.gpu, ON_DEVICE])]
)
def test_a_thousand_keys_are_dense(device, rows, head_dim, dtype, form):
    shape = Shape(head_dim=head_dim, rotary_dim=head_dim, kv_heads=2, group_heads=4, dtype=dtype)
    assert_is_dense(fill(in_a_row([500, 75, 1000, 63, rows], rows), shape), form, attention.attend, device)
