"""The attention mass of a key equals dense attention over values that are 1 for this key and 0 for others."""

from dataclasses import replace

import pytest
import torch

from spanlab_kernels.attention import attend
from spanlab_kernels.attention.batch import FORMS
from spanlab_kernels.attention.reference import key_mass

from .attention_layouts import Layout, Prompt, Shape, Use, dense, fill, store

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
