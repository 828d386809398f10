"""The query-aware repair: a separate forward selects the span tokens that the query attends to most."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from spanlab.engine.attention_context import AttentionContext
from spanlab.engine.attention_metadata import attention_of
from spanlab.engine.blend import NoRowsLeft
from spanlab.engine.query_rows import QueryRows
from spanlab_kernels.attention import to_device


class Probe:
    """The attention of a forward up to the last profiled layer, and the scores of span tokens.

    score(j) = Σ_l Σ_h Σ_i a_lh(i, j) over profiled layers l, heads h and tokens i of the query, with a the softmax over
    all of the prompt up to i, with spans as stored.

    `rows`        missing text between the spans, and the query at the end
    `query_rows`  the query's rows, restricted to the spans that tokens are selected from
    `layers`      profiled layers, increasing
    """

    def __init__(
        self, rows: QueryRows, query_rows: QueryRows, layers: Sequence[int], context: AttentionContext
    ) -> None:
        self._pool, self._layers, device = context.pool, layers, context.model.device
        (self._slots,) = to_device([rows.slots], torch.int64, device)
        self._attention = attention_of(context, rows)
        self._query_attention, self._count = attention_of(context, query_rows), len(query_rows.indices)
        self._positions = np.concatenate(
            [np.arange(span.index, span.index + span.length) for span, _ in query_rows.spans]
        )
        self._scores = torch.zeros(len(self._positions), dtype=torch.float32, device=device)

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
