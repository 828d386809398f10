"""Scores of known answers: probability of each token, and divergence from a reference run's predictions.

The logits of the reference, tokens × vocabulary, are written once and read by every other run. Other runs store a few
numbers per token.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Ordered
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spanlab.core.request import Request, Tokens
from spanlab.core.scheduled import Sequence
from spanlab.engine.settings import MissingBaselineError

LogitsOf = Callable[[Ordered[Tokens]], list[Tensor]]  # as `Forwards.answer_logits`


class TokenScore(NamedTuple):
    """Scores of one token of a known answer.

    `nll`   −log p of the token, nats
    `kl`    KL(reference ‖ run) of the prediction at its position, nats
    `top1`  whether both predictions have the same most likely token
    """

    nll: float
    kl: float
    top1: float


def token_score(row: Tensor, reference: Tensor, token: int) -> TokenScore:
    """Score a token by the run's and the reference's logits, both of shape (vocabulary,), in float64."""
    log_q, log_p = (logits.double().log_softmax(-1) for logits in (row, reference))
    kl = float((log_p.exp() * (log_p - log_q)).sum())
    return TokenScore(-float(log_q[token]), max(0.0, kl), float(row.argmax() == reference.argmax()))


def mean_nll(first: Tensor, rest: Tensor, tokens: Tokens) -> float:
    """Mean −log p of an answer's tokens, nats; `first` are logits (V,) of its first token, `rest` (tokens − 1, V)."""
    log_p = torch.cat([first[None], rest]).double().log_softmax(-1)
    return -float(log_p[torch.arange(len(tokens)), torch.from_numpy(tokens).long()].mean())


class Scorer:
    """Scores the known answers of one run.

    `path`          file of the reference's logits, float32 [tokens, vocabulary], answers in the order of requests
    `is_reference`  whether this run is the reference and writes the file

    MissingBaselineError where another run reads logits that the reference has not computed.

    An answer's first token is scored in the step of its second token, so that TTFT excludes scoring. The losses of a
    request's options are computed once the answer is complete.
    """

    def __init__(self, requests: Ordered[Request], vocabulary: int, path: Path, is_reference: bool) -> None:
        requests_with_answers = [request for request in requests if request.output is not None]
        lengths = [request.output_len for request in requests_with_answers]
        starts = np.cumsum([0, *lengths])
        self._first = dict(zip([request.id for request in requests_with_answers], starts.tolist(), strict=False))
        self._scores: NDArray[np.float64] = np.full((int(starts[-1]), len(TokenScore._fields)), np.nan)
        self._keys = [(request.id, index) for request in requests_with_answers for index in range(request.output_len)]
        self._is_reference = is_reference
        self._reference = _reference(path, (len(self._keys), vocabulary), is_reference)
        self._waiting: list[tuple[int, int, Tensor]] = []
        self._noted = dict.fromkeys(self._first, 0)
        self._ends: dict[int, Tensor] = {}  # logits at the end of the prompt, by request with options
        self._options: list[tuple[int, int, float]] = []

    def note(self, sequence: Sequence, row: Tensor) -> None:
        """Add the logits of a sequence's next token, shape (vocabulary,), in token order."""
        request = sequence.request
        if request.output is None:
            return
        index, self._noted[request.id] = self._noted[request.id], self._noted[request.id] + 1
        if index == 0 and request.options:
            self._ends[request.id] = row.cpu()
        self._waiting.append((self._first[request.id] + index, int(request.output[index]), row))
        if index:
            self._score()

    def finished(self, sequence: Sequence, logits_of: LogitsOf) -> None:
        """Score the options of a request; their first tokens are predicted by the last prompt token."""
        request = sequence.request
        if not request.options:
            return
        end, logits = self._ends.pop(request.id), logits_of(request.options)
        for number, (tokens, rows) in enumerate(zip(request.options, logits, strict=True)):
            self._options.append((request.id, number, mean_nll(end, rows.cpu(), tokens)))

    def close(self) -> dict[str, NDArray[np.generic]]:
        """Score pending rows and return all scores as arrays: keys (request, index), and one array per score.

        Options have keys (request, number), with their losses per token.
        """
        self._score()
        assert np.isfinite(self._scores).all(), "a token of a known answer was not computed"
        if self._is_reference:
            self._reference.flush()
        columns = dict(zip(TokenScore._fields, self._scores.T, strict=True))
        options = {
            "options": np.array([key for *key, _ in self._options], np.int64).reshape(-1, 2),
            "option_nll": np.array([nll for *_, nll in self._options], np.float64),
        }
        return {"scored": np.array(self._keys, np.int64).reshape(-1, 2), **columns, **options}

    def _score(self) -> None:
        for index, token, row in self._waiting:
            if self._is_reference:
                self._reference[index] = row.float().cpu().numpy()
            reference = torch.from_numpy(np.array(self._reference[index])).to(row.device)
            if reference[0].isnan():
                raise MissingBaselineError
            self._scores[index] = token_score(row, reference, token)
        self._waiting.clear()


def _reference(
    path: Path, shape: tuple[int, int], is_reference: bool
) -> np.memmap[tuple[int, int], np.dtype[np.float32]]:
    """Open the file of the reference's logits; if this run is the reference, create it, with NaN first in each row."""
    if is_reference:
        path.parent.mkdir(parents=True, exist_ok=True)
        created = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=shape)
        created[:, 0] = np.nan
        return created
    if not path.exists():
        raise MissingBaselineError
    logits = np.lib.format.open_memmap(path, mode="r")
    assert logits.shape == shape, "the reference has other requests"
    return logits
