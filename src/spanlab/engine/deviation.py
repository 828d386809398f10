"""Row scores of CacheBlend: deviation of new keys and values from the stored ones."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spanlab.core.repair import Repair
from spanlab.engine.row_chooser import HOST, RowChooser

_SCORED = {"keys": (0,), "values": (1,), "both": (0, 1)}


class DeviationChooser(RowChooser):
    """Keeps the rows with the largest sum of squared differences from the stored keys or values."""

    def __init__(
        self, rule: Repair, count: int, layers: int, free: NDArray[np.bool_], device: torch.device = HOST
    ) -> None:
        super().__init__(rule, count, layers, free, device)
        self._scored = _SCORED[rule.score]

    def measure(self, new: tuple[Tensor, Tensor], stored: tuple[Tensor, Tensor]) -> None:
        """Score the kept rows by the deviation of keys and values [T, Hkv, D] from the stored ones."""
        deviations = [(new[index].float() - stored[index].float()).square().sum((1, 2)) for index in self._scored]
        self.rank(sum(deviations[1:], deviations[0]))
