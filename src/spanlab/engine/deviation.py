"""The scores of CacheBlend: how far new keys and values are from the stored ones."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spanlab.core.repair import Repair
from spanlab.engine.row_chooser import HOST, RowChooser

_SCORED = {"keys": (0,), "values": (1,), "both": (0, 1)}


class DeviationChooser(RowChooser):
    """Keeps the rows whose new keys or values differ most from the stored ones, in the sum of squares."""

    def __init__(
        self, rule: Repair, count: int, layers: int, free: NDArray[np.bool_], device: torch.device = HOST
    ) -> None:
        super().__init__(rule, count, layers, free, device)
        self._scored = _SCORED[rule.score]

    def measure(self, new: tuple[Tensor, Tensor], stored: tuple[Tensor, Tensor]) -> None:
        """Note how far keys and values [T, Hkv, D] of the kept rows are from the stored ones."""
        parts = [(new[at].float() - stored[at].float()).square().sum((1, 2)) for at in self._scored]
        self.rank(sum(parts[1:], parts[0]))
