"""Rows of a step: which tokens a forward computes, and the metadata that its attention reads."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from collections.abc import Sequence as Ordered
from copy import copy
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spanlab.core.plan import PrefillRange
from spanlab.core.step import ScheduledChunk, ScheduledSequence
from spanlab.core.token_string import Tokens
from spanlab.core.tree import CacheSpan
from spanlab.engine.model import AttentionContext
from spanlab.engine.pages import TransferBatch, append_to_each, carried_rotation
from spanlab.engine.request_state import RequestState, SpanView
from spanlab_kernels.attention import attend
from spanlab_kernels.attention.batch import (
    Group,
    GroupArrays,
    Span,
    SpanBatch,
    flatten,
    joined,
    pack,
    to_device,
)
from spanlab_kernels.attention.reference import key_mass
from spanlab_kernels.blocks import gather, rotate, scatter

# ------------------------------------------------------------------------------
# Query rows of one chunk: tokens, rotations, slots, and the spans that they attend to.
# ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class QueryRows:
    """Packed rows of one request that attend to the same spans; arrays are int64 [T].

    `indices`       token indices in prompt and output, increasing
    `rotations`     RoPE positions that the model applies to query and key
    `shifts`        remaining rotation of the query to its position
    `slots`         slots for key and value
    `spans`         pairs of a span and a flag: an independent span that ordered text reads; pages
                    are ranges of the page table
    `free`          False for rows that a measured repair must compute
    `common_shift`  the shift of all rows if it is equal; keys that lack the same shift need no
                    rotation. Else, and for raw keys, None
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


def chunk_rows(
    request_state: RequestState, chunk: ScheduledChunk, repaired: np.ndarray | None
) -> QueryRows:
    """Rows of a chunk; for a repair, the `repaired` prompt positions and the text between the
    spans."""
    if isinstance(chunk.work, PrefillRange):
        return cache_span_rows(request_state, chunk.work.cache_span, chunk.start, chunk.stop)
    assert repaired is not None, "a repair has no rows"
    # in prompt order; span tokens are written to private copies, text between spans to its pages
    repaired = repaired[(repaired >= chunk.start) & (repaired < chunk.stop)]
    parts, spans = [], []
    for index, span_pages in enumerate(request_state.spans):
        start, stop = span_pages.cache_span.start, min(span_pages.cache_span.stop, chunk.stop)
        if stop <= start:
            break
        if index in chunk.work.cache_spans:
            request_state.ensure_pages(index, stop - start)
            resume = max(
                request_state.allocation.plan.cache_spans[index].resume, chunk.start - start
            )
            parts.append(
                _cache_span_arrays(
                    request_state, index, np.arange(resume, stop - start), in_copy=False
                )
            )
        rows = repaired[(repaired >= start) & (repaired < stop)] - start
        parts.append(_cache_span_arrays(request_state, index, rows, in_copy=True))
        spans += _spans(request_state, index, stop - start)
    return _packed(parts, spans)


def cache_span_rows(request_state: RequestState, index: int, start: int, stop: int) -> QueryRows:
    """Rows of prompt and output tokens `[start, stop)` of one cache span, in the context of that
    span."""
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
    moves_together = (
        request_state.key_layout.keys != "raw" and len(rows) and (shifts == shifts[0]).all()
    )
    common_shift = int(shifts[0]) if moves_together else None
    return QueryRows(
        np.arange(start, stop),
        rotations,
        shifts,
        slots,
        spans,
        np.zeros(len(rows), bool),
        common_shift,
    )


def visible_spans(request_state: RequestState, index: int, stop: int) -> list[tuple[Span, bool]]:
    """Spans that rows of one cache span up to `stop` attend to, as `QueryRows.spans`; the cache
    span itself is last."""
    cache_span, spans = request_state.spans[index].cache_span, []
    for other in visible(request_state, cache_span):
        earlier = request_state.spans[other].cache_span
        spans += _spans(request_state, other, earlier.stop - earlier.start)
    span_views = request_state.own_views(index, stop - cache_span.start)
    return spans + _view_spans(request_state, index, span_views)


def visible(request_state: RequestState, cache_span: CacheSpan) -> list[int]:
    """Earlier cache spans that are visible to rows of a cache span."""
    return [
        index
        for index, other in enumerate(request_state.spans)
        if other.cache_span.stop <= cache_span.context
    ]


