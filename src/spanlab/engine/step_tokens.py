"""The tokens that a step chooses: they stay on the device until all its forwards are launched, and come in one copy."""

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


class Due(NamedTuple):
    """The token that is due at place `at` of the output of a sequence."""

    sequence: Sequence
    at: int


class StepTokens:
    """Chooses the tokens of one step after the other.

    `outputs`    tokens generated so far, by request id
    `on_logits`  is given each row of logits that a token was chosen from
    """

    def __init__(
        self, name: str, sampler: Sampler, outputs: dict[int, list[int]], on_logits: OnLogits | None = None
    ) -> None:
        self._name, self._sampler, self._outputs, self._on_logits = name, sampler, outputs, on_logits
        self._due: list[Due] = []
        self._rows: list[Tensor] = []
        self._chosen: list[Tensor] = []

    def choose(self, due: Ordered[Due], logits: Tensor) -> None:
        """Choose tokens from their rows of logits [R, V], without waiting for the device."""
        if not due:
            return
        tokens = self._sampler.choose(logits, (Draw(sequence.request.id, at) for sequence, at in due))
        # One pass: what is no finite number leaves no finite sum. A sum in float16 would overflow where no logit does.
        finite = logits.sum(-1, dtype=torch.float32).isfinite()
        self._chosen.append(torch.where(finite, tokens, _NO_TOKEN))
        self._due += due
        self._rows += [logits] if self._on_logits is not None else []

    def read(self, step: int) -> None:
        """Bring the step's tokens to the host: the one time that a step waits for the device.

        FloatingPointError where a logit was no finite number; `step` is named in it.
        """
        if not self._due:
            return
        due, rows, tokens = self._due, self._rows, torch.cat(self._chosen).cpu().tolist()
        self._due, self._rows, self._chosen = [], [], []
        if _NO_TOKEN in tokens:
            raise FloatingPointError(f"Model {self._name!r} gave logits that are no finite numbers in step {step}.")
        if self._on_logits is not None:
            for one, row in zip(due, (row for logits in rows for row in logits), strict=False):
                self._on_logits(one.sequence, row)
        for (sequence, at), token in zip(due, tokens, strict=True):
            known = sequence.request.output
            said = token if known is None else int(known[at])  # teacher forcing
            self._outputs.setdefault(sequence.request.id, [])[at:] = [said]  # the same id may have been served before
