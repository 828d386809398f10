"""Query rows of decoding sequences, one per sequence, updated from step to step."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Ordered
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spanlab.core.scheduled import Sequence
from spanlab.engine.attention_context import AttentionContext
from spanlab.engine.key_layout import carried_rotation
from spanlab.engine.page_table import append_to_each
from spanlab.engine.query_rows import visible_spans
from spanlab.engine.request_state import RequestState
from spanlab_kernels.attention import Group, GroupArrays, flatten, joined


class Reads(NamedTuple):
    """Spans that the row of one sequence attends to, and a mask of the independent ones."""

    groups: GroupArrays
    independent: NDArray[np.bool_]


class TailRows(NamedTuple):
    """One row per decoding sequence; sizes do not depend on context lengths.

    `ids`          input tokens
    `rotations`    RoPE positions that the model applies to query and key
    `slots`        slots for key and value
    `groups`       spans that the rows attend to
    `independent`  mask of the independent spans of `groups`
    """

    ids: NDArray[np.int64]
    rotations: NDArray[np.int64]
    slots: NDArray[np.int64]
    groups: GroupArrays
    independent: NDArray[np.bool_]


class DecodeRows:
    """The rows of a batch of decoding sequences, in order, from step to step.

    `reads`  spans by request, reused while the request decodes
    """

    def __init__(
        self,
        sequences: Ordered[Sequence],
        request_states: Ordered[RequestState],
        context: AttentionContext,
        previous: dict[RequestState, Reads],
    ) -> None:
        self.sequences, self._context = sequences, context
        lasts = [request_state.spans[-1] for request_state in request_states]
        self._pages = [last.pages for last in lasts]
        self._cache_span = lasts[0].cache_span  # all are ordered text with the same rotation
        self._starts = np.array([last.cache_span.start for last in lasts], np.int64)
        self._bases = np.array([last.base for last in lasts], np.int64)
        self.reads = {state: previous.get(state) or _spans_of(state) for state in request_states}
        self._groups = joined([reads.groups for reads in self.reads.values()])
        self._independent = np.concatenate([reads.independent for reads in self.reads.values()])
        self._last_spans = np.cumsum(self._groups.spans) - 1  # the last span of each row is its own cache span

    def advance(self, outputs: Mapping[int, list[int]]) -> TailRows:
        """Advance every row to its next token, and allocate pages for rows that start a new one.

        `outputs`  generated tokens by request id
        """
        indices = np.array([sequence.prompt + sequence.generated - 1 for sequence in self.sequences], np.int64)
        tokens = [outputs[sequence.request.id][sequence.generated - 1] for sequence in self.sequences]
        rows, page = indices - self._starts, self._context.pool.shape.page_size
        self._extend_lists(rows // page)
        firsts = np.fromiter((pages.start for pages in self._pages), np.int64, len(self._pages))
        slots = self._context.pages.ids[firsts + rows // page] * page + rows % page
        rotations = carried_rotation(self._context.key_layout, self._cache_span, self._bases, rows)
        spans = self._groups.of_span
        spans.length[self._last_spans], spans.first_page[self._last_spans] = rows + 1, firsts
        groups = self._groups._replace(query_index=indices, query_shift=self._bases + rows - rotations)
        return TailRows(np.array(tokens, np.int64), rotations, slots, groups, self._independent)

    def _extend_lists(self, last: np.ndarray) -> None:
        """Append a page to each list that does not contain its page index `last`."""
        short = [pages for pages, index in zip(self._pages, last.tolist(), strict=True) if pages.length <= index]
        if short:
            append_to_each(self._context.pages, short, self._context.pool.allocate(len(short)))


def _spans_of(request_state: RequestState) -> Reads:
    last = len(request_state.spans) - 1
    text = request_state.spans[last]
    spans = visible_spans(request_state, last, text.cache_span.start + text.pages.length)
    groups = flatten([Group([0], [span for span, _ in spans])])
    return Reads(groups, np.array([independent for _, independent in spans]))
