"""The neighbour-aware repair: tokens of spans that attend most to what stands before their span."""

from __future__ import annotations

import torch
from torch import Tensor

from spanlab.engine.blend import Blend, Reader
from spanlab.engine.pool import PagePool
from spanlab.engine.query_rows import QueryRows
from spanlab.engine.row_chooser import RowChooser


class NeighbourBlend(Blend):
    """Ranks tokens by the attention that they give, in full view, to everything before their own span.

    score(i) = Σ_h Σ_{j < start of i's span} a_h(i, j), with a the softmax over all of the prompt up to i at the check
    layer; since softmax is normalised, that is Σ_h 1 - exp(lse over the own span - lse over all). All tokens pass the
    layers before in full view, as in CacheBlend.

    `own`  the same rows by cache span, in order, each reading its own cache span alone
    """

    def __init__(
        self, chooser: RowChooser, rows: QueryRows, slots: Tensor, pool: PagePool, reader: Reader, own: list[QueryRows]
    ) -> None:
        super().__init__(chooser, rows, slots, pool, reader)
        self._own = reader(*own)

    def _projected(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        self._write(layer, key, value)
        own, whole = (attention.attend_with_sums(layer, query)[1] for attention in (self._own, self._attention))
        self._chooser.rank(-torch.expm1(own - whole).sum(-1))
