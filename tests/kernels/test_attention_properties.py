"""Attention over random layouts and unusual tensors is dense, and wrong arguments are one sentence."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spanlab_kernels.attention import attend
from spanlab_kernels.attention import triton as compiled
from spanlab_kernels.attention.batch import FORMS, Group, Span, span_batch
from spanlab_kernels.blocks import angle_table
from spanlab_kernels.testing import inverse_powers

from .attention_layouts import Layout, Prompt, Shape, Use, assert_is_dense, direct, fill, in_a_row

SHAPE = Shape(page_size=4, head_dim=16, rotary_dim=16, kv_heads=2, group_heads=2)
SERVERS = pytest.mark.parametrize("serve", [attend, direct(compiled.attend)], ids=["cpu", "kernel"])


@SERVERS
def test_query_may_be_a_slice_of_something_wider(serve):
    content = fill(in_a_row([20, 9], 9), SHAPE)
    wide = torch.cat([torch.full_like(content.query, torch.nan), content.query], 1)
    narrow = replace(content, query=wide[:, content.query.shape[1] :])
    assert_is_dense(narrow, "QR", serve)


@SERVERS
def test_no_rows_are_no_work(serve):
    batch = span_batch([Group([], [])], page_size=4)
    pages = torch.zeros(1, 4, 2, 16)
    out, lse = serve(torch.zeros(0, 4, 16), pages, pages, batch, form="KR", table=SHAPE.table(), **SHAPE.options)
    assert out.shape == (0, 4, 16) and lse.shape == (0, 4)


@st.composite
def layouts(draw):
    documents = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    prompts = []
    for _ in range(draw(st.integers(1, 3))):
        uses, index = [], 0
        for document in draw(st.lists(st.integers(0, len(documents) - 1), max_size=4)):
            first = draw(st.integers(0, documents[document] - 1))
            length = draw(st.integers(1, documents[document] - first))
            uses.append(Use(document, index, draw(st.integers(first, 200)), length, first))
            index += length + draw(st.sampled_from([0, 0, 3]))
        start, count = draw(st.integers(0, index)), draw(st.integers(1, 40))
        rows = draw(st.just([*range(start, start + count)]) | st.lists(st.integers(0, index + 3), max_size=40))
        shift = draw(st.none() | st.lists(st.integers(-100, 200), min_size=len(rows), max_size=len(rows)))
        prompts.append(Prompt(rows, uses, shift))
    return Layout(documents, prompts)


SMALL = st.builds(
    Shape,
    page_size=st.sampled_from([1, 4, 16]),
    head_dim=st.sampled_from([16, 20]),
    rotary_dim=st.sampled_from([4, 16]),
    interleaved=st.booleans(),
    kv_heads=st.sampled_from([1, 2]),
    group_heads=st.sampled_from([1, 3]),
)


@pytest.mark.parametrize(("serve", "examples"), [(attend, 60), (direct(compiled.attend), 12)], ids=["cpu", "kernel"])
def test_random_layouts_are_dense(serve, examples):
    @settings(max_examples=examples, deadline=None, derandomize=True)
    @given(layouts(), SMALL, st.sampled_from(FORMS), st.integers(0, 9))
    def holds(layout, shape, form, seed):
        if layout.rows:
            assert_is_dense(fill(layout, shape, seed), form, serve, seed=seed)

    holds()


QUERY, PAGES = torch.zeros(3, 4, 16), torch.zeros(2, 4, 2, 16)
BATCH = span_batch([Group([0, 1, 2], [Span(0, 8, 1000, [0, 1])])], page_size=4)
TABLE = angle_table(inverse_powers(16), 1008)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"form": "RK"}, "form must be one of KR, QR, MAT, not 'RK'."),
        ({"scale": 0.0}, "scale must be positive and finite, not 0.0."),
        ({"query": QUERY[:2]}, "query must have the rows of its batch, 3, not 2."),
        ({"query": QUERY.double()}, "query must be .rows, heads, head_dim. in float32, .* in torch.float64."),
        ({"query": torch.zeros(3, 4, 7)}, "head_dim of query must be even and at most 256, not 7."),
        ({"query": torch.zeros(3, 4, 258)}, "head_dim of query must be even and at most 256, not 258."),
        ({"query": torch.zeros(3, 16, 4).transpose(1, 2)}, "query must have its channels next to each other, .*"),
        ({"query": torch.zeros(3, 5, 16)}, "key_pages must have a number of kv heads that divides 5, not 2."),
        ({"query": torch.zeros(3, 4, 32)}, "key_pages must have the head_dim of query, 32, not 16."),
        ({"key_pages": PAGES.half()}, "key_pages must be contiguous .* in torch.float32 .* in torch.float16 .*"),
        ({"key_pages": PAGES[:1]}, "key_pages must have at least 2 pages, which the batch names, not 1."),
        ({"key_pages": PAGES.view(4, 2, 2, 16)}, "key_pages must have pages of the batch's size, 4, not 2."),
        ({"value_pages": PAGES.mT.mT[:, :, :1]}, "value_pages must be contiguous .*"),
        ({"value_pages": torch.zeros(3, 4, 2, 16)}, "value_pages must be like key_pages, .*"),
        ({"table": angle_table(inverse_powers(18), 1008)}, "table.rotary_dim must be at most head_dim, 16, not 18."),
        ({"table": angle_table(inverse_powers(16), 1007)}, "table.length must exceed .* of form KR, 1007, not 1007."),
    ],
    ids=str,
)
def test_wrong_arguments_are_one_sentence(changed, sentence):
    arguments = {"query": QUERY, "key_pages": PAGES, "value_pages": PAGES, "batch": BATCH, "form": "KR"}
    attend(**arguments, table=TABLE, scale=1.0)
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        attend(**{**arguments, "table": TABLE, "scale": 1.0, **changed})
