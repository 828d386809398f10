"""Attention mass of every key: the softmax weight that it receives."""

from __future__ import annotations

import torch
from torch import Tensor

from spanlab_kernels.angles import AngleTable
from spanlab_kernels.attention.batch import Scores, SpanBatch
from spanlab_kernels.attention.checks import check
from spanlab_kernels.attention.reference import score_blocks


def key_mass(
    query: Tensor,
    lse: Tensor,
    key_pages: Tensor,
    batch: SpanBatch,
    *,
    form: str,
    table: AngleTable,
    scale: float,
    interleaved: bool = False,
) -> Tensor:
    """Softmax weight of every key of `batch`, summed over rows and heads: float32 [keys], in the order of its spans.

    `query`, `batch` and the other arguments are as in `attend`; `lse` float32 [T, Hq] is that function's result for all
    keys that the rows see, of which `batch` may have a subset. Runs on any device; every score is computed, a block of
    rows at a time. ValueError for arguments that do not match.
    """
    scores = Scores(form, table, scale, interleaved)
    check(query, key_pages, key_pages, batch, scores)
    mass = query.new_zeros(int(batch.starts.keys[-1]), dtype=torch.float32)
    for rows, keys, products in score_blocks(query, key_pages, batch, scores):
        mass[keys] += (products * scale - lse[rows, :, None]).exp().sum((0, 1))
    return mass
