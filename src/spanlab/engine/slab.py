"""Contiguous tensors of many slots, so that one device index gathers the slots of a batch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from spanlab.engine.slot_pool import TensorSpec

PADDING_ROW = 0
"""The row that padding reads and writes: initially zeros, never used for a request."""


class Slab:
    """Memory [rows, layers, …] of each tensor; its addresses change when rows are added.

    `rows`  number of rows; addresses are constant while it is unchanged
    """

    def __init__(self, layers: int, specs: Mapping[str, TensorSpec], device: torch.device) -> None:
        self._memory = {
            name: torch.zeros((1, layers, *spec.shape), dtype=spec.dtype, device=device) for name, spec in specs.items()
        }
        self.rows = 1

    def extend(self) -> range:
        """Double the rows, without the padding row; return the new, uninitialised rows."""
        before, self.rows = self.rows, max(2, 2 * self.rows - 1)
        for name, old in self._memory.items():
            self._memory[name] = old.new_empty(self.rows, *old.shape[1:])
            self._memory[name][:before] = old
        return range(before, self.rows)

    def row(self, row: int) -> dict[str, Tensor]:
        """Views [layers, …] of a row's tensors, valid until the slab is extended."""
        return {name: memory[row] for name, memory in self._memory.items()}

    def tensor(self, name: str, layer: int) -> Tensor:
        """View [rows, …] of a tensor of one layer in all rows, valid until the slab is extended."""
        return self._memory[name][:, layer]
