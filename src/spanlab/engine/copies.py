"""Copies of spans that a request makes before it reads or writes them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from spanlab.core.scheduled import ScheduledChunk
from spanlab.core.spans import SpanSettings
from spanlab.core.work import PrefillRange
from spanlab.engine.pool import PagePool
from spanlab.engine.query_rows import visible
from spanlab.engine.request_state import RequestState
from spanlab_kernels import blocks, rope
from spanlab_kernels.angles import AngleTable


class Copier:
    """Copies what a chunk is about to read across: whole spans where the method says so, else pages to be repaired.

    It knows what every stored key has been rotated by, and rotates a copy once, from there to where it stands now.
    """

    def __init__(self, pool: PagePool, table: AngleTable, key_layout: SpanSettings, interleaved: bool) -> None:
        self._pool, self._table, self._key_layout, self._interleaved = pool, table, key_layout, interleaved
        self._rotated = np.zeros(pool.shape.pages * pool.shape.page_size, np.int64)

    def note(self, slots: np.ndarray, rotations: np.ndarray) -> None:
        """Remember by how many positions the keys now being written to `slots` are rotated."""
        self._rotated[slots] = rotations

    def before(self, request_state: RequestState, chunk: ScheduledChunk, repaired: np.ndarray | None) -> None:
        """Make the copies that a chunk needs; `repaired` are the prompt positions of a repair that knows them."""
        if self._key_layout.copies:
            for index in sorted(set(self._read_spans(request_state, chunk)) & set(request_state.uncopied())):
                self._copy(request_state, index)
        elif repaired is not None:
            for index, span_pages in enumerate(request_state.spans):
                cache_span = span_pages.cache_span
                rows = repaired[(repaired >= cache_span.start) & (repaired < cache_span.stop)] - cache_span.start
                if len(rows):
                    self._move(*request_state.copy_pages_of(index, rows))

    def _read_spans(self, request_state: RequestState, chunk: ScheduledChunk) -> list[int]:
        if isinstance(chunk.work, PrefillRange):
            return visible(request_state, request_state.spans[chunk.work.cache_span].cache_span)
        starts = [span_pages.cache_span.start for span_pages in request_state.spans]
        return [index for index, start in enumerate(starts) if start < chunk.work.stop]

    def _copy(self, request_state: RequestState, index: int) -> None:
        source, target = request_state.copy_span(index)
        slots = self._move(source, target)
        if self._key_layout.rotates_copies:
            stands = request_state.spans[index].base + np.arange(len(source))
            self._turn(slots, torch.from_numpy(stands - self._rotated[source]).to(slots.device))
            self.note(target, stands)

    def _move(self, source: np.ndarray, target: np.ndarray) -> Tensor:
        device = self._pool.keys(0).device
        slots = torch.from_numpy(target).to(device)
        self._pool.copy(torch.from_numpy(source).to(device), slots)
        return slots

    def _turn(self, slots: Tensor, shift: Tensor) -> None:
        for layer in range(self._pool.shape.layers):
            keys = blocks.gather(self._pool.keys(layer), slots)
            rope.rotate(keys, shift, self._table, interleaved=self._interleaved, out=keys)
            blocks.scatter(self._pool.keys(layer), slots, keys)
