"""Decoding one prompt: freely, or over tokens that are told, with the logits of every position."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spanlab.bench.session import Session
from spanlab.core.request import Request
from spanlab.core.scheduler import Sequence
from spanlab.engine.sampling import Draw, Sampler
from spanlab.pic_bench.ground import Ground
from spanlab.settings import Strategy


@dataclass(frozen=True, slots=True)
class Told(Sampler):
    """Chooses the tokens that it is told for a request; greedy for any other."""

    tokens: Mapping[int, Ordered[int]] = field(default_factory=dict)

    def choose(self, logits: Tensor, draws: Ordered[Draw]) -> list[int]:
        """One token id per row of `logits` [R, V]; row r is for draws[r]."""
        greedy: list[int] = logits.argmax(-1).tolist()
        told = self.tokens
        return [
            told[draw.request][draw.index] if draw.request in told else token
            for draw, token in zip(draws, greedy, strict=True)
        ]


@dataclass(frozen=True)
class Decoded:
    """Tokens of an output, and the logits float32 [tokens, vocabulary] that each was chosen from."""

    tokens: list[int]
    logits: NDArray[np.float32]


def decode(
    ground: Ground,
    strategy: Strategy,
    before: Ordered[Request],
    request: Request,
    token_budget: int,
    told: Ordered[int] | None = None,
) -> Decoded:
    """Answer `request` from a cache that has served `before`, greedily or over the tokens that are `told`."""
    rows: list[Tensor] = []
    if told is not None:
        request = replace(request, output_len=len(told))
    sampler = Sampler() if told is None else Told(tokens={request.id: told})

    def note(sequence: Sequence, row: Tensor) -> None:
        if sequence.request is request:
            rows.append(row.cpu())

    asked = [*before, request]
    with Session(ground, strategy, asked, token_budget, sampler=sampler, on_logits=note) as session:
        for one in asked:
            session.ask(one)
        return Decoded(session.output(request), torch.stack(rows).numpy())
