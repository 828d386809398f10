"""The query-aware repair: which tokens of spans the query attends to most, found by a forward of its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from spanlab.engine.attention_metadata import AttentionMetadata
from spanlab.engine.blend import NothingLeft, Reader
from spanlab.engine.pool import PagePool
from spanlab.engine.query_rows import QueryRows


class Probe:
    """The attention of a forward that ends with the last of the profiled `layers`, and what it says of spans.

    score(j) = Σ_l Σ_h Σ_i a_lh(i, j) over profiled layers l, heads h and tokens i of the query, with a the softmax over
    all of the prompt up to i, spans as they are stored.

    `rows`   missing text between the spans, and behind it the query
    `asked`  the rows of the query, reading only the spans that tokens are chosen from
    """

    def __init__(
        self, rows: QueryRows, slots: Tensor, pool: PagePool, reader: Reader, layers: Sequence[int], asked: QueryRows
    ) -> None:
        self._slots, self._pool, self._layers = slots, pool, layers
        self._attention: AttentionMetadata = reader(rows)
        self._asked, self._count = reader(asked), len(asked.indices)
        self._places = np.concatenate([np.arange(span.index, span.index + span.length) for span, _ in asked.spans])
        self._scores = torch.zeros(len(self._places), dtype=torch.float32, device=slots.device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """One layer's attention, see `hook.Attend`; NothingLeft once every profiled layer is measured."""
        self._pool.write(layer, self._slots, key, value)
        out, sums = self._attention.attend_with_sums(layer, query)
        if layer in self._layers:
            self._scores += self._asked.mass(layer, query[-self._count :], sums[-self._count :])
        if layer == self._layers[-1]:
            raise NothingLeft
        return out

    def chosen(self, count: int) -> np.ndarray:
        """Prompt positions of the `count` tokens that score highest, increasing."""
        return np.sort(self._places[self._scores.topk(count).indices.cpu().numpy()])
