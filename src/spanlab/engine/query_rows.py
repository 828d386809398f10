"""Query rows of one chunk: tokens, rotations, slots, and the spans that they attend to."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from spanlab.core.cache_spans import CacheSpan
from spanlab.core.scheduled import ScheduledChunk
from spanlab.core.work import PrefillRange
from spanlab.engine.request_state import RequestState, SpanView
from spanlab_kernels.attention import Span


@dataclass(frozen=True, slots=True, eq=False)
class QueryRows:
    """Packed rows of one request that attend to the same spans; arrays are int64 [T].

    `indices`       token indices in prompt and output, increasing
    `rotations`     RoPE positions that the model applies to query and key
    `shifts`        remaining rotation of the query to its position
    `slots`         slots for key and value
    `spans`         pairs of a span and a flag: an independent span that ordered text reads; pages are ranges of the
                    page table
    `free`          False for rows that a measured repair must compute
    `common_shift`  the shift of all rows if it is equal; keys that lack the same shift need no rotation. Else, and for
                    raw keys, None
    """

    indices: np.ndarray
    rotations: np.ndarray
    shifts: np.ndarray
    slots: np.ndarray
    spans: list[tuple[Span, bool]]
    free: np.ndarray
    common_shift: int | None

    def chosen(self, selected: np.ndarray) -> QueryRows:
        """Select rows by index; the spans are unchanged."""
        return replace(
            self,
            indices=self.indices[selected],
            rotations=self.rotations[selected],
            shifts=self.shifts[selected],
            slots=self.slots[selected],
        )


def chunk_rows(request_state: RequestState, chunk: ScheduledChunk, repaired: np.ndarray | None) -> QueryRows:
    """Rows of a chunk; for a repair, the `repaired` prompt positions and the text between the spans."""
    if isinstance(chunk.work, PrefillRange):
        return cache_span_rows(request_state, chunk.work.cache_span, chunk.start, chunk.stop)
    assert repaired is not None, "a repair has no rows"
    return _repair_rows(request_state, chunk, repaired[(repaired >= chunk.start) & (repaired < chunk.stop)])


def cache_span_rows(request_state: RequestState, index: int, start: int, stop: int) -> QueryRows:
    """Rows of prompt and output tokens `[start, stop)` of one cache span, in the context of that span."""
    span_pages = request_state.spans[index]
    rows = np.arange(start, stop) - span_pages.cache_span.start
    request_state.ensure_pages(index, stop - span_pages.cache_span.start)
    positions = span_pages.base + rows
    rotations = request_state.rotations(index, rows)
    spans = visible_spans(request_state, index, stop)
    if span_pages.cache_span.independent:
        spans = [(span, False) for span, _ in spans]
    slots = request_state.slots(index, rows)
    shifts = positions - rotations
    moves_together = request_state.key_layout.keys != "raw" and len(rows) and (shifts == shifts[0]).all()
    common_shift = int(shifts[0]) if moves_together else None
    return QueryRows(np.arange(start, stop), rotations, shifts, slots, spans, np.zeros(len(rows), bool), common_shift)


def visible_spans(request_state: RequestState, index: int, stop: int) -> list[tuple[Span, bool]]:
    """Spans that rows of one cache span up to `stop` attend to, as `QueryRows.spans`; the cache span itself is last."""
    cache_span, spans = request_state.spans[index].cache_span, []
    for other in visible(request_state, cache_span):
        earlier = request_state.spans[other].cache_span
        spans += _spans(request_state, other, earlier.stop - earlier.start)
    span_views = request_state.own_views(index, stop - cache_span.start)
    return spans + _view_spans(request_state, index, span_views)


def visible(request_state: RequestState, cache_span: CacheSpan) -> list[int]:
    """Earlier cache spans that are visible to rows of a cache span."""
    return [index for index, other in enumerate(request_state.spans) if other.cache_span.stop <= cache_span.context]


def _repair_rows(request_state: RequestState, chunk: ScheduledChunk, repaired: np.ndarray) -> QueryRows:
    """Rows of a repair in prompt order; span tokens are written to private copies, text between spans to its pages."""
    parts, spans = [], []
    for index, span_pages in enumerate(request_state.spans):
        start, stop = span_pages.cache_span.start, min(span_pages.cache_span.stop, chunk.stop)
        if stop <= start:
            break
        if index in chunk.work.cache_spans:
            request_state.ensure_pages(index, stop - start)
            resume = max(request_state.allocation.plan.cache_spans[index].resume, chunk.start - start)
            parts.append(_cache_span_arrays(request_state, index, np.arange(resume, stop - start), in_copy=False))
        rows = repaired[(repaired >= start) & (repaired < stop)] - start
        parts.append(_cache_span_arrays(request_state, index, rows, in_copy=True))
        spans += _spans(request_state, index, stop - start)
    return _packed(parts, spans)


def probe_rows(request_state: RequestState, begin: int) -> QueryRows:
    """Rows of missing text from prompt position `begin`, with the query at the end; they read spans as stored."""
    parts, spans = [], []
    plans = request_state.allocation.plan.cache_spans
    for index, (span_pages, plan) in enumerate(zip(request_state.spans, plans, strict=True)):
        cache_span = span_pages.cache_span
        length = cache_span.stop - cache_span.start
        if cache_span.context == cache_span.start and begin <= cache_span.start + plan.resume < cache_span.stop:
            request_state.ensure_pages(index, length)
            parts.append(_cache_span_arrays(request_state, index, np.arange(plan.resume, length), in_copy=False))
        spans += _spans(request_state, index, length)
    return _packed(parts, spans)


def rows_of_query(request_state: RequestState, rows: QueryRows) -> QueryRows:
    """The query's rows of a probe; they attend only to tokens that a repair may select."""
    query = request_state.spans[-1].cache_span
    spans = []
    for index, span_pages in enumerate(request_state.spans):
        start = span_pages.cache_span.start
        for reused in request_state.allocation.plan.spans:
            if reused.start == start:
                spans += _spans(request_state, index, reused.stop - start)
    return replace(rows.chosen(np.flatnonzero(rows.indices >= query.start)), spans=spans)


