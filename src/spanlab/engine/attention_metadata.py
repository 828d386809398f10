"""Attention of packed rows over the pool, as a method reads it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from copy import copy
from dataclasses import fields, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spanlab.engine.decode_rows import TailRows
from spanlab.engine.query_rows import QueryRows
from spanlab.engine.reader import Reader
from spanlab.engine.shipment import Shipment
from spanlab_kernels.attention import Group, GroupArrays, SpanBatch, attend, flatten, joined, key_mass, pack


class AttentionMetadata:
    """One forward's attention: built once, called by every layer."""

    def __init__(
        self, rows: Sequence[QueryRows], reader: Reader, shipment: Shipment, decodes: TailRows | None = None
    ) -> None:
        self._model, self._pool, self._pages, self._table, self._key_layout = reader
        parts = [_part(part) for part in rows]
        if decodes is not None:
            parts.append((decodes.groups, decodes.independent))
        groups = joined([groups for groups, _ in parts])
        independent = np.concatenate([independent for _, independent in parts])
        read = [~independent, independent] if self._key_layout.reweighs else [np.ones_like(independent)]
        self._batches = [self._batch(_reading(groups, chosen), shipment) for chosen in read]
        self._pages.update(shipment)

    def _batch(self, groups: GroupArrays, shipment: Shipment) -> tuple[SpanBatch, str]:
        shape, pages = self._pool.shape, self._pages.on_device
        batch = pack(groups, pages, page_size=shape.page_size, page_count=shape.pages, send=shipment.add)
        if self._key_layout.keys == "raw":
            return batch, "KR"
        return batch, "QR" if batch.shifted or groups.of_span.position.any() else "MAT"

    def replayed(self) -> tuple[Hashable, AttentionMetadata]:
        """The same under limits that hold for many steps, and all but numbers on the device that it depends on."""
        found = copy(self)
        found._batches = [(self._widened(batch), form) for batch, form in self._batches]
        return tuple((form, *_limits(batch)) for batch, form in found._batches), found

    def _widened(self, batch: SpanBatch) -> SpanBatch:
        """With limits of keys and spans that grow in powers of two."""
        limits = batch.max_keys, batch.key_count, batch.max_spans, batch.max_position
        keys, all_keys, spans, position = (1 << limit.bit_length() for limit in limits)
        in_table = self._table.length - 1 + min(batch.min_shift, 0)
        return replace(batch, max_keys=keys, key_count=all_keys, max_spans=spans, max_position=min(position, in_table))

    def of_rows(self, kept: Tensor) -> AttentionMetadata:
        """The same for some rows of one request, int64 [K] increasing on the device."""
        chosen = copy(self)
        chosen._batches = [(batch.of_rows(kept), form) for batch, form in self._batches]
        return chosen

    def attend(self, layer: int, query: Tensor) -> Tensor:
        """Out [T, Hq, D] of one layer's queries; keys and values of the rows themselves are in the pool already."""
        parts = [self._read(layer, query, *batch, spans=bool(at)) for at, batch in enumerate(self._batches)]
        if len(parts) == 1:
            return parts[0][0]
        return _reweighed(parts[0], parts[1], self._key_layout.scale * self._key_layout.temperature)

    def attend_with_sums(self, layer: int, query: Tensor) -> tuple[Tensor, Tensor]:
        """The same, and the log-sum-exp of every row's scores, float32 [T, Hq]; only where nothing is reweighed."""
        (batch,) = self._batches
        return self._read(layer, query, *batch, spans=False)

    def mass(self, layer: int, query: Tensor, sums: Tensor) -> Tensor:
        """Attention weight of every key, summed over rows and heads, float32 [keys]; `sums` are over all they see."""
        ((batch, form),), keys = self._batches, self._pool.keys(layer)
        scale, interleaved = self._model.scales[layer], self._model.rotation.interleaved
        return key_mass(query, sums, keys, batch, form=form, table=self._table, scale=scale, interleaved=interleaved)

    def _read(self, layer: int, query: Tensor, batch: SpanBatch, form: str, *, spans: bool) -> tuple[Tensor, Tensor]:
        scale = self._model.scales[layer] / (self._key_layout.temperature if spans else 1.0)
        keys, values = self._pool.keys(layer), self._pool.values(layer)
        interleaved = self._model.rotation.interleaved
        return attend(query, keys, values, batch, form=form, table=self._table, scale=scale, interleaved=interleaved)


def _limits(batch: SpanBatch) -> tuple[int, ...]:
    """Numbers that launches may depend on: sizes of the batch's tensors, their first address, and its own numbers."""
    values = [getattr(batch, field.name) for field in fields(batch)]
    tensors = [len(value) for value in values if isinstance(value, Tensor)]
    return batch.pages.data_ptr(), *tensors, *(value for value in values if isinstance(value, int))


def _part(rows: QueryRows) -> tuple[GroupArrays, NDArray[np.bool_]]:
    """Rows as one group, and which of the spans that they read are independent ones.

    Where queries and keys stand short of their positions by one and the same number nothing need be rotated, since only
    the difference counts: so a span that is computed alone pays for no rotation.
    """
    groups = flatten([Group(rows.indices, [span for span, _ in rows.spans], rows.shifts)])
    position = groups.of_span.position
    if rows.together is not None and (position == rows.together).all():
        unmoved = groups.of_span._replace(position=np.zeros_like(position))
        groups = groups._replace(query_shift=rows.shifts - rows.together, of_span=unmoved)
    return groups, np.array([independent for _, independent in rows.spans], bool)


def _reading(groups: GroupArrays, chosen: NDArray[np.bool_]) -> GroupArrays:
    """The same rows, reading some of their spans."""
    if chosen.all():
        return groups
    of_group = np.repeat(np.arange(len(groups.spans)), groups.spans)
    of_group = of_group[chosen[: len(of_group)]]  # spans behind those are of no group
    counts = np.bincount(of_group, minlength=len(groups.spans))
    return groups._replace(spans=counts, of_span=groups.of_span.where(chosen))


def _reweighed(text: tuple[Tensor, Tensor], spans: tuple[Tensor, Tensor], weight: float) -> Tensor:
    """APE (arXiv 2502.05431): spans and text weigh exp(S · T · lse) and exp(lse); lse is float32 throughout."""
    share = torch.softmax(torch.stack([text[1], weight * spans[1]]), 0)[..., None]
    return (share[0] * text[0].float() + share[1] * spans[0].float()).to(text[0].dtype)
