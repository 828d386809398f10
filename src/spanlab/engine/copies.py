"""Copies of spans that a request makes before it reads or writes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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
from spanlab_kernels.attention import to_device

_TOGETHER = 1024  # tokens that are copied at once, which bounds what is held twice


class Move(NamedTuple):
    """Tokens to copy, int64 [N]: slots from and to, and by how many positions their keys are rotated on the way."""

    source: np.ndarray
    target: np.ndarray
    shift: np.ndarray


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

    def moves_before(
        self, request_state: RequestState, chunk: ScheduledChunk, repaired: np.ndarray | None
    ) -> list[Move]:
        """What a chunk needs copied, with pages taken; `repaired`: prompt positions of a repair that knows them."""
        if self._key_layout.copies:
            spans = sorted(set(self._read_spans(request_state, chunk)) & set(request_state.uncopied()))
            return [self._span(request_state, index) for index in spans]
        found: list[Move] = []
        if repaired is None:
            return found
        for index, span_pages in enumerate(request_state.spans):
            cache_span = span_pages.cache_span
            rows = repaired[(repaired >= cache_span.start) & (repaired < cache_span.stop)] - cache_span.start
            if len(rows):
                source, target = request_state.copy_pages_of(index, rows)
                found.append(Move(source, target, np.zeros_like(source)))
        return found

    def copy(self, moves: Sequence[Move]) -> None:
        """Make copies; their slots reach the device in one transfer."""
        if not moves:
            return
        columns = [np.concatenate(column) for column in zip(*moves, strict=True)]
        tensors = to_device(columns, torch.int64, self._pool.keys(0).device)
        for source, target, shift in zip(*(tensor.split(_TOGETHER) for tensor in tensors), strict=True):
            self._pool.copy(source, target)
            if self._key_layout.rotates_copies:
                self._turn(target, shift)

    def _read_spans(self, request_state: RequestState, chunk: ScheduledChunk) -> list[int]:
        if isinstance(chunk.work, PrefillRange):
            return visible(request_state, request_state.spans[chunk.work.cache_span].cache_span)
        starts = [span_pages.cache_span.start for span_pages in request_state.spans]
        return [index for index, start in enumerate(starts) if start < chunk.work.stop]

    def _span(self, request_state: RequestState, index: int) -> Move:
        """A whole span, rotated to where it stands now."""
        source, target = request_state.copy_span(index)
        if not self._key_layout.rotates_copies:
            return Move(source, target, np.zeros_like(source))
        stands = request_state.spans[index].base + np.arange(len(source))
        shift = stands - self._rotated[source]
        self.note(target, stands)
        return Move(source, target, shift)

    def _turn(self, slots: Tensor, shift: Tensor) -> None:
        for layer in range(self._pool.shape.layers):
            keys = blocks.gather(self._pool.keys(layer), slots)
            rope.rotate(keys, shift, self._table, interleaved=self._interleaved, out=keys)
            blocks.scatter(self._pool.keys(layer), slots, keys)