def probe_rows(request_state: RequestState, begin: int) -> QueryRows:
    """Rows of missing text from prompt position `begin`, with the query at the end; they read spans
    as stored."""
    parts, spans = [], []
    plans = request_state.allocation.plan.cache_spans
    for index, (span_pages, plan) in enumerate(zip(request_state.spans, plans, strict=True)):
        cache_span = span_pages.cache_span
        length = cache_span.stop - cache_span.start
        if (
            cache_span.context == cache_span.start
            and begin <= cache_span.start + plan.resume < cache_span.stop
        ):
            request_state.ensure_pages(index, length)
            parts.append(
                _cache_span_arrays(
                    request_state, index, np.arange(plan.resume, length), in_copy=False
                )
            )
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
    indices, rotations, shifts, slots, free = (
        np.concatenate(column) for column in zip(*parts, strict=True)
    )
    order = np.argsort(indices, kind="stable")
    return QueryRows(
        indices[order], rotations[order], shifts[order], slots[order], spans, free[order], None
    )


def _cache_span_arrays(
    request_state: RequestState, index: int, rows: np.ndarray, *, in_copy: bool
) -> tuple[np.ndarray, ...]:
    span_pages = request_state.spans[index]
    positions = span_pages.base + rows
    rotated = in_copy and request_state.key_layout.rotates_copies
    rotations = positions if rotated else request_state.rotations(index, rows)
    slots = request_state.slots(index, rows, in_copy=in_copy) if len(rows) else rows
    return (
        span_pages.cache_span.start + rows,
        rotations,
        positions - rotations,
        slots,
        np.full(len(rows), in_copy),
    )


def _spans(request_state: RequestState, index: int, stop: int) -> list[tuple[Span, bool]]:
    return _view_spans(request_state, index, request_state.views(index, stop))


