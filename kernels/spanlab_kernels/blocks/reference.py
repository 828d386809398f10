"""Reference of gather, scatter and copy, by indexing."""

from __future__ import annotations

from torch import Tensor


def gather(pages: Tensor, slots: Tensor, out: Tensor) -> Tensor:
    """Write the rows at `slots` into `out`; see `spanlab_kernels.blocks.gather`."""
    return out.copy_(pages.flatten(0, 1)[slots.long()])


def scatter(pages: Tensor, slots: Tensor, values: Tensor) -> None:
    """Write `values` to `slots`; see `spanlab_kernels.blocks.scatter`."""
    pages.flatten(0, 1)[slots.long()] = values


def copy(pages: Tensor, source_slots: Tensor, target_slots: Tensor) -> None:
    """Copy rows within the pages; see `spanlab_kernels.blocks.copy`."""
    rows = pages.flatten(0, 1)
    rows[target_slots.long()] = rows[source_slots.long()]
