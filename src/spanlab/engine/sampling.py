"""From logits to the next token."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class Sampler:
    """Greedy at temperature 0, else drawn from softmax(logits / temperature), with one generator per request.

    A request's draws depend on the seed and its id alone, not on what it was batched with.
    """

    temperature: float = 0.0
    seed: int = 0
    _generators: dict[int, torch.Generator] = field(default_factory=dict)

    def choose(self, logits: Tensor, request_ids: list[int]) -> list[int]:
        """One token id per row of `logits` [R, V]; row r belongs to request_ids[r]."""
        if self.temperature == 0:
            chosen: list[int] = logits.argmax(-1).tolist()
            return chosen
        weights = torch.softmax(logits.double() / self.temperature, -1).cpu()
        return [
            int(torch.multinomial(row, 1, generator=self._generator(request)))
            for row, request in zip(weights, request_ids, strict=True)
        ]

    def _generator(self, request: int) -> torch.Generator:
        if request not in self._generators:
            self._generators[request] = torch.Generator().manual_seed((self.seed << 32) + request)
        return self._generators[request]
