"""How a model rotates queries and keys by their positions, read from its own rotary module."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel


@dataclass(frozen=True, eq=False)
class Rotation:
    """One rotation for all layers: R(p) rotates channel pair i of each head by p · frequencies[i] radians.

    `frequencies`  float64 [rotary_dim / 2] on the CPU, radians per position; the model's own, scaling included.
    `factor`       what the model's cos and sin are multiplied by (YaRN's attention factor, else 1). Queries and keys
                   carry it as soon as the model has rotated them, by 0 positions too: R(p) is applied to them without.
    `interleaved`  pairs are channels (2i, 2i + 1), and not (i, i + rotary_dim / 2).
    """

    frequencies: Tensor
    factor: float = 1.0
    interleaved: bool = False

    @cached_property
    def rotary_dim(self) -> int:
        """Leading channels of each head that are rotated; those behind them are left alone."""
        return 2 * len(self.frequencies)


def read_rotation(model: PreTrainedModel, interleaved: bool = False) -> Rotation:
    """The rotation of a model that the support check lets through."""
    rotary: Any = model.base_model.rotary_emb
    return Rotation(rotary.inv_freq.detach().to("cpu", torch.float64), float(rotary.attention_scaling), interleaved)
