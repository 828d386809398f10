"""How the kernels are launched: keys listed by tile and split into pieces, and rotated copies of spans."""

from itertools import product

import pytest

from spanlab_kernels.attention import triton as compiled
from spanlab_kernels.attention import triton as dense_attention
from spanlab_kernels.attention.batch import FORMS, Group, Span, span_batch
from spanlab_kernels.attention.kernel import AHEAD, Blocks, count_work, list_tiles

from .attention_layouts import LAYOUTS, SHAPES, Shape, assert_is_dense, direct, fill, in_a_row

SHAPE = Shape(head_dim=16, rotary_dim=8, kv_heads=2, group_heads=3)


def test_tiles_have_the_pool_rows_of_their_keys():
    spans = [Span(0, 40, 7, [9, 2, 5], offset=3), Span(40, 16, 0, [4])]
    batch = span_batch([Group([60], spans), Group([5], [Span(0, 1, 0, [8], offset=15)])], page_size=16)
    tiles, slot = list_tiles(batch, 16, per_key=False), batch.keys().slot.tolist()
    last_again = [slot[32:40] + slot[39:40] * 8, slot[56:] * 16]
    expected = [slot[:16], slot[16:32], last_again[0], slot[40:56], last_again[1]]
    assert tiles.rows[: len(expected)].tolist() == expected
    assert not tiles.rows[len(expected) :].any() and len(tiles.rows) == tiles.max_tiles + AHEAD


@pytest.fixture
def split(monkeypatch):
    """Work of each launch, with keys split as on a large device, even those of short runs."""
    launches = []

    def record(*arguments, **options):
        launches.append(count_work(*arguments, **options))
        return launches[-1]

    monkeypatch.setattr(compiled, "target_programs", lambda device: 8)
    monkeypatch.setattr(compiled, "KEYS_PER_PIECE", 8)
    monkeypatch.setattr(compiled, "blocks", lambda *arguments: Blocks(16, 16, 4, 2))
    monkeypatch.setattr(compiled, "count_work", record)
    return launches


SPLIT = ["prefill and decode", "decode", "rows that see nothing", "chunk within its span"]


@pytest.mark.parametrize(
    ("layout", "form"),  # pieces of every form are merged by one kernel
    [
        *product(SPLIT[:1], FORMS),
        *product(SPLIT[1:], ["QR"]),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in product(SPLIT[1:], ["KR", "MAT"])),
    ],
)
def test_pieces_merge_to_the_whole(split, layout, form):
    content = fill(LAYOUTS[layout], Shape(head_dim=16, rotary_dim=8))
    assert_is_dense(content, form, direct(compiled.attend))
    assert max(int(work.pieces.max()) for work in split) > 1
    assert all(int(work.starts[-1]) <= work.max_pieces for work in split)


@pytest.fixture
def library_queries(monkeypatch):
    """Queries passed to the selection of a library, with rotated copies for short prefills too."""
    queries = []
    monkeypatch.setattr(compiled, "ROTATE_ONCE_ENTRIES", 1)

    def select(query):
        queries.append(query)
        return dense_attention.Sdpa()

    monkeypatch.setattr(dense_attention, "select_library", select)
    return queries


@pytest.mark.parametrize("form", ["KR", "QR"])
@pytest.mark.parametrize(
    ("layout", "contiguous"),
    [("whole prompt", True), ("chunk behind three documents", True), ("scattered rows", False),
     ("prefill and decode", True), ("rows that see nothing", False)],
)  # fmt: skip
@pytest.mark.parametrize("shape", [SHAPE, pytest.param(SHAPES[4], marks=pytest.mark.slow)], ids=str)
def test_rotated_copies_are_dense(library_queries, shape, layout, contiguous, form):
    content = fill(LAYOUTS[layout], shape)
    assert_is_dense(content, form, direct(compiled.attend))
    assert bool(library_queries) == contiguous


@pytest.mark.parametrize("rows", [1, 2])
def test_more_heads_than_a_tile_has_rows(rows):
    content = fill(in_a_row([40, 9], rows), Shape(head_dim=16, rotary_dim=16, group_heads=71))
    assert_is_dense(content, "QR", direct(compiled.attend))


# products read rows from registers; two groups of warps share them
TARGETS = {"sm_80": (False, False), "sm_90": (True, False), "sm_100": (True, True)}


@pytest.mark.parametrize(
    ("target", "shape"),
    [
        *(("sm_100", shape) for shape in (*SHAPES[:6], SHAPES[8])),
        *product(("sm_80", "sm_90"), [SHAPES[2]]),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in product(("sm_80", "sm_90"), SHAPES)),
    ],
    ids=str,
)
def test_large_tiles_are_dense_for_every_target(monkeypatch, target, shape):
    registers, shared = TARGETS[target]
    monkeypatch.setattr(compiled, "multiplies_registers", lambda device: registers)
    monkeypatch.setattr(compiled, "shares_rows", lambda device: shared)
    monkeypatch.setattr(compiled, "blocks", lambda *arguments: Blocks(64, 32, 8, 2))
    content = fill(LAYOUTS["chunk behind three documents"], shape)
    assert_is_dense(content, "QR", direct(compiled.attend))
