"""How the kernels are launched: keys split into parts, blocks by shape, and compilation for the device."""

import pytest
import torch

from spanlab_kernels.attention import FORMS
from spanlab_kernels.attention import triton as compiled
from spanlab_kernels.attention.work import count_work

from .attention_layouts import LAYOUTS, Shape, dense, fill, in_a_row, run

SHAPE = Shape(head_dim=16, rotary_dim=8, kv_heads=2, group_heads=3)


@pytest.fixture
def split(monkeypatch):
    """Splits keys as a large device does, of short runs too; the work of each launch."""
    launched = []

    def noted(*arguments, **options):
        launched.append(count_work(*arguments, **options))
        return launched[-1]

    monkeypatch.setattr(compiled, "wanted_programs", lambda device: 16)
    monkeypatch.setattr(compiled, "KEYS_PER_PIECE", 8)
    monkeypatch.setattr(compiled, "blocks", lambda *arguments: compiled.Blocks(32, 16, 4, 2))
    monkeypatch.setattr(compiled, "count_work", noted)
    return launched


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", ["decode", "prefill and decode", "rows that see nothing", "chunk within its span"])
def test_pieces_merge_to_the_whole(split, layout, form):
    content = fill(LAYOUTS[layout], SHAPE)
    for x, y in zip(run(compiled.attend, content, form), dense(content), strict=True):
        torch.testing.assert_close(x.double(), y, atol=2e-5, rtol=2e-5)
    assert max(int(work.pieces.max()) for work in split) > 1
    assert all(int(work.starts[-1]) <= work.most for work in split)


@pytest.mark.parametrize("rows", [1, 2])
def test_more_heads_than_a_tile_has_rows(rows):
    content = fill(in_a_row([40, 9], rows), Shape(head_dim=16, rotary_dim=16, group_heads=71))
    for x, y in zip(run(compiled.attend, content, "QR"), dense(content), strict=True):
        torch.testing.assert_close(x.double(), y, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_tiles_fit_their_rows(head_dim, dtype):
    for entries in (1, 4, 16, 17, 33, 64, 65, 5000):
        size = compiled.blocks(head_dim, dtype, entries)
        assert size.m >= min(entries, 32) and size.m & (size.m - 1) == 0 and size.m >= 16


HOPPER = """
import torch
from spanlab_kernels.angles import angle_table
from spanlab_kernels.attention import Group, Span, span_batch, triton
from spanlab_kernels.testing import inverse_powers
triton.wanted_programs = lambda device: 264
for form in {forms}:
    for rows in {rows}:
        group = Group(range(4096 - rows, 4096), [Span(0, 4096, 0, range(256))], [1] * rows if {shifted} else None)
        pages = torch.empty(256, 16, {kv_heads}, {head_dim}, dtype=torch.{dtype})
        query = torch.empty(rows, {heads}, {head_dim}, dtype=torch.{dtype})
        triton.attend(
            query, pages, pages, span_batch([group], page_size=16),
            form=form, table=angle_table(inverse_powers({rotary_dim}), 4097), scale=0.1, interleaved={interleaved},
        )
"""


DEFAULTS = {"rows": (1, 12, 1000), "forms": FORMS, "head_dim": 128, "heads": 32, "kv_heads": 8}
DEFAULTS |= {"dtype": "bfloat16", "shifted": False, "interleaved": False}


def hopper(**options):
    """The program of `compile_for_hopper`; `rotary_dim` is head_dim where it is not given."""
    options = DEFAULTS | options
    return HOPPER.format(**{"rotary_dim": options["head_dim"]} | options)


def test_kernels_compile_for_hopper(compile_for_hopper):
    kernels = compile_for_hopper(hopper(rows=(1, 1000)))
    assert [name for name, _ in kernels] == ["attend_tiles", "merge_parts", "attend_tiles"] * 3


# heads, kv heads, channels of a head and of its rotation: of the models that tests of the engine run
TEST_MODELS = {
    "stories260K": {"heads": 8, "kv_heads": 4, "head_dim": 8},
    "babyllama": {"heads": 8, "kv_heads": 4, "head_dim": 16},
    "make_small": {"heads": 4, "kv_heads": 2, "head_dim": 16},
    "make_hybrid": {"heads": 4, "kv_heads": 2, "head_dim": 16, "rotary_dim": 4},
}


@pytest.mark.parametrize("forms", [("QR",), pytest.param(("KR", "MAT"), marks=pytest.mark.slow)], ids="-".join)
@pytest.mark.parametrize("name", TEST_MODELS)
def test_models_of_tests_compile_for_hopper(compile_for_hopper, name, forms):
    program = hopper(**TEST_MODELS[name], rows=(1, 48), dtype="float32", forms=forms)
    kernels = [kernel for kernel, _ in compile_for_hopper(program)]
    assert kernels.count("attend_tiles") == 2 * len(forms)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("head_dim", [8, 16, 24, 64, 80, 128, 256])
def test_every_size_compiles_for_hopper(compile_for_hopper, head_dim, dtype):
    kernels = compile_for_hopper(hopper(head_dim=head_dim, dtype=dtype))
    assert [name for name, _ in kernels].count("attend_tiles") == 9


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("options", [{"shifted": True, "rotary_dim": 32}, {"interleaved": True}], ids=str)
def test_every_rotation_compiles_for_hopper(compile_for_hopper, options, head_dim):
    kernels = compile_for_hopper(hopper(head_dim=head_dim, **options))
    assert [name for name, _ in kernels].count("attend_tiles") == 9
