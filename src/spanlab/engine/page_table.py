"""Page ids of running requests: one array on the host and the same on the device, appended to and never rebuilt."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spanlab.engine.pool import PageIds
from spanlab.engine.shipment import Shipment

_LEAST = 16  # places of the smallest list that holds anything


class PageTable:
    """Lists of page ids in runs of places, each as long as a power of two.

    What is written to the host's array reaches the device with the next `update`, and nothing else does: a step of
    decoding sends one number for each page that it begins.

    `on_device`  the table as the device has it, int32; valid until the next write
    """

    def __init__(self, device: torch.device) -> None:
        self.ids = np.zeros(_LEAST, np.int64)
        self._device = device
        self.on_device = torch.zeros(_LEAST, dtype=torch.int32, device=device)
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        self._used = 0
        self._written: list[NDArray[np.int64]] = []

    def take(self, places: int) -> int:
        """The first of so many places, a power of two, that nobody has."""
        if self._free[places]:
            return self._free[places].pop()
        start, self._used = self._used, self._used + places
        if self._used > len(self.ids):
            self._extend(max(self._used, 2 * len(self.ids)))
        return start

    def give(self, start: int, places: int) -> None:
        """Let others have the places."""
        self._free[places].append(start)

    def write(self, places: NDArray[np.int64], ids: PageIds) -> None:
        """Put page ids into places."""
        self.ids[places] = ids
        self._written.append(places)

    def update(self, shipment: Shipment) -> None:
        """Let the device have what was written since, with what else is shipped."""
        if self._written:
            places = np.concatenate(self._written)
            self._written = []
            numbers = shipment.add([places, self.ids[places]], torch.int64, self._device)
            shipment.then(partial(self._write, *numbers))

    def _write(self, places: Tensor, ids: Tensor) -> None:
        self.on_device[places] = ids.int()  # a place that was written twice has one number here, its last

    def _extend(self, places: int) -> None:
        ids = np.zeros(places, np.int64)
        ids[: len(self.ids)] = self.ids
        copy = torch.zeros(places, dtype=torch.int32, device=self._device)
        copy[: len(self.ids)] = self.on_device
        self.ids, self.on_device = ids, copy


class PageList:
    """A growing list of page ids in a table."""

    def __init__(self, table: PageTable, ids: Sequence[int] | PageIds = ()) -> None:
        self._table, self.start, self.places, self.length = table, 0, 0, 0
        self.extend(np.asarray(ids, np.int64))

    def __len__(self) -> int:
        return self.length

    @property
    def ids(self) -> PageIds:
        """All page ids; a view, which the next `extend` may leave behind."""
        return self._table.ids[self.start : self.start + self.length]

    def range(self, first: int, stop: int) -> range:
        """Where pages `[first, stop)` of the list stand in the table."""
        return range(self.start + first, self.start + stop)

    def extend(self, ids: PageIds) -> None:
        """Append page ids."""
        self.reserve(self.length + len(ids))
        self.length += len(ids)
        self.put(self.length - len(ids), ids)

    def put(self, first: int, ids: PageIds) -> None:
        """Replace the page ids from `first` on."""
        if len(ids):
            self._table.write(np.arange(self.start + first, self.start + first + len(ids)), ids)

    def reserve(self, length: int) -> None:
        """Have room for so many; the list may move to another run of places."""
        if length <= self.places:
            return
        old, ids = (self.start, self.places), self.ids
        self.places = max(_LEAST, 1 << (length - 1).bit_length())
        self.start = self._table.take(self.places)
        self.put(0, ids)
        if old[1]:
            self._table.give(*old)

    def free(self) -> None:
        """Give the places back; the list is empty."""
        if self.places:
            self._table.give(self.start, self.places)
        self.start = self.places = self.length = 0


def append_to_each(table: PageTable, lists: Sequence[PageList], ids: PageIds) -> None:
    """Append one page id to each of the lists."""
    ends = []
    for pages in lists:
        if pages.length == pages.places:
            pages.reserve(pages.length + 1)
        ends.append(pages.start + pages.length)
        pages.length += 1
    table.write(np.array(ends, np.int64), ids)
