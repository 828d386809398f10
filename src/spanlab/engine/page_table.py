"""The block table of running requests: page ids on host and device, updated incrementally and never rebuilt."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spanlab.engine.pool import PageIds
from spanlab.engine.transfer import TransferBatch

_MIN_CAPACITY = 16  # entries of the smallest non-empty list


class PageTable:
    """Page lists in one array; each list occupies a contiguous range of entries, a power of two long.

    `update` copies only the entries written since the previous update to the device: a decode step sends one number
    per newly allocated page.

    `on_device`  the device copy of the table, int32; valid until the next write
    """

    def __init__(self, device: torch.device) -> None:
        self.ids = np.zeros(_MIN_CAPACITY, np.int64)
        self._device = device
        self.on_device = torch.zeros(_MIN_CAPACITY, dtype=torch.int32, device=device)
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        self._used = 0
        self._written: list[NDArray[np.int64]] = []

    def allocate(self, entries: int) -> int:
        """Allocate `entries` contiguous entries, a power of two; return the index of the first."""
        if self._free[entries]:
            return self._free[entries].pop()
        start, self._used = self._used, self._used + entries
        if self._used > len(self.ids):
            self._extend(max(self._used, 2 * len(self.ids)))
        return start

    def free(self, start: int, entries: int) -> None:
        """Free the entries of a list."""
        self._free[entries].append(start)

    def write(self, entries: NDArray[np.int64], ids: PageIds) -> None:
        """Write page ids to entries of the host table."""
        self.ids[entries] = ids
        self._written.append(entries)

    def update(self, transfer: TransferBatch) -> None:
        """Add the entries written since the last update to a transfer."""
        if self._written:
            entries = np.concatenate(self._written)
            self._written = []
            numbers = transfer.add([entries, self.ids[entries]], torch.int64, self._device)
            transfer.after_send(partial(self._write, *numbers))

    def _write(self, entries: Tensor, ids: Tensor) -> None:
        self.on_device[entries] = ids.int()  # duplicates of an entry carry the same, latest id

    def _extend(self, entries: int) -> None:
        ids = np.zeros(entries, np.int64)
        ids[: len(self.ids)] = self.ids
        copy = torch.zeros(entries, dtype=torch.int32, device=self._device)
        copy[: len(self.ids)] = self.on_device
        self.ids, self.on_device = ids, copy


class PageList:
    """The page ids of one cache span: a growable list in a page table."""

    def __init__(self, table: PageTable, ids: Sequence[int] | PageIds = ()) -> None:
        self._table, self.start, self.capacity, self.length = table, 0, 0, 0
        self.extend(np.asarray(ids, np.int64))

    def __len__(self) -> int:
        return self.length

    @property
    def ids(self) -> PageIds:
        """All page ids, as a view that the next `extend` may invalidate."""
        return self._table.ids[self.start : self.start + self.length]

    def range(self, first: int, stop: int) -> range:
        """Table entries of pages `[first, stop)` of the list."""
        return range(self.start + first, self.start + stop)

    def extend(self, ids: PageIds) -> None:
        """Append page ids."""
        self.reserve(self.length + len(ids))
        self.length += len(ids)
        self.replace(self.length - len(ids), ids)

    def replace(self, first: int, ids: PageIds) -> None:
        """Replace the page ids from index `first` on."""
        if len(ids):
            self._table.write(np.arange(self.start + first, self.start + first + len(ids)), ids)

    def reserve(self, length: int) -> None:
        """Ensure capacity for `length` page ids; the list may move within the table."""
        if length <= self.capacity:
            return
        old, ids = (self.start, self.capacity), self.ids
        self.capacity = max(_MIN_CAPACITY, 1 << (length - 1).bit_length())
        self.start = self._table.allocate(self.capacity)
        self.replace(0, ids)
        if old[1]:
            self._table.free(*old)

    def free(self) -> None:
        """Free the table entries and clear the list."""
        if self.capacity:
            self._table.free(self.start, self.capacity)
        self.start = self.capacity = self.length = 0


def append_to_each(table: PageTable, lists: Sequence[PageList], ids: PageIds) -> None:
    """Append one page id to each of the lists."""
    ends = []
    for pages in lists:
        if pages.length == pages.capacity:
            pages.reserve(pages.length + 1)
        ends.append(pages.start + pages.length)
        pages.length += 1
    table.write(np.array(ends, np.int64), ids)
