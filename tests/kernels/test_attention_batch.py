"""Flattening groups, and planning their calls of dense attention on the CPU."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from spanlab_kernels.attention import attend
from spanlab_kernels.attention.batch import FORMS, Group, Span, span_batch
from spanlab_kernels.attention.cpu import MASKED_ROWS, Run, plan, row_plan
from spanlab_kernels.attention.reference import key_mass
from spanlab_kernels.blocks import angle_table
from spanlab_kernels.testing import inverse_powers

from .attention_layouts import Layout, Prompt, Shape, Use, dense, fill, store

TABLE = angle_table(inverse_powers(8), 4096)
SPAN = Span(index=5, length=6, position=40, pages=[7, 2], offset=1)


def calls_of(batch, group=0, *, per_span=False):
    return plan(batch, per_span=per_span).groups[group][1]


def test_keys_are_at_the_slots_of_their_spans():
    batch = span_batch(
        [Group([10], [SPAN]), Group([], []), Group([3, 4], [replace(SPAN, position=0)] * 2)], page_size=4
    )
    slot, prompt_index, position = batch.keys()
    assert slot.tolist() == [29, 30, 31, 8, 9, 10] * 3
    assert prompt_index.tolist() == [5, 6, 7, 8, 9, 10] * 3
    assert position.tolist() == [*range(40, 46), *range(6), *range(6)]


def test_bounds_are_those_of_the_groups():
    batch = span_batch([Group([10], [SPAN], [-3]), Group([3, 4], [SPAN, SPAN], [8, 9])], page_size=4)
    assert (batch.rows, batch.groups, batch.max_rows, batch.max_keys, batch.page_count) == (3, 2, 2, 12, 8)
    assert batch.one_row_groups.tolist() == [0]
    assert batch.shifted and not span_batch([Group([3], [SPAN])], page_size=4).shifted
    assert [batch.reach(form) for form in ("MAT", "KR", "QR")] == [9, 45, 48]


def same(x: object, y: object) -> bool:
    """Whether two fields of a batch have equal numbers."""
    if isinstance(x, tuple):
        return all(map(same, x, y))
    return torch.equal(x, y) if isinstance(x, torch.Tensor) else np.array_equal(x, y)


def test_arrays_are_equal_to_lists():
    lists = Group([3, 4], [SPAN], [8, 9])
    arrays = Group(np.array([3, 4]), [replace(SPAN, pages=np.array([7, 2]))], np.array([8, 9]))
    from_lists, from_arrays = (vars(span_batch([group], page_size=4)) for group in (lists, arrays))
    for name in from_lists.keys() - {"groups_on_host"}:
        assert same(from_lists[name], from_arrays[name])


def test_tensors_are_aligned_for_the_device():
    batch = span_batch([Group([1, 2, 3], [SPAN] * 5)], page_size=4)
    tensors = [x for x in vars(batch).values() if isinstance(x, torch.Tensor)]
    assert len(tensors) == 13 and all(x.data_ptr() % 16 == 0 and x.dtype == torch.int32 for x in tensors)


@pytest.mark.parametrize(
    ("group", "sentence"),
    [
        (Group([1, 2], [], [0]), "query_shift must be as long as query_index, 2, not 1."),
        (Group([4, -1], []), "query_index must not be negative, as -1 is."),
        (Group([1], [replace(SPAN, length=0)]), "length of a span must be at least 1, not 0."),
        (Group([1], [replace(SPAN, index=-1)]), "index and position of a span must not be negative, not -1 and 40."),
        (Group([1], [replace(SPAN, position=-2)]), "index and position of a span must not be negative, not 5 and -2."),
        (Group([1], [replace(SPAN, offset=4)]), "offset of a span must lie in [0, 4), its first page, not 4."),
        (Group([1], [replace(SPAN, length=8)]), "pages of a span of length 8 at offset 1 must be 3, not 2."),
        (Group([1], [replace(SPAN, pages=[0, -1])]), "pages of a span must not be negative, as -1 is."),
    ],
    ids=str,
)
def test_wrong_groups_are_one_sentence(group, sentence):
    with pytest.raises(ValueError) as error:  # noqa: PT011 the complete sentence is compared
        span_batch([group], page_size=4)
    assert str(error.value) == sentence


@pytest.mark.parametrize("size", [0, 3, -4])
def test_page_size_is_a_power_of_two(size):
    with pytest.raises(ValueError, match=f"^page_size must be a power of two, not {size}.$"):
        span_batch([], page_size=size)


def rows_of(batch, form="MAT"):
    return row_plan(batch, form, TABLE, False)


def test_short_runs_of_a_row_are_copied_together():
    spans = [Span(0, 6, 0, [4, 0]), Span(6, 4, 6, [3]), Span(10, 1, 10, [1])]
    batch = span_batch([Group([10], spans)], page_size=4)
    for form, runs in (("MAT", [Run(0, 11, 1)]), ("QR", [Run(0, 6, 1), Run(6, 4, 1), Run(10, 1, 1)])):
        (copies,) = rows_of(batch, form).copies
        assert copies.slot.tolist() == [16, 17, 18, 19, 0, 1, 12, 13, 14, 15, 4] and copies.runs == runs


@pytest.mark.parametrize("rows", [1, 2])
def test_consecutive_keys_are_not_copied(rows):
    spans = [Span(0, 100, 0, [2, 3], 1), Span(100, 80, 100, [3, 4], 37)]
    batch = span_batch([Group([200] * rows, spans)], page_size=64)
    if rows == 1:
        assert rows_of(batch).in_pool == [Run(129, 180, 1)] and not rows_of(batch).copies
    else:
        assert [slots for _, slots in calls_of(batch)] == [slice(129, 309)]


@pytest.mark.parametrize("rows", [1, 2])
def test_long_runs_apart_stay_apart(rows):
    spans = [Span(0, 1000, 0, [0]), Span(1000, 1000, 0, [2])]
    batch = span_batch([Group([2000] * rows, spans)], page_size=1024)
    if rows == 1:
        assert rows_of(batch).in_pool == [Run(0, 1000, 1), Run(2048, 1000, 1)]
    else:
        assert [slots for _, slots in calls_of(batch)] == [slice(0, 1000), slice(2048, 3048)]


def test_few_keys_are_rotated_instead_of_their_rows():
    spans = [Span(0, 9, 0, [4]), Span(9, 10, 9, [1]), Span(19, 600, 19, [2]), Span(619, 600, 0, [0])]
    groups = [Group([2000, 2001], spans), Group(range(2000, 2064), spans)]
    few_rows, many_rows = (
        [
            (call.keys[1] - call.keys[0], call.key_shift, call.rotates_keys)
            for call, _ in calls_of(batch, group, per_span=True)
        ]
        for batch in [span_batch(groups, page_size=1024)]
        for group in range(2)
    )
    assert few_rows == [(9, 0, False), (10, 9, False), (600, 19, False), (600, 0, False)]
    assert many_rows == [(19, 0, True), (600, 19, False), (600, 0, False)]


def test_rows_that_share_keys_read_them_at_once():
    shared, separate = Span(0, 100, 0, [5, 6]), Span(100, 3, 100, [1])
    shifted = replace(shared, index=50, position=50)
    batch = span_batch(
        [Group([102], [shared, separate]), Group([149], [shifted]), Group([120], [shifted])], page_size=64
    )
    plan_ = rows_of(batch, "QR")
    assert plan_.in_pool == [Run(320, 71, 1), Run(320, 100, 2)]
    assert plan_.rows.tolist() == [2, 0, 1, 0] and plan_.targets.tolist() == [0, 1, 2]
    assert [copies.slot.tolist() for copies in plan_.copies] == [[64, 65, 66]]


def test_a_prefill_is_the_past_and_a_causal_square():
    batch = span_batch([Group(range(8, 12), [Span(0, 6, 0, [0, 1]), Span(6, 6, 6, [2, 3])])], page_size=4)
    past, square = (call for call, _ in calls_of(batch))
    assert (past.rows, past.keys, past.causal) == ((0, 4), (0, 8), False)
    assert (square.rows, square.keys, square.causal) == ((0, 4), (8, 12), True)


def test_masks_of_scattered_rows_are_bounded():
    batch = span_batch([Group(range(0, 2000, 2), [Span(0, 2000, 0, range(2000))])], page_size=1)
    masked = [call for call, _ in calls_of(batch) if call.masked]
    assert sum(stop - start for start, stop in (call.rows for call in masked)) == 1000
    assert all(stop - start <= MASKED_ROWS for start, stop in (call.rows for call in masked))
    assert all(stop - start < 2 * MASKED_ROWS for start, stop in (call.keys for call in masked))


def test_a_plan_is_cached_for_all_layers():
    batch = span_batch([Group([10], [SPAN])], page_size=4)
    assert plan(batch, per_span=True) is plan(batch, per_span=True)


# -- The attention mass of a key equals dense attention over values that are 1 for this key and 0 for others. ---


LAYOUT = Layout([20, 9, 30], [Prompt([40, 41, 55, 59], [Use(0, 31, 31, 20), Use(1, 2, 2, 9), Use(2, 60, 60, 30)])])
SHAPES = [Shape(), Shape(kv_heads=2, group_heads=3, rotary_dim=32), Shape(page_size=1, interleaved=True)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_mass_is_the_sum_of_dense_weights(shape, form):
    content = fill(LAYOUT, shape)
    order = [torch.eye(59, 64)[start : start + length] for start, length in ((0, 20), (20, 9), (29, 30))]
    ones = replace(content, values=[value[:, None].expand(-1, shape.kv_heads, -1) for value in order])
    expected = dense(ones)[0].sum((0, 1))[:59]
    query, keys, values, batch = store(content, form)
    options = {"form": form, "table": shape.table(), **shape.options}
    lse = attend(query, keys, values, batch, **options)[1]
    mass = key_mass(query, lse, keys, batch, **options)
    torch.testing.assert_close(mass.double(), expected, atol=1e-5, rtol=0)
    assert mass[29:].abs().max() == 0  # no row sees the last document
    assert abs(float(mass.sum()) - 4 * shape.kv_heads * shape.group_heads) < 1e-4
