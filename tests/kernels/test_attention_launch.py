"""How the kernels are launched: keys split into pieces, and spans turned once."""

from itertools import product

import pytest
import torch

from spanlab_kernels.attention import FORMS
from spanlab_kernels.attention import dense as dense_attention
from spanlab_kernels.attention import triton as compiled
from spanlab_kernels.attention.blocks import Blocks
from spanlab_kernels.attention.work import count_work

from .attention_layouts import LAYOUTS, SHAPES, Shape, dense, fill, in_a_row, run

SHAPE = Shape(head_dim=16, rotary_dim=8, kv_heads=2, group_heads=3)


@pytest.fixture
def split(monkeypatch):
    """Splits keys as a large device does, of short runs too; the work of each launch."""
    launched = []

    def noted(*arguments, **options):
        launched.append(count_work(*arguments, **options))
        return launched[-1]

    monkeypatch.setattr(compiled, "wanted_programs", lambda device: 8)
    monkeypatch.setattr(compiled, "KEYS_PER_PIECE", 8)
    monkeypatch.setattr(compiled, "blocks", lambda *arguments: Blocks(16, 16, 4, 2))
    monkeypatch.setattr(compiled, "count_work", noted)
    return launched


SPLIT = ["prefill and decode", "decode", "rows that see nothing", "chunk within its span"]


@pytest.mark.parametrize(
    ("layout", "form"),  # pieces are merged by one kernel, whatever the form
    [
        *product(SPLIT[:1], FORMS),
        *product(SPLIT[1:], ["QR"]),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in product(SPLIT[1:], ["KR", "MAT"])),
    ],
)
def test_pieces_merge_to_the_whole(split, layout, form):
    content = fill(LAYOUTS[layout], Shape(head_dim=16, rotary_dim=8))
    for x, y in zip(run(compiled.attend, content, form), dense(content), strict=True):
        torch.testing.assert_close(x.double(), y, atol=2e-5, rtol=2e-5)
    assert max(int(work.pieces.max()) for work in split) > 1
    assert all(int(work.starts[-1]) <= work.most for work in split)


@pytest.fixture
def turned(monkeypatch):
    """Turns spans of short prefills too; the libraries that were asked."""
    asked = []
    monkeypatch.setattr(compiled, "TURNED_ENTRIES", 1)
    monkeypatch.setattr(dense_attention, "best", lambda query: asked.append(query) or dense_attention.Sdpa())
    return asked


@pytest.mark.parametrize("form", ["KR", "QR"])
@pytest.mark.parametrize(
    ("layout", "in_line"),
    [("whole prompt", True), ("chunk behind three documents", True), ("scattered rows", False),
     ("prefill and decode", True), ("rows that see nothing", False)],
)  # fmt: skip
@pytest.mark.parametrize("shape", [SHAPE, pytest.param(SHAPES[4], marks=pytest.mark.slow)], ids=str)
def test_spans_turned_once_are_dense(turned, shape, layout, in_line, form):
    content = fill(LAYOUTS[layout], shape)
    for x, y in zip(run(compiled.attend, content, form), dense(content), strict=True):
        torch.testing.assert_close(x.double(), y, atol=2e-5, rtol=2e-5)
    assert bool(turned) == in_line


@pytest.mark.parametrize("rows", [1, 2])
def test_more_heads_than_a_tile_has_rows(rows):
    content = fill(in_a_row([40, 9], rows), Shape(head_dim=16, rotary_dim=16, group_heads=71))
    for x, y in zip(run(compiled.attend, content, "QR"), dense(content), strict=True):
        torch.testing.assert_close(x.double(), y, atol=2e-5, rtol=2e-5)
