"""The short convolution of recurrent layers over packed rows, in one call, with the earlier inputs of each sequence.

The earlier inputs of every sequence are at the same rows and stored positions in every layer. So their indexes are
computed once; a layer only gathers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from spanlab.engine.slot_pool import Layers, SlotPool
from spanlab_kernels.attention import Send, to_device

Window = tuple[int, ...]
"""The last `kernel` − 1 inputs of a sequence: rows of a forward (>= 0), zeros (-1), or stored inputs (<= -2)."""

_ZEROS = -1
_STORED = -2


class SlotRef(NamedTuple):
    """A slot of a pool."""

    pool: SlotPool
    slot: int

    def memory(self, layer: Layers) -> Tensor:
        """The slot's conv inputs [channels, kernel − 1]; for all layers [layers · channels, kernel − 1]."""
        return self.pool.conv(layer, self.slot).flatten(0, -2)


class Windows:
    """Conv windows of slots, updated by the actions of a forward in order."""

    def __init__(self, kernel: int) -> None:
        self.length = kernel - 1
        self.sources: list[SlotRef] = []
        self.by_slot: dict[SlotRef, Window] = {}
        self.changed: set[SlotRef] = set()
        self.before: list[tuple[int, Window]] = []  # per scan: first row, and inputs before it

    def __getitem__(self, ref: SlotRef) -> Window:
        """Window of a slot; initially its stored window before the forward."""
        if ref not in self.by_slot:
            first = _STORED - len(self.sources) * self.length
            self.by_slot[ref] = tuple(range(first, first - self.length, -1))
            self.sources.append(ref)
        return self.by_slot[ref]

    def clear(self, ref: SlotRef) -> None:
        """Set a slot's window to zeros."""
        self._set(ref, (_ZEROS,) * self.length)

    def copy(self, source: SlotRef, target: SlotRef) -> None:
        """Copy a slot's window to another slot."""
        self._set(target, self[source])

    def append(self, source: SlotRef, target: SlotRef, inputs: int) -> None:
        """Append the last `inputs` inputs of one slot to the window of another."""
        tail = self[source][-inputs:] if inputs else ()
        self._set(target, self._last((*self[target], *tail)))

    def scan(self, ref: SlotRef, start: int, stop: int) -> None:
        """Advance a slot's window over rows `[start, stop)` of the forward."""
        before = self[ref]
        self.before.append((start, before))
        self._set(ref, self._last((*before, *range(max(start, stop - self.length), stop))))

    def _last(self, inputs: Window) -> Window:
        return inputs[len(inputs) - self.length :]

    def _set(self, ref: SlotRef, window: Window) -> None:
        self.by_slot[ref] = window
        self.changed.add(ref)


class ConvRows:
    """Convolution inputs of a layer: the rows of every scan after their earlier inputs, and updates of conv states.

    The inputs form a table: the rows of scans in order, each after `kernel - 1` earlier inputs; zeros; stored inputs.
    Its indexes may be sent later, before the first layer runs.
    """

    def __init__(self, windows: Windows, rows: int, device: torch.device, send: Send = to_device) -> None:
        before = sorted(windows.before)
        reach, starts = windows.length, np.array([start for start, _ in before], np.int64)
        self._length = rows + reach * len(before)
        scans = np.searchsorted(starts, np.arange(rows), side="right")
        self._row_indices = np.arange(rows) + reach * scans
        self._sources, self._reach = windows.sources, reach
        self._targets = sorted(windows.changed, key=lambda ref: (id(ref.pool), ref.slot))
        windows_by_use = [window for _, window in before], [windows.by_slot[ref] for ref in self._targets]
        history = starts[:, None] + reach * np.arange(len(before))[:, None] + np.arange(reach)
        arrays = [self._row_indices, history.ravel(), *(self._in_table(group) for group in windows_by_use)]
        self._rows, self._history, self._history_sources, self._window_sources = send(arrays, torch.int64, device)

    def _in_table(self, windows: list[Window]) -> np.ndarray:
        ids = np.array(windows, np.int64).ravel()
        indices = self._length - 1 - ids
        indices[ids >= 0] = self._row_indices[ids[ids >= 0]]
        return indices

    def copy_windows(self, layer: Layers) -> None:
        """Update conv states of slots without rows."""
        refs = self._sources or self._targets
        if refs:
            like = refs[0].memory(layer)
            self._inputs(layer, like.new_empty(0, len(like)))

    def convolve(self, layer: int, convolution: Callable[..., Tensor], rows: Tensor, *args: object) -> Tensor:
        """Compute the convolution's outputs [1, channels, T] of rows [1, channels, T], and update conv states."""
        inputs = self._inputs(layer, rows[0].mT)
        outputs = convolution(inputs.mT.contiguous()[None], *args)[0]
        return outputs.mT.contiguous().index_select(0, self._rows).mT[None]

    def _inputs(self, layer: Layers, rows: Tensor) -> Tensor:
        """Fill the table from `rows` [T, channels], update conv states, and return its rows [length, channels]."""
        channels, length = rows.shape[1], self._length
        table = rows.new_empty(length + 1 + self._reach * len(self._sources), channels)
        table[length] = 0
        if self._sources:
            stored = torch.stack([ref.memory(layer) for ref in self._sources])
            torch.stack(tuple(stored.unbind(-1)), dim=1, out=table[length + 1 :].view(-1, self._reach, channels))
        table.index_copy_(0, self._rows, rows)
        table.index_copy_(0, self._history, table.index_select(0, self._history_sources))
        if self._targets:
            windows = table.index_select(0, self._window_sources).view(-1, self._reach, channels).mT
            torch._foreach_copy_([ref.memory(layer) for ref in self._targets], list(windows))
        return table[:length]
