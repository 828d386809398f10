"""Sampling of the next token from logits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from spanlab_kernels.attention import to_device


class Draw(NamedTuple):
    """The output token to sample: token `position` of the output of `request`."""

    request: int
    position: int


@dataclass(frozen=True, slots=True)
class Sampler:
    """Greedy at temperature 0, else sampled from softmax(logits / temperature).

    A draw depends only on the seed, the request id and the token's index, not on the batch or a preemption.
    """

    temperature: float = 0.0
    seed: int = 0

    def choose(self, logits: Tensor, draws: Iterable[Draw]) -> Tensor:
        """One token id per row of `logits` [R, V], int64 [R] on the same device; `draws` are unused if greedy."""
        if self.temperature == 0:
            return logits.argmax(-1)
        cumulative = torch.softmax(logits.double() / self.temperature, -1).cumsum(-1)
        uniforms = np.array([self._uniform(draw) for draw in draws], np.float64)
        (thresholds,) = to_device([uniforms], torch.float64, logits.device)
        # Scaled by the last sum, which rounding may leave below 1; so tokens of probability 0 are never drawn.
        tokens = torch.searchsorted(cumulative, thresholds[:, None] * cumulative[:, -1:], right=True)
        return tokens.squeeze(-1)

    def _uniform(self, draw: Draw) -> float:
        """A pseudo-random number in [0, 1)."""
        return float(np.random.default_rng([self.seed, *draw]).random())
