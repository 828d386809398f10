"""The neighbour-aware repair: tokens of spans that attend most to what stands before their span."""

from __future__ import annotations

from torch import Tensor

from spanlab.engine.blend import Blend, Reader
from spanlab.engine.pool import PagePool
from spanlab.engine.query_rows import QueryRows
from spanlab.engine.row_chooser import RowChooser


class NeighbourBlend(Blend):
    """Ranks tokens by the attention that they give, in full view, to everything before their own span.

    score(i) = Σ_h Σ_{j < start of i's span} a_h(i, j), with a the softmax over all of the prompt up to i at the check
    layer: Σ_h exp(lse over what stands before the span - lse over all). All tokens pass the layers before in full view,
    as in CacheBlend.

    `before`  the same rows by cache span, in order, each reading what stands before that
    """

    def __init__(
        self,
        chooser: RowChooser,
        rows: QueryRows,
        slots: Tensor,
        pool: PagePool,
        reader: Reader,
        before: list[QueryRows],
    ) -> None:
        super().__init__(chooser, rows, slots, pool, reader)
        self._before = reader(*before)

    def _projected(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        self._write(layer, key, value)
        before, whole = (part.attend_with_sums(layer, query)[1] for part in (self._before, self._attention))
        self._chooser.rank((before - whole).exp().sum(-1))
