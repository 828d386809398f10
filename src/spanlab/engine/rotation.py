"""RoPE parameters of a model, read from its rotary module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel


@dataclass(frozen=True, eq=False)
class Rotation:
    """RoPE of all layers: R(p) rotates channel pair i of each head by p · frequencies[i] radians.

    The model multiplies queries and keys by YaRN's attention factor, at any position, so later rotations omit it.

    `frequencies`  float64 [rotary_dim / 2] on the CPU, radians per position, including the model's scaling.
    `interleaved`  channel pairs are (2i, 2i + 1) instead of (i, i + rotary_dim / 2).
    """

    frequencies: Tensor
    interleaved: bool = False


def read_rotation(model: PreTrainedModel) -> Rotation:
    """Read the rotation of a model that passed the support check."""
    rotary: Any = model.base_model.rotary_emb
    return Rotation(rotary.inv_freq.detach().to("cpu", torch.float64))
