"""Selection of the rows that a measured repair computes in each layer."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spanlab.core.repair import Repair
from spanlab_kernels.attention import to_device

HOST = torch.device("cpu")


class RowChooser:
    """Selects rows during a forward by their scores; rows that are not `free` are always computed.

    Single selection: the `count` free rows with the highest scores at the layer that `Repair` names. Gradual selection:
    from 1.5 to 0.5 of `count` rows, `count` on average, scored in every layer among the remaining rows.

    `rows`  indices, increasing, of the rows that are still computed
    """

    def __init__(
        self, rule: Repair, count: int, layers: int, free: NDArray[np.bool_], device: torch.device = HOST
    ) -> None:
        self._layers = layers
        (self._free,) = to_device([free], torch.bool, device)
        self._first = min(rule.shallow_layers, layers)  # the first layer that computes fewer rows in full
        self._gradual = rule.kind == "deviation_gradual"
        self._filters_queries = rule.filters_queries
        self._count, self._total = count, int(np.count_nonzero(free))
        self.rows = torch.arange(len(free), device=device)
        self._scores = torch.zeros(len(free), dtype=torch.float32, device=device)

    def projects(self, layer: int) -> bool:
        """Whether this layer's projections select the rows for the rest of the same layer."""
        return self._filters_queries and layer == self._first

    def measures(self, layer: int) -> bool:
        """Whether this layer's keys and values select the rows of the next layer."""
        return not self._filters_queries and layer + 1 >= self._first and (self._gradual or layer + 1 == self._first)

    def rank(self, scores: Tensor) -> None:
        """Set the scores, float32 [T], of the remaining rows."""
        self._scores = torch.where(self._free[self.rows], scores, torch.inf)

    def keep(self, layer: int) -> Tensor | None:
        """Select among the rows that enter `layer`; return their indices, or None to compute all of them."""
        if layer < self._first or not (self.projects(layer) or self.measures(layer - 1)):
            return None
        target = self._target_count(layer) + len(self._free) - self._total
        if target >= len(self.rows):
            return None
        chosen = self._scores.topk(target).indices.sort().values
        self.rows = self.rows[chosen]
        return chosen

    def _target_count(self, layer: int) -> int:
        if not self._gradual or self._layers - self._first < 2:
            return self._count
        spread = min(0.5, (self._total - self._count) / max(self._count, 1))
        passed = (layer - self._first) / (self._layers - self._first - 1)
        return round(self._count * (1 + spread * (1 - 2 * passed)))
