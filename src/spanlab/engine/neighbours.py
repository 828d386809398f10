"""The neighbour-aware repair: recompute the span tokens that attend most to the text before their span."""

from __future__ import annotations

from torch import Tensor

from spanlab.engine.blend import Blend, BuildAttention
from spanlab.engine.pool import PagePool
from spanlab.engine.query_rows import QueryRows
from spanlab.engine.row_chooser import RowChooser


class NeighbourBlend(Blend):
    """Ranks tokens by their attention, with the full prompt visible, to everything before their span.

    score(i) = Σ_h Σ_{j < start of i's span} a_h(i, j), with a the softmax over all of the prompt up to i at the check
    layer: Σ_h exp(lse over keys before the span - lse over all). Earlier layers compute all tokens with the full prompt
    visible, as in CacheBlend.

    `before`  the same rows by cache span, in order, each reading only the tokens before that span
    """

    def __init__(
        self,
        chooser: RowChooser,
        rows: QueryRows,
        slots: Tensor,
        pool: PagePool,
        build_attention: BuildAttention,
        before: list[QueryRows],
    ) -> None:
        super().__init__(chooser, rows, slots, pool, build_attention)
        self._before = build_attention(*before)

    def _projected(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        self._write(layer, key, value)
        before, total = (attention.attend_with_sums(layer, query)[1] for attention in (self._before, self._attention))
        self._chooser.rank((before - total).exp().sum(-1))
