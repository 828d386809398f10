"""How much attention every key gets."""

from __future__ import annotations

import torch
from torch import Tensor

from spanlab_kernels.angles import AngleTable
from spanlab_kernels.attention.batch import SpanBatch
from spanlab_kernels.attention.checks import check
from spanlab_kernels.attention.reference import scored


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

    `query`, `batch` and the rest are as in `attend`; `lse` float32 [T, Hq] is what that returns for all keys that the
    rows see, of which `batch` may have a part. Runs on any device; every score is formed, a block of rows at a time.
    ValueError for what does not fit together.
    """
    check(query, key_pages, key_pages, batch, form, table, scale)
    mass = query.new_zeros(int(batch.starts.keys[-1]), dtype=torch.float32)
    for rows, keys, scores in scored(query, key_pages, batch, form, table, interleaved):
        mass[keys] += (scores * scale - lse[rows, :, None]).exp().sum((0, 1))
    return mass
