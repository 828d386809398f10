"""The rows of one chunk: which tokens, rotated by what, written where, and what they see."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from spanlab.core.cache_spans import CacheSpan
from spanlab.core.scheduled import ScheduledChunk
from spanlab.core.spans import SpanSettings
from spanlab.core.work import PrefillRange
from spanlab.engine.key_layout import carried_rotation
from spanlab.engine.request_state import RequestState, SpanView
from spanlab_kernels.attention import Span


@dataclass(frozen=True, slots=True, eq=False)
class QueryRows:
    """Packed rows of one request that see the same spans; arrays are int64 [T].

    `indices`    in prompt and output, increasing
    `rotations`  what the model is to rotate query and key by
    `shifts`     what the query is still to be rotated by, to stand at its position
    `slots`      where key and value are written
    `spans`      what they read: (span, whether it is an independent one that ordered text reads) each; their pages are
                 ranges of the engine's table
    `free`       False for rows that a measured repair must keep
    `together`   the common shift of all rows, where keys that lack the same need not be rotated; None for raw keys
    """

    indices: np.ndarray
    rotations: np.ndarray
    shifts: np.ndarray
    slots: np.ndarray
    spans: list[tuple[Span, bool]]
    free: np.ndarray
    together: int | None

    def chosen(self, kept: np.ndarray) -> QueryRows:
        """Some of the rows, by index; they read the same."""
        return replace(
            self,
            indices=self.indices[kept],
            rotations=self.rotations[kept],
            shifts=self.shifts[kept],
            slots=self.slots[kept],
        )


def chunk_rows(
    request_state: RequestState, chunk: ScheduledChunk, key_layout: SpanSettings, repaired: np.ndarray | None
) -> QueryRows:
    """Rows of a chunk; of a repair, those of the `repaired` prompt positions and of the text between the spans."""
    if isinstance(chunk.work, PrefillRange):
        return cache_span_rows(request_state, chunk.work.cache_span, chunk.start, chunk.stop, key_layout)
    assert repaired is not None, "a repair has no rows"
    return _repair_rows(request_state, chunk, repaired[(repaired >= chunk.start) & (repaired < chunk.stop)], key_layout)


def cache_span_rows(
    request_state: RequestState, index: int, start: int, stop: int, key_layout: SpanSettings
) -> QueryRows:
    """Prompt and output tokens `[start, stop)` of one cache span, in the cache span's own context."""
    span_pages = request_state.spans[index]
    rows = np.arange(start, stop) - span_pages.cache_span.start
    request_state.hold(index, stop - span_pages.cache_span.start)
    positions = span_pages.base + rows
    rotations = _rotations(request_state, index, rows, key_layout)
    spans = seen_spans(request_state, index, stop, key_layout)
    if span_pages.cache_span.independent:
        spans = [(span, False) for span, _ in spans]
    slots = request_state.slots(index, rows)
    shifts = positions - rotations
    together = int(shifts[0]) if key_layout.keys != "raw" and len(rows) and (shifts == shifts[0]).all() else None
    return QueryRows(np.arange(start, stop), rotations, shifts, slots, spans, np.zeros(len(rows), bool), together)


def seen_spans(request_state: RequestState, index: int, stop: int, key_layout: SpanSettings) -> list[tuple[Span, bool]]:
    """What rows of one cache span up to `stop` read, as `QueryRows.spans`; their own cache span comes last."""
    cache_span = request_state.spans[index].cache_span
    spans = [span for other in visible(request_state, cache_span) for span in _whole(request_state, other, key_layout)]
    own = request_state.own_views(index, stop - cache_span.start)
    return spans + _in_place(request_state, index, own, key_layout)


def visible(request_state: RequestState, cache_span: CacheSpan) -> list[int]:
    """The cache spans before a cache span that its rows see."""
    return [index for index, other in enumerate(request_state.spans) if other.cache_span.stop <= cache_span.context]


def _repair_rows(
    request_state: RequestState, chunk: ScheduledChunk, repaired: np.ndarray, key_layout: SpanSettings
) -> QueryRows:
    """All rows of a repair by place: tokens of spans go to the request's own copies, text between them to its pages."""
    parts, spans = [], []
    for index, span_pages in enumerate(request_state.spans):
        start, stop = span_pages.cache_span.start, min(span_pages.cache_span.stop, chunk.stop)
        if stop <= start:
            break
        if index in chunk.work.cache_spans:
            request_state.hold(index, stop - start)
            resume = max(request_state.allocation.plan.cache_spans[index].resume, chunk.start - start)
            parts.append(_part(request_state, index, np.arange(resume, stop - start), False, key_layout))
        rows = repaired[(repaired >= start) & (repaired < stop)] - start
        parts.append(_part(request_state, index, rows, True, key_layout))
        spans += _spans(request_state, index, stop - start, key_layout)
    return _packed(parts, spans)


