"""Copies of spans that a request makes before it reads or writes them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from spanlab.core.scheduler import ScheduledChunk
from spanlab.core.spans import SpanSettings
from spanlab.core.work import PrefillRange
from spanlab.engine.pool import PagePool
from spanlab.engine.rows import visible
from spanlab.engine.seat import Seat
from spanlab_kernels import blocks, rope
from spanlab_kernels.angles import AngleTable


class Copier:
    """Copies what a chunk is about to read across: whole spans where the method says so, else pages to be repaired.

    It knows what every stored key has been turned by, and turns a copy once, from there to where it stands now.
    """

    def __init__(self, pool: PagePool, table: AngleTable, reading: SpanSettings, interleaved: bool) -> None:
        self._pool, self._table, self._reading, self._interleaved = pool, table, reading, interleaved
        self._turned = np.zeros(pool.shape.pages * pool.shape.page_size, np.int64)

    def note(self, slots: np.ndarray, turns: np.ndarray) -> None:
        """Remember by how many positions the keys now being written to `slots` are turned."""
        self._turned[slots] = turns

    def before(self, seat: Seat, chunk: ScheduledChunk, repaired: np.ndarray | None) -> None:
        """Make the copies that a chunk needs; `repaired` are the prompt positions of a repair that knows them."""
        if self._reading.copies:
            for index in sorted(set(self._reads(seat, chunk)) & set(seat.uncopied())):
                self._copy(seat, index)
        elif repaired is not None:
            for index, place in enumerate(seat.places):
                section = place.section
                rows = repaired[(repaired >= section.start) & (repaired < section.stop)] - section.start
                if len(rows):
                    self._move(*seat.copy_pages_of(index, rows))

    def _reads(self, seat: Seat, chunk: ScheduledChunk) -> list[int]:
        if isinstance(chunk.work, PrefillRange):
            return visible(seat, seat.places[chunk.work.section].section)
        return [index for index, place in enumerate(seat.places) if place.section.start < chunk.work.stop]

    def _copy(self, seat: Seat, index: int) -> None:
        source, target = seat.copy_span(index)
        slots = self._move(source, target)
        if self._reading.turns_copies:
            stands = seat.places[index].base + np.arange(len(source))
            self._turn(slots, torch.from_numpy(stands - self._turned[source]).to(slots.device))
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
