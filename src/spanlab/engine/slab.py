"""Rows of equal parts side by side, so that one index on the device finds those of a whole batch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from spanlab.engine.slot_pool import Part

NOBODY = 0
"""A row that stands for nobody: it begins as zeros, and whatever is written there is read for nobody."""


class Slab:
    """Memory [rows, layers, …] of each part, which moves whenever there are to be more rows.

    `rows`  how many; while they are as many the memory lies where it does
    """

    def __init__(self, layers: int, parts: Mapping[str, Part], device: torch.device) -> None:
        self._memory = {
            name: torch.zeros((1, layers, *part.shape), dtype=part.dtype, device=device) for name, part in parts.items()
        }
        self.rows = 1

    def extend(self) -> range:
        """Double the rows beside that of nobody; the new ones, which hold anything."""
        before, self.rows = self.rows, max(2, 2 * self.rows - 1)
        for name, old in self._memory.items():
            self._memory[name] = old.new_empty(self.rows, *old.shape[1:])
            self._memory[name][:before] = old
        return range(before, self.rows)

    def row(self, row: int) -> dict[str, Tensor]:
        """The parts [layers, …] of a row: the memory itself, until the slab is extended."""
        return {name: memory[row] for name, memory in self._memory.items()}

    def part(self, name: str, layer: int) -> Tensor:
        """A part of one layer in all rows, [rows, …]: the memory itself, until the slab is extended."""
        return self._memory[name][:, layer]