def probe_rows(request_state: RequestState, begin: int, key_layout: SpanSettings) -> QueryRows:
    """Missing text from prompt position `begin` on, the query at its end, and all that they read as it is stored."""
    parts, spans = [], []
    plans = request_state.allocation.plan.cache_spans
    for index, (span_pages, plan) in enumerate(zip(request_state.spans, plans, strict=True)):
        cache_span = span_pages.cache_span
        length = cache_span.stop - cache_span.start
        if cache_span.context == cache_span.start and begin <= cache_span.start + plan.resume < cache_span.stop:
            request_state.hold(index, length)
            parts.append(_part(request_state, index, np.arange(plan.resume, length), False, key_layout))
        spans += _spans(request_state, index, length, key_layout)
    return _packed(parts, spans)


def rows_of_query(request_state: RequestState, rows: QueryRows, key_layout: SpanSettings) -> QueryRows:
    """Those rows of a probe that belong to the query; they read only what a repair may choose from."""
    query = request_state.spans[-1].cache_span
    spans = []
    for index, span_pages in enumerate(request_state.spans):
        start = span_pages.cache_span.start
        for reused in request_state.allocation.plan.spans:
            if reused.start == start:
                spans += _spans(request_state, index, reused.stop - start, key_layout)
    return replace(rows.chosen(np.flatnonzero(rows.indices >= query.start)), spans=spans)


def reading_before(request_state: RequestState, rows: QueryRows) -> list[QueryRows]:
    """Rows of a repair by cache span, in order, each reading only what stands before that."""
    parts = []
    for span_pages in request_state.spans:
        start, stop = span_pages.cache_span.start, span_pages.cache_span.stop
        inside = np.flatnonzero((rows.indices >= start) & (rows.indices < stop))
        if len(inside):
            spans = [(span, independent) for span, independent in rows.spans if span.index < start]
            parts.append(replace(rows.chosen(inside), spans=spans))
    return parts


def _packed(parts: list[tuple[np.ndarray, ...]], spans: list[tuple[Span, bool]]) -> QueryRows:
    """Rows of several cache spans by place; they read the same."""
    indices, rotations, shifts, slots, free = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.argsort(indices, kind="stable")
    return QueryRows(indices[order], rotations[order], shifts[order], slots[order], spans, free[order], None)


def _part(
    request_state: RequestState, index: int, rows: np.ndarray, own: bool, key_layout: SpanSettings
) -> tuple[np.ndarray, ...]:
    span_pages = request_state.spans[index]
    positions = span_pages.base + rows
    rotations = positions if own and key_layout.rotates_copies else _rotations(request_state, index, rows, key_layout)
    slots = request_state.slots(index, rows, in_copy=own) if len(rows) else rows
    return span_pages.cache_span.start + rows, rotations, positions - rotations, slots, np.full(len(rows), own)


def _rotations(request_state: RequestState, index: int, rows: np.ndarray, key_layout: SpanSettings) -> np.ndarray:
    span_pages = request_state.spans[index]
    return carried_rotation(key_layout, span_pages.cache_span, span_pages.base, rows)


def _whole(request_state: RequestState, index: int, key_layout: SpanSettings) -> list[tuple[Span, bool]]:
    cache_span = request_state.spans[index].cache_span
    return _spans(request_state, index, cache_span.stop - cache_span.start, key_layout)


def _spans(request_state: RequestState, index: int, stop: int, key_layout: SpanSettings) -> list[tuple[Span, bool]]:
    return _in_place(request_state, index, request_state.views(index, stop), key_layout)


def _in_place(
    request_state: RequestState, index: int, views: list[SpanView], key_layout: SpanSettings
) -> list[tuple[Span, bool]]:
    cache_span, page = request_state.spans[index].cache_span, request_state.page
    found = []
    for start, end, pages, shift in views:
        held = pages.range(start // page, -(-end // page))
        # raw keys are rotated one by one, others together
        position = shift + start if key_layout.keys == "raw" else shift
        span = Span(cache_span.start + start, end - start, position, held, start % page)
        found.append((span, cache_span.independent))
    return found
