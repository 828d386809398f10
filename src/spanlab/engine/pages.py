"""Paged memory of keys and values: the pool, the pages of requests and nodes, copies to the
host."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spanlab.core.repair import SpanSettings
from spanlab.core.tree import CacheSpan, Node
from spanlab.errors import OutOfMemoryError
from spanlab_kernels.blocks import copy, write

# ------------------------------------------------------------------------------
# Paged KV memory: one allocation for all layers, integer page ids.
# ------------------------------------------------------------------------------

PageIds = NDArray[np.int64]


@dataclass(frozen=True)
class PoolShape:
    """Sizes of a pool, all positive: layers, pages, tokens per page, KV heads, channels per
    head."""

    layers: int
    pages: int
    page_size: int
    kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        for key, value in vars(self).items():
            if value < 1:
                raise ValueError(f"pool.{key} is {value}, expected a positive integer.")


class PagePool:
    """Keys and values of all layers in pages that are allocated and freed one by one.

    A *slot* is page · page_size + offset: the row of one token, the same in every layer. With
    `poison`, unwritten and free pages hold NaN, so that tests detect reads of unwritten memory.

    `free_pages`  number of pages that `allocate` can return now
    """

    def __init__(
        self,
        shape: PoolShape,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        poison: bool = False,
    ) -> None:
        self.shape, self.poison = shape, poison
        sizes = (shape.layers, 2, shape.pages, shape.page_size, shape.kv_heads, shape.head_dim)
        self._storage = torch.zeros(sizes, dtype=dtype, device=device)
        if poison:
            self._storage.fill_(torch.nan)
        # a stack: the top is at index free_pages - 1
        self._free = np.arange(shape.pages)[::-1].copy()
        self.free_pages = shape.pages
        self._is_free = np.ones(shape.pages, bool)

    def keys(self, layer: int) -> Tensor:
        """Keys of a layer, [pages, page_size, Hkv, D], as a view."""
        return self._storage[layer, 0]

    def values(self, layer: int) -> Tensor:
        """Values of a layer, [pages, page_size, Hkv, D], as a view."""
        return self._storage[layer, 1]

    # -- allocation --------------------------------------------------------------------------------

    def allocate(self, count: int) -> PageIds:
        """Allocate `count` pages; OutOfMemoryError if fewer are free."""
        total, free = self.shape.pages, self.free_pages
        if count > free:
            raise OutOfMemoryError(
                f"The pool of {total} pages has {free} free, and {count} were wanted at once."
            )
        self.free_pages -= count
        pages = self._free[self.free_pages : free][::-1].copy()
        self._is_free[pages] = False
        return pages

    def free(self, pages: Sequence[int] | PageIds) -> None:
        """Free allocated pages; the first is reallocated first."""
        pages = np.asarray(pages, np.int64)
        freed_twice = self._is_free[pages].any() or len(np.unique(pages)) < len(pages)
        assert not freed_twice, "a page was given back more often than it was held"
        self._is_free[pages] = True
        self._free[self.free_pages : self.free_pages + len(pages)] = pages[::-1]
        self.free_pages += len(pages)
        if self.poison and len(pages):
            self._storage[:, :, torch.from_numpy(pages).to(self._storage.device)] = torch.nan

    # -- memory ------------------------------------------------------------------------------------

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write keys and values [N, Hkv, D] of one layer to slots [N]."""
        write(self.keys(layer), self.values(layer), slots, keys, values)

    def copy(self, source_slots: Tensor, target_slots: Tensor) -> None:
        """Copy keys and values of all layers from slots [N] to other slots [N]: copy-on-write."""
        # All planes as one long row of pages: a single launch for all layers.
        pages = self._storage.view(-1, *self._storage.shape[3:])
        planes = torch.arange(2 * self.shape.layers, device=pages.device)[:, None]
        first = planes * self.shape.pages * self.shape.page_size
        copy(pages, (first + source_slots).flatten(), (first + target_slots).flatten())

    def checksum(self, pages: Sequence[int]) -> str:
        """Digest of the bytes of pages in all layers, for tests that shared pages are never
        written."""
        contents = self._storage[
            :, :, torch.tensor(pages, device=self._storage.device)
        ].contiguous()
        return hashlib.blake2b(
            contents.cpu().view(torch.uint8).numpy().tobytes(), digest_size=16
        ).hexdigest()


# ------------------------------------------------------------------------------
# Host-to-device transfer of one forward's inputs: arrays batched into one copy from pinned
# memory.
# ------------------------------------------------------------------------------

_ALIGNED = 16  # bytes: Triton compiles a further kernel variant for pointers with less alignment
MIN_BYTES = 1 << 16  # bytes of a buffer: the rows and spans of about a hundred decoding requests