def _view_spans(
    request_state: RequestState, index: int, views: list[SpanView]
) -> list[tuple[Span, bool]]:
    cache_span, page = request_state.spans[index].cache_span, request_state.page_size
    spans = []
    for start, end, pages, shift in views:
        page_range = pages.range(start // page, -(-end // page))
        # raw keys are rotated one by one, others together
        position = shift + start if request_state.key_layout.keys == "raw" else shift
        span = Span(cache_span.start + start, end - start, position, page_range, start % page)
        spans.append((span, cache_span.independent))
    return spans


# ------------------------------------------------------------------------------
# Query rows of decoding sequences, one per sequence, updated from step to step.
# ------------------------------------------------------------------------------


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
        sequences: Ordered[ScheduledSequence],
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
        # the last span of each row is its own cache span
        self._last_spans = np.cumsum(self._groups.spans) - 1

    def advance(self, outputs: Mapping[int, list[int]]) -> TailRows:
        """Advance every row to its next token, and allocate pages for rows that start a new one.

        `outputs`  generated tokens by request id
        """
        indices = np.array(
            [sequence.prompt + sequence.generated - 1 for sequence in self.sequences], np.int64
        )
        tokens = [
            outputs[sequence.request.id][sequence.generated - 1] for sequence in self.sequences
        ]
        rows, page = indices - self._starts, self._context.pool.shape.page_size
        # append a page to each list that does not contain its page index `last`
        short = [
            pages
            for pages, index in zip(self._pages, (rows // page).tolist(), strict=True)
            if pages.length <= index
        ]
        if short:
            append_to_each(self._context.pages, short, self._context.pool.allocate(len(short)))
        firsts = np.fromiter((pages.start for pages in self._pages), np.int64, len(self._pages))
        slots = self._context.pages.ids[firsts + rows // page] * page + rows % page
        rotations = carried_rotation(self._context.key_layout, self._cache_span, self._bases, rows)
        spans = self._groups.of_span
        spans.length[self._last_spans], spans.first_page[self._last_spans] = rows + 1, firsts
        groups = self._groups._replace(
            query_index=indices, query_shift=self._bases + rows - rotations
        )
        return TailRows(np.array(tokens, np.int64), rotations, slots, groups, self._independent)


def _spans_of(request_state: RequestState) -> Reads:
    last = len(request_state.spans) - 1
    text = request_state.spans[last]
    spans = visible_spans(request_state, last, text.cache_span.start + text.pages.length)
    groups = flatten([Group([0], [span for span, _ in spans])])
    return Reads(groups, np.array([independent for _, independent in spans]))


# ------------------------------------------------------------------------------
# Attention metadata of packed rows over the KV pool, under a method's key layout.
# ------------------------------------------------------------------------------


class AttentionMetadata:
    """Attention of one forward: built once, called by every layer."""

    def __init__(
        self,
        rows: Sequence[QueryRows],
        context: AttentionContext,
        transfer: TransferBatch,
        decodes: TailRows | None = None,
    ) -> None:
        self._model, self._pool, self._pages, self._table, self._key_layout = context
        pairs = [_group(query_rows) for query_rows in rows]
        if decodes is not None:
            pairs.append((decodes.groups, decodes.independent))
        groups = joined([groups for groups, _ in pairs])
        independent = np.concatenate([independent for _, independent in pairs])
        selections = (
            [~independent, independent]
            if self._key_layout.reweighs
            else [np.ones_like(independent)]
        )
        self._batches: list[tuple[SpanBatch, str]] = []
        for chosen in selections:
            selected, shape = _reading(groups, chosen), self._pool.shape
            batch = pack(
                selected,
                self._pages.on_device,
                page_size=shape.page_size,
                page_count=shape.pages,
                send=transfer.add,
            )
            form = "KR" if self._key_layout.keys == "raw" else "MAT"
            if form == "MAT" and (batch.shifted or selected.of_span.position.any()):
                form = "QR"
            self._batches.append((batch, form))
        self._pages.update(transfer)

    def for_replay(self) -> tuple[Hashable, AttentionMetadata]:
        """Return a graph key and a copy with padded limits; equal keys need equal launches, with
        other device data."""
        padded = copy(self)
        padded._batches, keys = [], list[tuple[object, ...]]()
        for batch, form in self._batches:
            # limits of keys and spans, rounded up to powers of two
            limits = batch.max_keys, batch.key_count, batch.max_spans, batch.max_position
            max_keys, key_count, max_spans, position = (1 << each.bit_length() for each in limits)
            in_table = self._table.length - 1 + min(batch.min_shift, 0)
            wide = replace(
                batch,
                max_keys=max_keys,
                key_count=key_count,
                max_spans=max_spans,
                max_position=min(position, in_table),
            )
            padded._batches.append((wide, form))
            # what launches may depend on: tensor sizes, the page table's address, integer limits
            values = [getattr(wide, field.name) for field in fields(wide)]
            sizes = [len(value) for value in values if isinstance(value, Tensor)]
            integers = [value for value in values if isinstance(value, int)]
            keys.append((form, wide.pages.data_ptr(), *sizes, *integers))
        return tuple(keys), padded

    def of_rows(self, rows: Tensor) -> AttentionMetadata:
        """Metadata of a subset of the rows of one request; `rows` is int64 [K], increasing, on the
        device."""
        subset = copy(self)
        subset._batches = [(batch.of_rows(rows), form) for batch, form in self._batches]
        return subset

    def attend(self, layer: int, query: Tensor) -> Tensor:
        """Output [T, Hq, D] of one layer's queries; keys and values of the rows must already be in
        the pool."""
        results = [
            self._read(layer, query, *batch, spans=bool(index))
            for index, batch in enumerate(self._batches)
        ]
        if len(results) == 1:
            return results[0][0]
        # text and spans are combined as in APE (arXiv 2502.05431), with weights exp(lse) and
        # exp(S · T · lse) in float32
        text, spans = results
        weight = self._key_layout.scale * self._key_layout.temperature
        share = torch.softmax(torch.stack([text[1], weight * spans[1]]), 0)[..., None]
        return (share[0] * text[0].float() + share[1] * spans[0].float()).to(text[0].dtype)

    def attend_with_sums(self, layer: int, query: Tensor) -> tuple[Tensor, Tensor]:
        """As `attend`, with the log-sum-exp of every row's scores, float32 [T, Hq]; without
        reweighing only."""
        (batch,) = self._batches
        return self._read(layer, query, *batch, spans=False)

    def mass(self, layer: int, query: Tensor, sums: Tensor) -> Tensor:
        """Attention weight of every key, summed over rows and heads, float32 [keys]; `sums` cover
        all visible keys."""
        ((batch, form),), keys = self._batches, self._pool.keys(layer)
        scale, interleaved = self._model.scales[layer], self._model.rotation.interleaved
        return key_mass(
            query,
            sums,
            keys,
            batch,
            form=form,
            table=self._table,
            scale=scale,
            interleaved=interleaved,
        )

    def _read(
        self, layer: int, query: Tensor, batch: SpanBatch, form: str, *, spans: bool
    ) -> tuple[Tensor, Tensor]:
        scale = self._model.scales[layer] / (self._key_layout.temperature if spans else 1.0)
        keys, values = self._pool.keys(layer), self._pool.values(layer)
        interleaved = self._model.rotation.interleaved
        return attend(
            query,
            keys,
            values,
            batch,
            form=form,
            table=self._table,
            scale=scale,
            interleaved=interleaved,
        )


def attention_of(context: AttentionContext, *rows: QueryRows) -> AttentionMetadata:
    """The attention of rows outside a regular forward, packed in order."""
    transfer = TransferBatch(context.model.device)
    attention = AttentionMetadata(rows, context, transfer)
    transfer.send()
    return attention


def _group(rows: QueryRows) -> tuple[GroupArrays, NDArray[np.bool_]]:
    """Rows as one group, and a mask of the independent spans that they read.

    If queries and keys lack the same rotation, neither is rotated, because attention depends on the
    difference only. So a span that is computed alone needs no rotation.
    """
    groups = flatten([Group(rows.indices, [span for span, _ in rows.spans], rows.shifts)])
    position = groups.of_span.position
    if rows.common_shift is not None and (position == rows.common_shift).all():
        unmoved = groups.of_span._replace(position=np.zeros_like(position))
        groups = groups._replace(query_shift=rows.shifts - rows.common_shift, of_span=unmoved)
    return groups, np.array([independent for _, independent in rows.spans], bool)


def _reading(groups: GroupArrays, chosen: NDArray[np.bool_]) -> GroupArrays:
    """Restrict the rows to a subset of their spans."""
    if chosen.all():
        return groups
    of_group = np.repeat(np.arange(len(groups.spans)), groups.spans)
    of_group = of_group[chosen[: len(of_group)]]  # later spans are padding and belong to no group
    counts = np.bincount(of_group, minlength=len(groups.spans))
    return groups._replace(spans=counts, of_span=groups.of_span.where(chosen))


# ------------------------------------------------------------------------------
# Copies of spans for one request, made before the request reads or writes them.
# ------------------------------------------------------------------------------

_TOGETHER = 1024  # tokens per copy, to bound temporary memory


class Move(NamedTuple):
    """Tokens to copy, int64 [N]: source and target slots, and positions by which keys are
    rotated."""

    source: np.ndarray
    target: np.ndarray
    shift: np.ndarray


class Copier:
    """Copies spans that a chunk reads, if the method copies spans, else pages that a repair
    overwrites.

    The copier records the rotation of every stored key and rotates a copied key once, to its
    position in the prompt.
    """

    def __init__(self, context: AttentionContext) -> None:
        self._pool, self._table, self._key_layout = context.pool, context.angles, context.key_layout
        self._interleaved, pool = context.model.rotation.interleaved, context.pool
        self._rotated = np.zeros(pool.shape.pages * pool.shape.page_size, np.int64)

    def note(self, slots: np.ndarray, rotations: np.ndarray) -> None:
        """Record the rotations, in positions, of keys written to `slots`."""
        self._rotated[slots] = rotations

    def moves_before(
        self, request_state: RequestState, chunk: ScheduledChunk, repaired: np.ndarray | None
    ) -> list[Move]:
        """Allocate pages for the copies of a chunk and return the moves; `repaired`: prompt
        positions of a repair."""
        moves: list[Move] = []
        if self._key_layout.copies:
            if isinstance(chunk.work, PrefillRange):
                read = visible(request_state, request_state.spans[chunk.work.cache_span].cache_span)
            else:
                starts = [span_pages.cache_span.start for span_pages in request_state.spans]
                read = [index for index, start in enumerate(starts) if start < chunk.work.stop]
            for index in sorted(set(read) & set(request_state.uncopied())):
                source, target = request_state.copy_pages_of(index, None)
                shift = np.zeros_like(source)
                if self._key_layout.rotates_copies:  # to the span's position in the prompt
                    positions = request_state.spans[index].base + np.arange(len(source))
                    shift = positions - self._rotated[source]
                    self.note(target, positions)
                moves.append(Move(source, target, shift))
            return moves
        if repaired is None:
            return moves
        for index, span_pages in enumerate(request_state.spans):
            cache_span = span_pages.cache_span
            rows = (
                repaired[(repaired >= cache_span.start) & (repaired < cache_span.stop)]
                - cache_span.start
            )
            if len(rows):
                source, target = request_state.copy_pages_of(index, rows)
                moves.append(Move(source, target, np.zeros_like(source)))
        return moves

    def copy(self, moves: Sequence[Move]) -> None:
        """Copy and rotate tokens; all slots are sent to the device in one transfer."""
        if not moves:
            return
        columns = [np.concatenate(column) for column in zip(*moves, strict=True)]
        tensors = to_device(columns, torch.int64, self._pool.keys(0).device)
        for source, target, shift in zip(
            *(tensor.split(_TOGETHER) for tensor in tensors), strict=True
        ):
            self._pool.copy(source, target)
            if not self._key_layout.rotates_copies:
                continue
            for layer in range(self._pool.shape.layers):
                keys = gather(self._pool.keys(layer), target)
                rotate(keys, shift, self._table, interleaved=self._interleaved, out=keys)
                scatter(self._pool.keys(layer), target, keys)


# ------------------------------------------------------------------------------
# Packing of rows of several requests into the input tensors of one forward.
# ------------------------------------------------------------------------------


class PackedRows(NamedTuple):
    """Inputs of one forward, int64 [T]: token ids, rotations, slots; and `logits_rows`, rows that
    need logits."""

    ids: Tensor
    rotations: Tensor
    slots: Tensor
    logits_rows: Tensor


class Packer:
    """Packs rows of one engine and records the rotations of the written keys in the copier.

    `outputs`  tokens generated so far, by request id
    """

    def __init__(
        self,
        request_states: Mapping[ScheduledSequence, RequestState],
        outputs: Mapping[int, list[int]],
        copier: Copier,
        device: torch.device,
    ) -> None:
        self._request_states = request_states
        self.outputs = outputs
        self._copier = copier
        self._device = device

    def pack(
        self,
        sequences: Ordered[ScheduledSequence],
        parts: Ordered[QueryRows],
        logits_counts: Ordered[int],
        tails: TailRows | None,
        transfer: TransferBatch,
        answer: Tokens | None = None,
    ) -> PackedRows:
        """Pack the `parts` of `sequences`, then decode rows; the last `logits_counts` rows of each
        part need logits.

        `answer`  token ids after the prompts, in place of the sequences' outputs
        """
        columns = [
            (self._ids(sequence, rows.indices, answer), rows.rotations, rows.slots)
            for sequence, rows in zip(sequences, parts, strict=True)
        ]
        ends = np.cumsum([len(rows.indices) for rows in parts], dtype=np.int64).tolist()
        logits_rows = [
            np.arange(end - count, end) for end, count in zip(ends, logits_counts, strict=True)
        ]
        if tails is not None:
            columns.append((tails.ids, tails.rotations, tails.slots))
            logits_rows.append(np.arange(len(tails.slots)) + (ends[-1] if ends else 0))
        ids, rotations, slots = (np.concatenate(column) for column in zip(*columns, strict=True))
        self._copier.note(slots, rotations)
        return PackedRows(
            *transfer.add(
                [ids, rotations, slots, np.concatenate(logits_rows)], torch.int64, self._device
            )
        )

    def _ids(
        self, sequence: ScheduledSequence, indices: NDArray[np.int64], answer: Tokens | None
    ) -> NDArray[np.int64]:
        tokens, prompt = self._request_states[sequence].tokens, sequence.prompt
        if not len(indices) or indices[-1] < prompt:
            return tokens[indices]
        known_tokens = sequence.request.output if answer is None else answer
        output = self.outputs[sequence.request.id] if known_tokens is None else known_tokens
        return np.concatenate([tokens, np.array(output, np.int64)])[indices]
