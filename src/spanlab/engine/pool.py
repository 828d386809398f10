"""Pages of keys and values: one allocation for all layers, integer page ids, references counted."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spanlab.out_of_memory import OutOfMemoryError
from spanlab_kernels import blocks

PageIds = NDArray[np.int64]


@dataclass(frozen=True)
class PoolShape:
    """Sizes of a pool, all positive: layers, pages, tokens per page, key-value heads, channels per head."""

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
    """Keys and values of all layers in pages, handed out by id; a page is free once nobody refers to it.

    A *slot* is page · page_size + offset: the place of one token, the same in every layer. With `poison` every page
    holds NaN until it is written, and again once it is free, so that a test sees whoever reads what is not there.

    `free_pages`  pages that `take` could hand out now
    """

    def __init__(
        self, shape: PoolShape, dtype: torch.dtype, device: torch.device | str, *, poison: bool = False
    ) -> None:
        self.shape, self.poison = shape, poison
        sizes = (shape.layers, 2, shape.pages, shape.page_size, shape.kv_heads, shape.head_dim)
        self._storage = torch.zeros(sizes, dtype=dtype, device=device)
        if poison:
            self._storage.fill_(torch.nan)
        self._free = np.arange(shape.pages)[::-1].copy()  # the last of the first `free_pages` is taken first
        self.free_pages = shape.pages
        self._references = np.zeros(shape.pages, np.int64)

    def keys(self, layer: int) -> Tensor:
        """Keys of a layer, [pages, page_size, Hkv, D]: the memory itself."""
        return self._storage[layer, 0]

    def values(self, layer: int) -> Tensor:
        """Values of a layer, [pages, page_size, Hkv, D]: the memory itself."""
        return self._storage[layer, 1]

    # -- who holds what -----------------------------------------------------------------------------------------------

    def take(self, count: int) -> PageIds:
        """`count` free pages, each with one reference; all or none: ShortageError where there are not enough."""
        held, free = self.shape.pages, self.free_pages
        if count > free:
            raise OutOfMemoryError(f"The pool of {held} pages has {free} free, and {count} were wanted at once.")
        self.free_pages -= count
        taken = self._free[self.free_pages : free][::-1].copy()
        self._references[taken] = 1
        return taken

    def share(self, pages: Sequence[int] | PageIds) -> None:
        """Add a reference to each of the pages, which are held already."""
        np.add.at(self._references, pages, 1)
        assert (self._references[pages] > 1).all(), "a free page was shared"

    def give(self, pages: Sequence[int] | PageIds) -> None:
        """Drop a reference to each of the pages; what nobody refers to any more is free, the first page taken first."""
        pages = np.asarray(pages, np.int64)
        np.subtract.at(self._references, pages, 1)
        assert (self._references[pages] >= 0).all(), "a page was given back more often than it was held"
        each = pages[np.sort(np.unique(pages, return_index=True)[1])]
        left = each[self._references[each] == 0]
        self._free[self.free_pages : self.free_pages + len(left)] = left[::-1]
        self.free_pages += len(left)
        if self.poison and len(left):
            self._storage[:, :, torch.from_numpy(left).to(self._storage.device)] = torch.nan

    def references(self, page: int) -> int:
        """How many hold a page; 0 means that it is free."""
        return int(self._references[page])

    # -- what lies where ----------------------------------------------------------------------------------------------

    def slots(self, pages: Sequence[int], start: int, stop: int) -> Tensor:
        """Slots, int64 [stop - start], of tokens [start, stop) of a sequence that fills `pages` from the first on."""
        size = self.shape.page_size
        assert 0 <= start <= stop <= len(pages) * size, "tokens outside their pages"
        tokens = torch.arange(start, stop, device=self._storage.device)
        ids = torch.tensor(pages, dtype=torch.int64, device=self._storage.device)
        return ids[tokens // size] * size + tokens % size

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put keys and values [N, Hkv, D] of one layer into slots [N]."""
        blocks.scatter(self.keys(layer), slots, keys)
        blocks.scatter(self.values(layer), slots, values)

    def copy(self, source_slots: Tensor, target_slots: Tensor) -> None:
        """Copy keys and values of all layers from slots [N] to other slots [N]: copy-on-write."""
        # All planes as one long row of pages: a single launch, whatever the number of layers.
        pages = self._storage.view(-1, *self._storage.shape[3:])
        planes = torch.arange(2 * self.shape.layers, device=pages.device)[:, None]
        first = planes * self.shape.pages * self.shape.page_size
        blocks.copy(pages, (first + source_slots).flatten(), (first + target_slots).flatten())

    def checksum(self, pages: Sequence[int]) -> str:
        """A digest of the bytes of pages in all layers; for tests that what is shared is never written."""
        held = self._storage[:, :, torch.tensor(pages, device=self._storage.device)].contiguous()
        return hashlib.blake2b(held.cpu().view(torch.uint8).numpy().tobytes(), digest_size=16).hexdigest()
