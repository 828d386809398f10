"""Paged KV memory: one allocation for all layers, integer page ids."""

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
    """Sizes of a pool, all positive: layers, pages, tokens per page, KV heads, channels per head."""

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

    A *slot* is page · page_size + offset: the row of one token, the same in every layer. With `poison`, unwritten and
    free pages hold NaN, so that tests detect reads of unwritten memory.

    `free_pages`  number of pages that `allocate` can return now
    """

    def __init__(
        self, shape: PoolShape, dtype: torch.dtype, device: torch.device | str, *, poison: bool = False
    ) -> None:
        self.shape, self.poison = shape, poison
        sizes = (shape.layers, 2, shape.pages, shape.page_size, shape.kv_heads, shape.head_dim)
        self._storage = torch.zeros(sizes, dtype=dtype, device=device)
        if poison:
            self._storage.fill_(torch.nan)
        self._free = np.arange(shape.pages)[::-1].copy()  # a stack: the top is at index free_pages - 1
        self.free_pages = shape.pages
        self._is_free = np.ones(shape.pages, bool)

    def keys(self, layer: int) -> Tensor:
        """Keys of a layer, [pages, page_size, Hkv, D], as a view."""
        return self._storage[layer, 0]

    def values(self, layer: int) -> Tensor:
        """Values of a layer, [pages, page_size, Hkv, D], as a view."""
        return self._storage[layer, 1]

    # -- allocation ---------------------------------------------------------------------------------------------------

    def allocate(self, count: int) -> PageIds:
        """Allocate `count` pages; OutOfMemoryError if fewer are free."""
        total, free = self.shape.pages, self.free_pages
        if count > free:
            raise OutOfMemoryError(f"The pool of {total} pages has {free} free, and {count} were wanted at once.")
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

    # -- memory -------------------------------------------------------------------------------------------------------

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write keys and values [N, Hkv, D] of one layer to slots [N]."""
        blocks.scatter(self.keys(layer), slots, keys)
        blocks.scatter(self.values(layer), slots, values)

    def copy(self, source_slots: Tensor, target_slots: Tensor) -> None:
        """Copy keys and values of all layers from slots [N] to other slots [N]: copy-on-write."""
        # All planes as one long row of pages: a single launch for all layers.
        pages = self._storage.view(-1, *self._storage.shape[3:])
        planes = torch.arange(2 * self.shape.layers, device=pages.device)[:, None]
        first = planes * self.shape.pages * self.shape.page_size
        blocks.copy(pages, (first + source_slots).flatten(), (first + target_slots).flatten())

    def checksum(self, pages: Sequence[int]) -> str:
        """Digest of the bytes of pages in all layers, for tests that shared pages are never written."""
        contents = self._storage[:, :, torch.tensor(pages, device=self._storage.device)].contiguous()
        return hashlib.blake2b(contents.cpu().view(torch.uint8).numpy().tobytes(), digest_size=16).hexdigest()
