"""Attention metadata of packed rows over the KV pool, under a method's key layout."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from copy import copy
from dataclasses import fields, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spanlab.engine.attention_context import AttentionContext
from spanlab.engine.decode_rows import TailRows
from spanlab.engine.query_rows import QueryRows
from spanlab.engine.transfer import TransferBatch
from spanlab_kernels.attention import Group, GroupArrays, SpanBatch, attend, flatten, joined, key_mass, pack


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
        selections = [~independent, independent] if self._key_layout.reweighs else [np.ones_like(independent)]
        self._batches = [self._batch(_reading(groups, chosen), transfer) for chosen in selections]
        self._pages.update(transfer)

    def _batch(self, groups: GroupArrays, transfer: TransferBatch) -> tuple[SpanBatch, str]:
        shape, pages = self._pool.shape, self._pages.on_device
        batch = pack(groups, pages, page_size=shape.page_size, page_count=shape.pages, send=transfer.add)
        if self._key_layout.keys == "raw":
            return batch, "KR"
        return batch, "QR" if batch.shifted or groups.of_span.position.any() else "MAT"

    def for_replay(self) -> tuple[Hashable, AttentionMetadata]:
        """Return a graph key and a copy with padded limits; equal keys need equal launches, with other device data."""
        padded = copy(self)
        padded._batches = [(self._widened(batch), form) for batch, form in self._batches]
        return tuple((form, *_limits(batch)) for batch, form in padded._batches), padded

    def _widened(self, batch: SpanBatch) -> SpanBatch:
        """Round the limits of keys and spans up to powers of two."""
        limits = batch.max_keys, batch.key_count, batch.max_spans, batch.max_position
        keys, all_keys, spans, position = (1 << limit.bit_length() for limit in limits)
        in_table = self._table.length - 1 + min(batch.min_shift, 0)
        return replace(batch, max_keys=keys, key_count=all_keys, max_spans=spans, max_position=min(position, in_table))

    def of_rows(self, rows: Tensor) -> AttentionMetadata:
        """Metadata of a subset of the rows of one request; `rows` is int64 [K], increasing, on the device."""
        subset = copy(self)
        subset._batches = [(batch.of_rows(rows), form) for batch, form in self._batches]
        return subset

    def attend(self, layer: int, query: Tensor) -> Tensor:
        """Output [T, Hq, D] of one layer's queries; keys and values of the rows must already be in the pool."""
        results = [self._read(layer, query, *batch, spans=bool(index)) for index, batch in enumerate(self._batches)]
        if len(results) == 1:
            return results[0][0]
        return _reweighed(results[0], results[1], self._key_layout.scale * self._key_layout.temperature)

    def attend_with_sums(self, layer: int, query: Tensor) -> tuple[Tensor, Tensor]:
        """As `attend`, with the log-sum-exp of every row's scores, float32 [T, Hq]; without reweighing only."""
        (batch,) = self._batches
        return self._read(layer, query, *batch, spans=False)

    def mass(self, layer: int, query: Tensor, sums: Tensor) -> Tensor:
        """Attention weight of every key, summed over rows and heads, float32 [keys]; `sums` cover all visible keys."""
        ((batch, form),), keys = self._batches, self._pool.keys(layer)
        scale, interleaved = self._model.scales[layer], self._model.rotation.interleaved
        return key_mass(query, sums, keys, batch, form=form, table=self._table, scale=scale, interleaved=interleaved)

    def _read(self, layer: int, query: Tensor, batch: SpanBatch, form: str, *, spans: bool) -> tuple[Tensor, Tensor]:
        scale = self._model.scales[layer] / (self._key_layout.temperature if spans else 1.0)
        keys, values = self._pool.keys(layer), self._pool.values(layer)
        interleaved = self._model.rotation.interleaved
        return attend(query, keys, values, batch, form=form, table=self._table, scale=scale, interleaved=interleaved)


def attention_of(context: AttentionContext, *rows: QueryRows) -> AttentionMetadata:
    """The attention of rows outside a regular forward, packed in order."""
    transfer = TransferBatch(context.model.device)
    attention = AttentionMetadata(rows, context, transfer)
    transfer.send()
    return attention


def _limits(batch: SpanBatch) -> tuple[int, ...]:
    """Values that kernel launches may depend on: tensor sizes, the page table's address, and integer limits."""
    values = [getattr(batch, field.name) for field in fields(batch)]
    tensors = [len(value) for value in values if isinstance(value, Tensor)]
    return batch.pages.data_ptr(), *tensors, *(value for value in values if isinstance(value, int))


def _group(rows: QueryRows) -> tuple[GroupArrays, NDArray[np.bool_]]:
    """Rows as one group, and a mask of the independent spans that they read.

    If queries and keys lack the same rotation, neither is rotated, because attention depends on the difference only.
    So a span that is computed alone needs no rotation.
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


def _reweighed(text: tuple[Tensor, Tensor], spans: tuple[Tensor, Tensor], weight: float) -> Tensor:
    """Combine text and spans as in APE (arXiv 2502.05431), with weights exp(lse) and exp(S · T · lse) in float32."""
    share = torch.softmax(torch.stack([text[1], weight * spans[1]]), 0)[..., None]
    return (share[0] * text[0].float() + share[1] * spans[0].float()).to(text[0].dtype)
