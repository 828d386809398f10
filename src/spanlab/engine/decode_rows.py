"""The rows of all sequences that decode: one each, carried on from step to step."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Ordered
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from spanlab.core.scheduled import Sequence
from spanlab.core.spans import SpanSettings
from spanlab.engine.key_layout import carried_rotation
from spanlab.engine.page_table import append_to_each
from spanlab.engine.query_rows import seen_spans
from spanlab.engine.reader import Reader
from spanlab.engine.request_state import RequestState
from spanlab_kernels.attention import Group, GroupArrays, flatten, joined


class Reads(NamedTuple):
    """What the row of one sequence reads, and which of the spans are independent ones."""

    groups: GroupArrays
    independent: NDArray[np.bool_]


class TailRows(Protocol):
    """One row each of sequences that decode, see `DecodeRows`."""

    rotations: NDArray[np.int64]
    slots: NDArray[np.int64]
    groups: GroupArrays
    independent: NDArray[np.bool_]

    def ids(self, outputs: Mapping[int, list[int]]) -> NDArray[np.int64]:
        """The token of each row, by the tokens generated so far by request id."""
        ...


class DecodeRows:
    """One row of each of some sequences, in order; nothing here grows with the length of what they read.

    `indices`      in prompt and output, int64 [G]
    `rotations`    what the model is to rotate query and key by
    `slots`        where key and value are written
    `groups`       what the rows read
    `independent`  for each span of `groups`, whether it is an independent one
    `reads`        what each request reads; whoever decodes on does not find that out again
    """

    def __init__(
        self,
        sequences: Ordered[Sequence],
        request_states: Ordered[RequestState],
        reader: Reader,
        known: dict[RequestState, Reads],
    ) -> None:
        self.sequences, self._reader = sequences, reader
        lasts = [request_state.spans[-1] for request_state in request_states]
        self._pages = [last.pages for last in lasts]
        self._cache_span = lasts[0].cache_span  # all are ordered text, and rotated alike
        self._starts = np.array([last.cache_span.start for last in lasts], np.int64)
        self._bases = np.array([last.base for last in lasts], np.int64)
        self.reads = {state: known.get(state) or _read(state, reader.key_layout) for state in request_states}
        self._groups = joined([reads.groups for reads in self.reads.values()])
        self.independent = np.concatenate([reads.independent for reads in self.reads.values()])
        self._own = np.cumsum(self._groups.spans) - 1  # of each row's spans the last is its own text

    def advance(self) -> None:
        """Go to the token that each sequence computes next, and give it a page where it begins one."""
        self.indices = np.array([s.prompt + s.generated - 1 for s in self.sequences], np.int64)
        rows, page = self.indices - self._starts, self._reader.pool.shape.page_size
        self._hold(rows // page)
        firsts = np.fromiter((pages.start for pages in self._pages), np.int64, len(self._pages))
        self.slots = self._reader.pages.ids[firsts + rows // page] * page + rows % page
        self.rotations = carried_rotation(self._reader.key_layout, self._cache_span, self._bases, rows)
        spans = self._groups.of_span
        spans.length[self._own], spans.first_page[self._own] = rows + 1, firsts
        shifts = self._bases + rows - self.rotations
        self.groups = self._groups._replace(query_index=self.indices, query_shift=shifts)

    def ids(self, outputs: Mapping[int, list[int]]) -> NDArray[np.int64]:
        """The token of each row, by the tokens generated so far by request id."""
        return np.array([outputs[one.request.id][one.generated - 1] for one in self.sequences], np.int64)

    def _hold(self, last: np.ndarray) -> None:
        """Let every list of pages reach to its `last` one."""
        short = [pages for pages, place in zip(self._pages, last.tolist(), strict=True) if pages.length <= place]
        if short:
            append_to_each(self._reader.pages, short, self._reader.pool.take(len(short)))


def _read(request_state: RequestState, key_layout: SpanSettings) -> Reads:
    last = len(request_state.spans) - 1
    text = request_state.spans[last]
    spans = seen_spans(request_state, last, text.cache_span.start + text.pages.length, key_layout)
    groups = flatten([Group([0], [span for span, _ in spans])])
    return Reads(groups, np.array([independent for _, independent in spans]))
