"""RoPE parameters of a model, read from its rotary module."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel


@dataclass(frozen=True, eq=False)
class Rotation:
    """RoPE of all layers: R(p) rotates channel pair i of each head by p · frequencies[i] radians.

    `frequencies`  float64 [rotary_dim / 2] on the CPU, radians per position, including the model's scaling.
    `factor`       factor of the model's cos and sin (YaRN's attention factor, else 1). The model multiplies queries and
                   keys by it, also at position 0, so later rotations R(p) omit it.
    `interleaved`  channel pairs are (2i, 2i + 1) instead of (i, i + rotary_dim / 2).
    """

    frequencies: Tensor
    factor: float = 1.0
    interleaved: bool = False

    @cached_property
    def rotary_dim(self) -> int:
        """Number of leading channels of each head that are rotated; the others are copied."""
        return 2 * len(self.frequencies)


def read_rotation(model: PreTrainedModel, interleaved: bool = False) -> Rotation:
    """Read the rotation of a model that passed the support check."""
    rotary: Any = model.base_model.rotary_emb
    return Rotation(rotary.inv_freq.detach().to("cpu", torch.float64), float(rotary.attention_scaling), interleaved)
