"""Scores of given answers: how likely a run finds each token, and how far its predictions are from a reference's.

The logits of a reference, tokens × vocabulary, are written once and read by every other run; of the others a few
numbers per token are kept.
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

LogitsOf = Callable[[Ordered[Tokens]], list[Tensor]]  # logits of other answers, as `OtherAnswers.of`


class TokenScore(NamedTuple):
    """Scores of one token of a given answer.

    `nll`   −log p of the token, nats
    `kl`    KL(reference ‖ run) of the prediction that it was given for, nats
    `top1`  whether both find the same token likeliest
    """

    nll: float
    kl: float
    top1: float


def token_score(row: Tensor, reference: Tensor, token: int) -> TokenScore:
    """Score a token by the run's and the reference's logits, both of shape (vocabulary,); float64 inside."""
    log_q, log_p = (logits.double().log_softmax(-1) for logits in (row, reference))
    kl = float((log_p.exp() * (log_p - log_q)).sum())
    return TokenScore(-float(log_q[token]), max(0.0, kl), float(row.argmax() == reference.argmax()))


def mean_nll(first: Tensor, others: Tensor, tokens: Tokens) -> float:
    """Mean −log p of an answer's tokens, nats, by logits of its first one, (V,), and of the others, (tokens − 1, V)."""
    log_p = torch.cat([first[None], others]).double().log_softmax(-1)
    return -float(log_p[torch.arange(len(tokens)), torch.from_numpy(tokens).long()].mean())


class Scorer:
    """Scores the answers of one run, whose tokens are known beforehand.

    `path`   file of the reference's logits, float32 [tokens, vocabulary], answer after answer in the requests' order
    `fills`  whether this run is the reference and writes it

    Rows of an answer's first token wait: they are scored in the step that computes the rest, so that no time to a
    first token has scoring in it.
    Of a request with options, the loss of each is taken once the answer is complete.
    """

    def __init__(self, requests: Ordered[Request], vocabulary: int, path: Path, fills: bool) -> None:
        given = [request for request in requests if request.output is not None]
        lengths = [request.output_len for request in given]
        starts = np.cumsum([0, *lengths])
        self._first = dict(zip([request.id for request in given], starts.tolist(), strict=False))
        self._scores: NDArray[np.float64] = np.full((int(starts[-1]), len(TokenScore._fields)), np.nan)
        self._keys = [(request.id, at) for request in given for at in range(request.output_len)]
        self._fills = fills
        self._reference = _reference(path, (len(self._keys), vocabulary), fills)
        self._waiting: list[tuple[int, int, Tensor]] = []
        self._noted = dict.fromkeys(self._first, 0)
        self._ends: dict[int, Tensor] = {}  # logits at the end of the prompt, by request with options
        self._options: list[tuple[int, int, float]] = []

    def note(self, sequence: Sequence, row: Tensor) -> None:
        """Take the logits of a sequence's next token, shape (vocabulary,), in the order of its tokens."""
        request = sequence.request
        if request.output is None:
            return
        at, self._noted[request.id] = self._noted[request.id], self._noted[request.id] + 1
        if at == 0 and request.options:
            self._ends[request.id] = row.cpu()
        self._waiting.append((self._first[request.id] + at, int(request.output[at]), row))
        if at:
            self._score()

    def finished(self, sequence: Sequence, logits_of: LogitsOf) -> None:
        """Score the options of a request, whose first tokens the end of the prompt predicts as that of the answer."""
        request = sequence.request
        if not request.options:
            return
        end, others = self._ends.pop(request.id), logits_of(request.options)
        for number, (tokens, rows) in enumerate(zip(request.options, others, strict=True)):
            self._options.append((request.id, number, mean_nll(end, rows.cpu(), tokens)))

    def close(self) -> dict[str, NDArray[np.generic]]:
        """Score what still waits, and give back all scores as arrays: keys (request, index), and one per score.

        Options have keys of their own, (request, number), with their losses per token.
        """
        self._score()
        assert np.isfinite(self._scores).all(), "a given token was not computed"
        if self._fills:
            self._reference.flush()
        columns = dict(zip(TokenScore._fields, self._scores.T, strict=True))
        options = {
            "options": np.array([key for *key, _ in self._options], np.int64).reshape(-1, 2),
            "option_nll": np.array([nll for *_, nll in self._options], np.float64),
        }
        return {"scored": np.array(self._keys, np.int64).reshape(-1, 2), **columns, **options}

    def _score(self) -> None:
        for place, token, row in self._waiting:
            if self._fills:
                self._reference[place] = row.float().cpu().numpy()
            reference = torch.from_numpy(np.array(self._reference[place])).to(row.device)
            self._scores[place] = token_score(row, reference, token)
        self._waiting.clear()


def _reference(path: Path, shape: tuple[int, int], fills: bool) -> np.memmap[tuple[int, int], np.dtype[np.float32]]:
    """The file of the reference's logits, new or as the reference has left it."""
    if fills:
        path.parent.mkdir(parents=True, exist_ok=True)
        return np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=shape)
    found = np.lib.format.open_memmap(path, mode="r")
    assert found.shape == shape, "the reference has answered other questions"
    return found
