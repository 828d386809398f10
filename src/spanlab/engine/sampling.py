"""From logits to the next token."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from spanlab_kernels.attention import to_device


class Draw(NamedTuple):
    """Which token is due: the one at place `at` of the output of `request`."""

    request: int
    at: int


@dataclass(frozen=True, slots=True)
class Sampler:
    """Greedy at temperature 0, else drawn from softmax(logits / temperature).

    A draw depends on the seed, the request and the token's index alone: not on the batch, nor on a preemption.
    """

    temperature: float = 0.0
    seed: int = 0

    def choose(self, logits: Tensor, draws: Iterable[Draw]) -> Tensor:
        """One token id per row of `logits` [R, V], int64 [R] where they are; one draw each, unread if greedy."""
        if self.temperature == 0:
            return logits.argmax(-1)
        shares = torch.softmax(logits.double() / self.temperature, -1).cumsum(-1)
        uniforms = np.array([self._uniform(draw) for draw in draws], np.float64)
        (at,) = to_device([uniforms], torch.float64, logits.device)
        # Up to the last share: rounding may leave the sum below 1, and a token of no share is never drawn.
        found = torch.searchsorted(shares, at[:, None] * shares[:, -1:], right=True)
        return found.squeeze(-1)

    def _uniform(self, draw: Draw) -> float:
        """In [0, 1)."""
        return float(np.random.default_rng([self.seed, *draw]).random())
