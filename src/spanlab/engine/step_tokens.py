"""Sampled tokens of a step: they stay on the device until all forwards are launched, then are copied to the host."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Ordered
from typing import NamedTuple

import torch
from torch import Tensor

from spanlab.core.scheduled import Sequence
from spanlab.engine.sampling import Draw, Sampler

OnLogits = Callable[[Sequence, Tensor], None]

_NO_TOKEN = -1


class DueToken(NamedTuple):
    """The token to sample at `position` of the output of a sequence."""

    sequence: Sequence
    position: int


class StepTokens:
    """Samples the tokens of each step.

    `outputs`    tokens generated so far, by request id
    `on_logits`  called with each row of logits that a token was sampled from
    """

    def __init__(
        self, name: str, sampler: Sampler, outputs: dict[int, list[int]], on_logits: OnLogits | None = None
    ) -> None:
        self._name, self._sampler, self._outputs, self._on_logits = name, sampler, outputs, on_logits
        self._due: list[DueToken] = []
        self._rows: list[Tensor] = []
        self._chosen: list[Tensor] = []

    def choose(self, due: Ordered[DueToken], logits: Tensor) -> None:
        """Sample tokens from their rows of logits [R, V], without synchronization."""
        if not due:
            return
        tokens = self._sampler.choose(logits, (Draw(sequence.request.id, position) for sequence, position in due))
        # One pass: any non-finite logit makes the sum non-finite. A sum in float16 could overflow with finite logits.
        finite = logits.sum(-1, dtype=torch.float32).isfinite()
        self._chosen.append(torch.where(finite, tokens, _NO_TOKEN))
        self._due += due
        self._rows += [logits] if self._on_logits is not None else []

    def read(self, step: int) -> None:
        """Copy the step's tokens to the host: the only synchronization of a step.

        FloatingPointError with the number `step` if a logit is not finite.
        """
        if not self._due:
            return
        due, rows, tokens = self._due, self._rows, torch.cat(self._chosen).cpu().tolist()
        self._due, self._rows, self._chosen = [], [], []
        if _NO_TOKEN in tokens:
            raise FloatingPointError(f"Model {self._name!r} gave logits that are no finite numbers in step {step}.")
        if self._on_logits is not None:
            for token_due, row in zip(due, (row for logits in rows for row in logits), strict=False):
                self._on_logits(token_due.sequence, row)
        for (sequence, position), token in zip(due, tokens, strict=True):
            answer = sequence.request.output
            output_token = token if answer is None else int(answer[position])  # teacher forcing
            # the slice replaces the output of an earlier request with the same id
            self._outputs.setdefault(sequence.request.id, [])[position:] = [output_token]