def reading_before(request_state: RequestState, rows: QueryRows) -> list[QueryRows]:
    """Rows of a repair by cache span, in order; each reads only the spans before its cache span."""
    parts = []
    for span_pages in request_state.spans:
        start, stop = span_pages.cache_span.start, span_pages.cache_span.stop
        inside = np.flatnonzero((rows.indices >= start) & (rows.indices < stop))
        if len(inside):
            spans = [(span, independent) for span, independent in rows.spans if span.index < start]
            parts.append(replace(rows.chosen(inside), spans=spans))
    return parts


def _packed(parts: list[tuple[np.ndarray, ...]], spans: list[tuple[Span, bool]]) -> QueryRows:
    """Merge rows of several cache spans in prompt order; all attend to the same spans."""
    indices, rotations, shifts, slots, free = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.argsort(indices, kind="stable")
    return QueryRows(indices[order], rotations[order], shifts[order], slots[order], spans, free[order], None)


def _cache_span_arrays(
    request_state: RequestState, index: int, rows: np.ndarray, *, in_copy: bool
) -> tuple[np.ndarray, ...]:
    span_pages = request_state.spans[index]
    positions = span_pages.base + rows
    rotated = in_copy and request_state.key_layout.rotates_copies
    rotations = positions if rotated else request_state.rotations(index, rows)
    slots = request_state.slots(index, rows, in_copy=in_copy) if len(rows) else rows
    return span_pages.cache_span.start + rows, rotations, positions - rotations, slots, np.full(len(rows), in_copy)


def _spans(request_state: RequestState, index: int, stop: int) -> list[tuple[Span, bool]]:
    return _view_spans(request_state, index, request_state.views(index, stop))


def _view_spans(request_state: RequestState, index: int, views: list[SpanView]) -> list[tuple[Span, bool]]:
    cache_span, page = request_state.spans[index].cache_span, request_state.page_size
    spans = []
    for start, end, pages, shift in views:
        page_range = pages.range(start // page, -(-end // page))
        # raw keys are rotated one by one, others together
        position = shift + start if request_state.key_layout.keys == "raw" else shift
        span = Span(cache_span.start + start, end - start, position, page_range, start % page)
        spans.append((span, cache_span.independent))
    return spans
