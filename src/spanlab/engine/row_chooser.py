"""Which rows of a measured repair go on from layer to layer: those that score highest, and those that must."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spanlab.core.repair import Repair
from spanlab_kernels.attention import to_device

HOST = torch.device("cpu")


class RowChooser:
    """Chooses rows while a forward runs; rows that are not `free` always go on.

    Once: the `count` free rows go on that score highest at the layer that `Repair.check` says. Gradually: ever fewer,
    from 1.5 to 0.5 of `count`, equal in the mean, scored anew in every layer among those that are left.

    `kept`  indices, increasing, of the rows that are still computed.
    """

    def __init__(
        self, rule: Repair, count: int, layers: int, free: NDArray[np.bool_], device: torch.device = HOST
    ) -> None:
        self._layers = layers
        (self._free,) = to_device([free], torch.bool, device)
        self._first = min(rule.shallow_layers, layers)  # the first layer that fewer rows pass whole
        self._gradual = rule.kind == "deviation_gradual"
        self._inside = rule.filters_queries
        self._count, self._total = count, int(np.count_nonzero(free))
        self.kept = torch.arange(len(free), device=device)
        self._scores = torch.zeros(len(free), dtype=torch.float32, device=device)

    def projects(self, layer: int) -> bool:
        """Whether the projections of this layer decide which rows pass the rest of it."""
        return self._inside and layer == self._first

    def measures(self, layer: int) -> bool:
        """Whether the keys and values of this layer decide about the next."""
        return not self._inside and layer + 1 >= self._first and (self._gradual or layer + 1 == self._first)

    def rank(self, scores: Tensor) -> None:
        """Note the scores, float32 [T], of the kept rows."""
        self._scores = torch.where(self._free[self.kept], scores, torch.inf)

    def keep(self, layer: int) -> Tensor | None:
        """Rows, among those that reach `layer`, that go on; None where all do."""
        if layer < self._first or not (self.projects(layer) or self.measures(layer - 1)):
            return None
        wanted = self._wanted(layer) + len(self._free) - self._total
        if wanted >= len(self.kept):
            return None
        chosen = self._scores.topk(wanted).indices.sort().values
        self.kept = self.kept[chosen]
        return chosen

    def _wanted(self, layer: int) -> int:
        if not self._gradual or self._layers - self._first < 2:
            return self._count
        spread = min(0.5, (self._total - self._count) / max(self._count, 1))
        passed = (layer - self._first) / (self._layers - self._first - 1)
        return round(self._count * (1 + spread * (1 - 2 * passed)))
