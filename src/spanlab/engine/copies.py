"""Copies of spans for one request, made before the request reads or writes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from spanlab.core.scheduled import ScheduledChunk
from spanlab.core.work import PrefillRange
from spanlab.engine.attention_context import AttentionContext
from spanlab.engine.query_rows import visible
from spanlab.engine.request_state import RequestState
from spanlab_kernels import blocks, rope
from spanlab_kernels.attention import to_device

_TOGETHER = 1024  # tokens per copy, to bound temporary memory


class Move(NamedTuple):
    """Tokens to copy, int64 [N]: source and target slots, and positions by which keys are rotated."""

    source: np.ndarray
    target: np.ndarray
    shift: np.ndarray


class Copier:
    """Copies spans that a chunk reads, if the method copies spans, else pages that a repair overwrites.

    The copier records the rotation of every stored key and rotates a copied key once, to its position in the prompt.
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
        """Allocate pages for the copies of a chunk and return the moves; `repaired`: prompt positions of a repair."""
        if self._key_layout.copies:
            spans = sorted(set(self._read_spans(request_state, chunk)) & set(request_state.uncopied()))
            return [self._copy_span(request_state, index) for index in spans]
        moves: list[Move] = []
        if repaired is None:
            return moves
        for index, span_pages in enumerate(request_state.spans):
            cache_span = span_pages.cache_span
            rows = repaired[(repaired >= cache_span.start) & (repaired < cache_span.stop)] - cache_span.start
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
        for source, target, shift in zip(*(tensor.split(_TOGETHER) for tensor in tensors), strict=True):
            self._pool.copy(source, target)
            if self._key_layout.rotates_copies:
                self._rotate(target, shift)

    def _read_spans(self, request_state: RequestState, chunk: ScheduledChunk) -> list[int]:
        if isinstance(chunk.work, PrefillRange):
            return visible(request_state, request_state.spans[chunk.work.cache_span].cache_span)
        starts = [span_pages.cache_span.start for span_pages in request_state.spans]
        return [index for index, start in enumerate(starts) if start < chunk.work.stop]

    def _copy_span(self, request_state: RequestState, index: int) -> Move:
        """Copy a span and rotate it to its position in the prompt."""
        source, target = request_state.copy_pages_of(index, None)
        if not self._key_layout.rotates_copies:
            return Move(source, target, np.zeros_like(source))
        positions = request_state.spans[index].base + np.arange(len(source))
        shift = positions - self._rotated[source]
        self.note(target, positions)
        return Move(source, target, shift)

    def _rotate(self, slots: Tensor, shift: Tensor) -> None:
        for layer in range(self._pool.shape.layers):
            keys = blocks.gather(self._pool.keys(layer), slots)
            rope.rotate(keys, shift, self._table, interleaved=self._interleaved, out=keys)
            blocks.scatter(self._pool.keys(layer), slots, keys)
