"""The short convolution of recurrent layers over packed rows: once for all rows, with what stands before each sequence.

Which rows and which stored inputs every sequence goes on from is the same in every layer. So it is worked out once, as
indexes; a layer then only gathers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from spanlab.engine.slot_pool import Layers
from spanlab_kernels.attention import Send, to_device

Window = tuple[int, ...]
"""The last `kernel` inputs of a sequence: rows of a forward from 0 on, -1 for zeros, stored inputs from -2 down."""

_ZEROS = -1
_STORED = -2


class ConvPool(Protocol):
    """Slots that hold, among other things, the last inputs of the convolution."""

    def conv(self, layer: Layers, slot: int) -> Tensor:
        """The last convolution inputs [channels, kernel], or of all layers: the memory itself."""
        ...


class Place(NamedTuple):
    """A slot of a pool."""

    pool: ConvPool
    slot: int

    def memory(self, layer: Layers) -> Tensor:
        """Its inputs [channels, kernel]; for all layers [layers · channels, kernel]."""
        return self.pool.conv(layer, self.slot).flatten(0, -2)


class Windows:
    """What the slots hold while the actions of a forward are gone through in order."""

    def __init__(self, kernel: int) -> None:
        self.kernel = kernel
        self.sources: list[Place] = []
        self.held: dict[Place, Window] = {}
        self.written: set[Place] = set()
        self.before: list[tuple[int, Window]] = []  # for each piece its first row, and what stands before it

    def __getitem__(self, place: Place) -> Window:
        """What a slot holds; where nothing was noted, what it held before the forward."""
        if place not in self.held:
            first = _STORED - len(self.sources) * self.kernel
            self.held[place] = tuple(range(first, first - self.kernel, -1))
            self.sources.append(place)
        return self.held[place]

    def clear(self, place: Place) -> None:
        """Note that a slot has seen nothing."""
        self._put(place, (_ZEROS,) * self.kernel)

    def copy(self, source: Place, target: Place) -> None:
        """Note that a slot holds what another does."""
        self._put(target, self[source])

    def follow(self, source: Place, target: Place, inputs: int) -> None:
        """Note that the last so many inputs of one slot come behind those of another."""
        own = self[source][-inputs:] if inputs else ()
        self._put(target, (*self[target], *own)[-self.kernel :])

    def scan(self, place: Place, start: int, stop: int) -> None:
        """Note that what a slot stands for goes on over rows `[start, stop)` of the forward."""
        before = self[place]
        self.before.append((start, before[1:]))
        self._put(place, (*before, *range(max(start, stop - self.kernel), stop))[-self.kernel :])

    def _put(self, place: Place, window: Window) -> None:
        self.held[place] = window
        self.written.add(place)


class ConvRows:
    """The convolution's inputs of one layer: every piece of rows behind what stands before it, and what is kept.

    They form a table: pieces in the order of rows, each behind `kernel - 1` inputs; zeros; stored inputs. Its indexes
    may be sent later, before a layer runs.
    """

    def __init__(self, windows: Windows, rows: int, device: torch.device, send: Send = to_device) -> None:
        before = sorted(windows.before)
        reach, starts = windows.kernel - 1, np.array([start for start, _ in before], np.int64)
        self._length = rows + reach * len(before)
        pieces = np.searchsorted(starts, np.arange(rows), side="right")
        self._places = np.arange(rows) + reach * pieces
        self._sources, self._kernel = windows.sources, windows.kernel
        self._targets = sorted(windows.written, key=lambda place: (id(place.pool), place.slot))
        seen = [window for _, window in before], [windows.held[place] for place in self._targets]
        history = starts[:, None] + reach * np.arange(len(before))[:, None] + np.arange(reach)
        arrays = [self._places, history.ravel(), *(self._in_table(each) for each in seen)]
        self._rows, self._history, self._read, self._kept = send(arrays, torch.int64, device)

    def _in_table(self, windows: list[Window]) -> np.ndarray:
        ids = np.array(windows, np.int64).ravel()
        found = self._length - 1 - ids
        found[ids >= 0] = self._places[ids[ids >= 0]]
        return found

    def keep(self, layer: Layers) -> None:
        """Copy between slots, where there are no rows."""
        if self._sources:
            like = self._sources[0].memory(layer)
        elif self._targets:
            like = self._targets[0].memory(layer)
        else:
            return
        self._inputs(layer, like.new_empty(0, len(like)))

    def convolve(self, layer: int, convolution: Callable[..., Tensor], rows: Tensor, *given: object) -> Tensor:
        """The convolution's outputs [1, channels, T] for rows likewise; slots get the inputs that they are to hold."""
        inputs = self._inputs(layer, rows[0].mT)
        outputs = convolution(inputs.mT.contiguous()[None], *given)[0]
        return outputs.mT.contiguous().index_select(0, self._rows).mT[None]

    def _inputs(self, layer: Layers, rows: Tensor) -> Tensor:
        """The first part of the table [length, channels]; `rows` are [T, channels]."""
        channels, length = rows.shape[1], self._length
        table = rows.new_empty(length + 1 + self._kernel * len(self._sources), channels)
        table[length] = 0
        if self._sources:
            stored = torch.stack([place.memory(layer) for place in self._sources])
            torch.stack(tuple(stored.unbind(-1)), dim=1, out=table[length + 1 :].view(-1, self._kernel, channels))
        table.index_copy_(0, self._rows, rows)
        table.index_copy_(0, self._history, table.index_select(0, self._read))
        if self._targets:
            kept = table.index_select(0, self._kept).view(-1, self._kernel, channels).mT
            torch._foreach_copy_([place.memory(layer) for place in self._targets], list(kept))
        return table[:length]