class TransferBatch:
    """Arrays get device addresses when they are added, and their contents when all are sent.

    Arrays of equal lengths in equal order get equal addresses in `buffer` (uint8 on the device,
    optional). A transfer that exceeds its buffer continues in a new one, with one more copy.
    """

    def __init__(self, device: torch.device, buffer: Tensor | None = None) -> None:
        self._device, self._buffer = device, buffer
        self._buffers: list[tuple[Tensor, Tensor]] = []  # on the host, on the device
        self._used = self._size = 0  # bytes of the last buffer
        self._callbacks: list[Callable[[], None]] = []

    def add(
        self, arrays: Sequence[NDArray[np.generic]], dtype: torch.dtype, device: torch.device
    ) -> list[Tensor]:
        """Return arrays as aligned device tensors of `dtype`; their contents are valid after
        `send`."""
        assert device == self._device, "a transfer has one target device"
        lengths, unit = [len(values) for values in arrays], _ALIGNED // dtype.itemsize
        gaps = [-length % unit for length in lengths]
        size = (sum(lengths) + sum(gaps)) * dtype.itemsize
        if not self._buffers or self._used + size > self._size:
            buffer, self._buffer = self._buffer, None
            if buffer is None or len(buffer) < size:
                buffer = torch.empty(max(MIN_BYTES, size), dtype=torch.uint8, device=self._device)
            host = buffer
            if buffer.device.type != "cpu":
                host = torch.empty(len(buffer), dtype=torch.uint8, pin_memory=True)
            self._buffers.append((host, buffer))
            self._used, self._size = 0, len(host)
        host, target = self._buffers[-1]
        first, self._used = self._used, self._used + size
        host = host[first : self._used]
        target = target[first : self._used]
        numbers, offset = host.view(dtype).numpy(), 0
        for values, length, gap in zip(arrays, lengths, gaps, strict=True):
            numbers[offset : offset + length] = values
            offset += length + gap
        return list(
            target.view(dtype).split(list(chain.from_iterable(zip(lengths, gaps, strict=True))))[
                ::2
            ]
        )

    def after_send(self, callback: Callable[[], None]) -> None:
        """Register a callback for `send`, after the copies are launched."""
        self._callbacks.append(callback)

    def send(self) -> None:
        """Launch all copies and run the callbacks, without synchronization."""
        for index, (host, target) in enumerate(self._buffers):
            used = self._used if index == len(self._buffers) - 1 else len(host)
            if target is not host:
                target[:used].copy_(host[:used], non_blocking=True)
        for callback in self._callbacks:
            callback()
        self._buffers, self._callbacks, self._used = [], [], 0


# ------------------------------------------------------------------------------
# The block table of running requests: page ids on host and device, updated incrementally and
# never rebuilt.
# ------------------------------------------------------------------------------

_MIN_CAPACITY = 16  # entries of the smallest non-empty list


class PageTable:
    """Page lists in one array; each list occupies a contiguous range of entries, a power of two
    long.

    `update` copies only the entries written since the previous update to the device: a decode step
    sends one number per newly allocated page.

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
            ids = np.zeros(max(self._used, 2 * len(self.ids)), np.int64)
            ids[: len(self.ids)] = self.ids
            copy = torch.zeros(len(ids), dtype=torch.int32, device=self._device)
            copy[: len(self.ids)] = self.on_device
            self.ids, self.on_device = ids, copy
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


# ------------------------------------------------------------------------------
# Device pages of the nodes in the policy's prefix tree.
# ------------------------------------------------------------------------------

_NONE = np.empty(0, np.int64)


class NodePages:
    """Page ids by tree node, updated when the tree splits or removes a node.

    `free`  called with the pages of a removed node
    """

    def __init__(self, page_size: int, free: Callable[[PageIds], None]) -> None:
        self._page_size, self._free = page_size, free
        self._pages: dict[Node, PageIds] = {}

    def __contains__(self, node: Node) -> bool:
        return node in self._pages

    def __getitem__(self, node: Node) -> PageIds:
        return self._pages[node]

    def __setitem__(self, node: Node, pages: PageIds) -> None:
        assert len(pages) * self._page_size == node.depth - node.start, (
            "pages do not fit their node"
        )
        self._pages[node] = pages

    def path(self, node: Node, stop: int) -> PageIds:
        """Pages of the first `stop` tokens of the path to `node`, in order; a node must end at
        `stop`."""
        parts = [self._pages[step] for step in node.path() if step.depth <= stop]
        return np.concatenate([_NONE, *reversed(parts)])

    def all(self) -> list[int]:
        """All pages of stored nodes."""
        return [page for pages in self._pages.values() for page in pages.tolist()]

    # -- tree callbacks ----------------------------------------------------------------------------

    def split(self, upper: Node, lower: Node) -> None:
        """Divide a node's pages at the split; a node that is not registered yet has none."""
        if lower in self._pages:
            pages, cut = self._pages[lower], (upper.depth - upper.start) // self._page_size
            self._pages[upper], self._pages[lower] = pages[:cut], pages[cut:]

    def removed(self, node: Node) -> None:
        """Free the pages of a removed node."""
        self._free(self._pages.pop(node, _NONE))


# ------------------------------------------------------------------------------
# Key layout: rotation of stored keys, and positions of cache spans.
# ------------------------------------------------------------------------------

Indices = NDArray[np.int64]


def carried_rotation(
    key_layout: SpanSettings, cache_span: CacheSpan, base: int | Indices, rows: Indices
) -> Indices:
    """Rotation of stored keys, in positions, for tokens `rows` of a cache span at position `base`.

    Ordered text is stored at its position, because it is never read at another one.
    """
    if key_layout.keys == "raw":
        return np.zeros_like(rows)
    return rows if key_layout.keys == "local" and cache_span.independent else base + rows


def bases(cache_spans: tuple[CacheSpan, ...], overlapping: bool) -> list[int]:
    """Position of each cache span's first token."""
    if not overlapping:
        return [cache_span.start for cache_span in cache_spans]
    head = next((cache_span.start for cache_span in cache_spans if cache_span.independent), 0)
    spans = [
        cache_span.stop - cache_span.start for cache_span in cache_spans if cache_span.independent
    ]
    position, positions = head + max(spans, default=0), []
    for cache_span in cache_spans:
        if cache_span.independent:
            positions.append(head)
        elif cache_span.start < head or not spans:
            positions.append(cache_span.start)
        else:
            positions.append(position)
            position += cache_span.stop - cache_span.start
    return positions
