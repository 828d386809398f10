"""Attention of packed rows over the pool, as a method reads it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spanlab.core.spans import SpanSettings
from spanlab.engine.model import SpanModel
from spanlab.engine.pool import PagePool
from spanlab.engine.query_rows import QueryRows
from spanlab_kernels.angles import AngleTable
from spanlab_kernels.attention import Group, Span, SpanBatch, attend, key_mass, span_batch


class AttentionMetadata:
    """One forward's attention: built once, called by every layer."""

    def __init__(
        self, rows: Sequence[QueryRows], model: SpanModel, pool: PagePool, table: AngleTable, key_layout: SpanSettings
    ) -> None:
        self._model, self._pool, self._table, self._key_layout = model, pool, table, key_layout
        kinds = (False, True) if key_layout.reweighs else (None,)
        self._batches = [self._batch([_group(part, kind) for part in rows]) for kind in kinds]

    def _batch(self, groups: list[Group]) -> tuple[SpanBatch, str]:
        batch = span_batch(groups, self._model.device, page_size=self._pool.shape.page_size)
        if self._key_layout.keys == "raw":
            return batch, "KR"
        still = not batch.shifted and all(span.position == 0 for group in groups for span in group.spans)
        return batch, "MAT" if still else "QR"

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


def _group(rows: QueryRows, spans: bool | None) -> Group:
    """All that the rows read, or its independent spans alone, or all but those.

    Where queries and keys stand short of their positions by one and the same number nothing need be rotated, since only
    the difference counts: so a span that is computed alone pays for no rotation.
    """
    read = [span for span, independent in rows.spans if spans is None or independent == spans]
    shifts = rows.shifts
    if rows.together is not None and all(span.position == rows.together for span in read):
        read = [Span(span.index, span.length, 0, span.pages, span.offset) for span in read]
        shifts = shifts - rows.together
    return Group(rows.indices.tolist(), read, shifts.tolist())


def _reweighed(text: tuple[Tensor, Tensor], spans: tuple[Tensor, Tensor], weight: float) -> Tensor:
    """APE (arXiv 2502.05431): spans and text weigh exp(S · T · lse) and exp(lse); lse is float32 throughout."""
    share = torch.softmax(torch.stack([text[1], weight * spans[1]]), 0)[..., None]
    return (share[0] * text[0].float() + share[1] * spans[0].float()).to(text[0].dtype)
