"""Which tokens a measured repair computes again: those whose keys and values differ most (CacheBlend)."""

from __future__ import annotations

import torch
from torch import Tensor

from spanlab.core.repair import Repair


class DeviationChooser:
    """Chooses rows while a forward runs; rows that are not `free` always go on.

    As coded in CacheBlend (arXiv 2405.16444): all rows pass `check_layers` layers, then the `count` free ones stay
    whose new keys and values differ most, in the sum of squares, from the stored ones. As written there, gradually:
    ever fewer, from 1.5 to 0.5 of `count`, equal in the mean, measured anew in every layer among those that are left.

    `kept`  indices, increasing, of the rows that are still computed.
    """

    def __init__(self, rule: Repair, count: int, layers: int, free: Tensor) -> None:
        self._layers, self._free = layers, free
        self._first = min(rule.check_layers, layers)
        self._gradual = rule.kind == "deviation_gradual"
        self._count, self._total = count, int(free.sum())
        self.kept = torch.arange(len(free), device=free.device)
        self._deviation = torch.zeros(len(free), dtype=torch.float32, device=free.device)

    def measures(self, layer: int) -> bool:
        """Whether the keys and values of this layer decide about the next."""
        return layer + 1 >= self._first and (self._gradual or layer + 1 == self._first)

    def measure(self, new: tuple[Tensor, Tensor], stored: tuple[Tensor, Tensor]) -> None:
        """Note how far keys and values [T, Hkv, D] of the kept rows are from the stored ones."""
        parts = [(a.float() - b.float()).square().sum((1, 2)) for a, b in zip(new, stored, strict=True)]
        self._deviation = torch.where(self._free[self.kept], parts[0] + parts[1], torch.inf)

    def keep(self, layer: int) -> Tensor | None:
        """Rows, among those that reach `layer`, that go on; None where all do."""
        if layer < self._first or not self.measures(layer - 1):
            return None
        wanted = self._wanted(layer) + len(self._free) - self._total
        if wanted >= len(self.kept):
            return None
        chosen = self._deviation.topk(wanted).indices.sort().values
        self.kept = self.kept[chosen]
        return chosen

    def _wanted(self, layer: int) -> int:
        if not self._gradual or self._layers - self._first < 2:
            return self._count
        spread = min(0.5, (self._total - self._count) / max(self._count, 1))
        passed = (layer - self._first) / (self._layers - self._first - 1)
        return round(self._count * (1 + spread * (1 - 2 * passed)))
