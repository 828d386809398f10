"""The query-aware repair: a separate forward selects the span tokens that the query attends to most."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from spanlab.engine.attention_metadata import AttentionMetadata
from spanlab.engine.blend import BuildAttention, NoRowsLeft
from spanlab.engine.pool import PagePool
from spanlab.engine.query_rows import QueryRows


class Probe:
    """The attention of a forward up to the last profiled layer, and the scores of span tokens.

    score(j) = Σ_l Σ_h Σ_i a_lh(i, j) over profiled layers l, heads h and tokens i of the query, with a the softmax over
    all of the prompt up to i, with spans as stored.

    `rows`        missing text between the spans, and the query at the end
    `query_rows`  the query's rows, restricted to the spans that tokens are selected from
    """

    def __init__(
        self,
        rows: QueryRows,
        slots: Tensor,
        pool: PagePool,
        build_attention: BuildAttention,
        layers: Sequence[int],
        query_rows: QueryRows,
    ) -> None:
        self._slots, self._pool, self._layers = slots, pool, layers
        self._attention: AttentionMetadata = build_attention(rows)
        self._query_attention, self._count = build_attention(query_rows), len(query_rows.indices)
        self._positions = np.concatenate(
            [np.arange(span.index, span.index + span.length) for span, _ in query_rows.spans]
        )
        self._scores = torch.zeros(len(self._positions), dtype=torch.float32, device=slots.device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """One layer's attention, see `hook.Attend`; NoRowsLeft after the last profiled layer."""
        self._pool.write(layer, self._slots, key, value)
        out, sums = self._attention.attend_with_sums(layer, query)
        if layer in self._layers:
            self._scores += self._query_attention.mass(layer, query[-self._count :], sums[-self._count :])
        if layer == self._layers[-1]:
            raise NoRowsLeft
        return out

    def chosen(self, count: int) -> np.ndarray:
        """Prompt positions of the `count` tokens with the highest scores, increasing."""
        return np.sort(self._positions[self._scores.topk(count).indices.cpu().numpy()])
