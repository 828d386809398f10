"""Outputs of a step: sampled tokens, scored answers, and what is recorded of the logits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spanlab.core.request import Request
from spanlab.core.step import ScheduledSequence
from spanlab.core.token_string import Tokens
from spanlab.engine.settings import MissingBaselineError
from spanlab_kernels.attention.batch import to_device

# ------------------------------------------------------------------------------
# Sampling of the next token from logits.
# ------------------------------------------------------------------------------


class Draw(NamedTuple):
    """The output token to sample: token `position` of the output of `request`."""

    request: int
    position: int


@dataclass(frozen=True, slots=True)
class Sampler:
    """Greedy at temperature 0, else sampled from softmax(logits / temperature).

    A draw depends only on the seed, the request id and the token's index, not on the batch or a
    preemption.
    """

    temperature: float = 0.0
    seed: int = 0

    def choose(self, logits: Tensor, draws: Iterable[Draw]) -> Tensor:
        """One token id per row of `logits` [R, V], int64 [R] on the same device; `draws` are unused
        if greedy."""
        if self.temperature == 0:
            return logits.argmax(-1)
        cumulative = torch.softmax(logits.double() / self.temperature, -1).cumsum(-1)
        uniforms = np.array(
            [np.random.default_rng([self.seed, *draw]).random() for draw in draws], np.float64
        )
        (thresholds,) = to_device([uniforms], torch.float64, logits.device)
        # Scaled by the last sum, which rounding may leave below 1; so tokens of probability 0 are
        # never drawn.
        tokens = torch.searchsorted(
            cumulative, thresholds[:, None] * cumulative[:, -1:], right=True
        )
        return tokens.squeeze(-1)


# ------------------------------------------------------------------------------
# Sampled tokens of a step: they stay on the device until all forwards are launched, then are
# copied to the host.
# ------------------------------------------------------------------------------

OnLogits = Callable[[ScheduledSequence, Tensor], None]

_NO_TOKEN = -1


class DueToken(NamedTuple):
    """The token to sample at `position` of the output of a sequence."""

    sequence: ScheduledSequence
    position: int


class StepTokens:
    """Samples the tokens of each step.

    `outputs`    tokens generated so far, by request id
    `on_logits`  called with each row of logits that a token was sampled from
    """

    def __init__(
        self,
        name: str,
        sampler: Sampler,
        outputs: dict[int, list[int]],
        on_logits: OnLogits | None = None,
    ) -> None:
        self._name = name
        self._sampler = sampler
        self._outputs = outputs
        self._on_logits = on_logits
        self._due: list[DueToken] = []
        self._rows: list[Tensor] = []
        self._chosen: list[Tensor] = []

    def choose(self, due: Ordered[DueToken], logits: Tensor) -> None:
        """Sample tokens from their rows of logits [R, V], without synchronization."""
        if not due:
            return
        tokens = self._sampler.choose(
            logits, (Draw(sequence.request.id, position) for sequence, position in due)
        )
        # One pass: any non-finite logit makes the sum non-finite. A sum in float16 could overflow
        # with finite logits.
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
            raise FloatingPointError(
                f"Model {self._name!r} gave logits that are no finite numbers in step {step}."
            )
        if self._on_logits is not None:
            for token_due, row in zip(
                due, (row for logits in rows for row in logits), strict=False
            ):
                self._on_logits(token_due.sequence, row)
        for (sequence, position), token in zip(due, tokens, strict=True):
            answer = sequence.request.output
            output_token = token if answer is None else int(answer[position])  # teacher forcing
            # the slice replaces the output of an earlier request with the same id
            self._outputs.setdefault(sequence.request.id, [])[position:] = [output_token]


# ------------------------------------------------------------------------------
# Scores of known answers: probability of each token, and divergence from a reference run's
# predictions.
#
# The logits of the reference, tokens × vocabulary, are written once and read by every other
# run. Other runs store a few numbers per token.
# ------------------------------------------------------------------------------

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
    """Score a token by the run's and the reference's logits, both of shape (vocabulary,), in
    float64."""
    log_q, log_p = (logits.double().log_softmax(-1) for logits in (row, reference))
    kl = float((log_p.exp() * (log_p - log_q)).sum())
    return TokenScore(-float(log_q[token]), max(0.0, kl), float(row.argmax() == reference.argmax()))


def mean_nll(first: Tensor, rest: Tensor, tokens: Tokens) -> float:
    """Mean −log p of an answer's tokens, nats; `first` are logits (V,) of its first token, `rest`
    (tokens − 1, V)."""
    log_p = torch.cat([first[None], rest]).double().log_softmax(-1)
    return -float(log_p[torch.arange(len(tokens)), torch.from_numpy(tokens).long()].mean())


class Scorer:
    """Scores the known answers of one run.

    `path`          file of the reference's logits, float32 [tokens, vocabulary], answers in the
                    order of requests
    `is_reference`  whether this run is the reference and writes the file

    MissingBaselineError where another run reads logits that the reference has not computed.

    An answer's first token is scored in the step of its second token, so that TTFT excludes
    scoring. The losses of a request's options are computed once the answer is complete.
    """

    def __init__(
        self, requests: Ordered[Request], vocabulary: int, path: Path, is_reference: bool
    ) -> None:
        requests_with_answers = [request for request in requests if request.output is not None]
        lengths = [request.output_len for request in requests_with_answers]
        starts = np.cumsum([0, *lengths])
        self._first = dict(
            zip([request.id for request in requests_with_answers], starts.tolist(), strict=False)
        )
        self._scores: NDArray[np.float64] = np.full(
            (int(starts[-1]), len(TokenScore._fields)), np.nan
        )
        self._keys = [
            (request.id, index)
            for request in requests_with_answers
            for index in range(request.output_len)
        ]
        self._is_reference = is_reference
        self._reference = _reference(path, (len(self._keys), vocabulary), is_reference)
        self._waiting: list[tuple[int, int, Tensor]] = []
        self._noted = dict.fromkeys(self._first, 0)
        # logits at the end of the prompt, by request with options
        self._ends: dict[int, Tensor] = {}
        self._options: list[tuple[int, int, float]] = []

    def note(self, sequence: ScheduledSequence, row: Tensor) -> None:
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

    def finished(self, sequence: ScheduledSequence, logits_of: LogitsOf) -> None:
        """Score the options of a request; their first tokens are predicted by the last prompt
        token."""
        request = sequence.request
        if not request.options:
            return
        end, logits = self._ends.pop(request.id), logits_of(request.options)
        for number, (tokens, rows) in enumerate(zip(request.options, logits, strict=True)):
            self._options.append((request.id, number, mean_nll(end, rows.cpu(), tokens)))

    def close(self) -> dict[str, NDArray[np.generic]]:
        """Score pending rows and return all scores as arrays: keys (request, index), and one array
        per score.

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
    """Open the file of the reference's logits; if this run is the reference, create it, with NaN
    first in each row."""
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


# ------------------------------------------------------------------------------
# Recording of a run's outputs: tokens, and the logits that they were sampled from.
# ------------------------------------------------------------------------------


@dataclass
class Recording:
    """Collects the outputs of one run; `note` is the engine's `on_logits` callback.

    `what`    `engine.record`
    `scorer`  scores the tokens of known answers as they are computed; None without scoring
    """

    what: str
    scorer: Scorer | None = None
    _logits: list[NDArray[np.float32]] = field(default_factory=list)
    _keys: list[tuple[int, int]] = field(default_factory=list)

    def note(self, sequence: ScheduledSequence, row: Tensor) -> None:
        """Record the logits of a sequence's next token, shape (vocabulary,)."""
        if self.scorer is not None:
            self.scorer.note(sequence, row)
        elif self.what == "logits" or (self.what == "first_logits" and sequence.generated == 0):
            self._logits.append(row.float().cpu().numpy())
            self._keys.append((sequence.request.id, sequence.generated))

    def finished(self, sequence: ScheduledSequence, logits_of: LogitsOf) -> None:
        """Score the options of a request with a complete answer."""
        if self.scorer is not None:
            self.scorer.finished(sequence, logits_of)

    def write(self, path: Path, outputs: Mapping[int, list[int]]) -> None:
        """Write the recording to `path`; `outputs` are the generated tokens by request."""
        lengths = [len(tokens) for tokens in outputs.values()]
        arrays = {
            "requests": np.array(list(outputs), np.int64),
            "ends": np.cumsum([0, *lengths]),
            "tokens": np.concatenate(
                [
                    np.empty(0, np.int32),
                    *(np.array(tokens, np.int32) for tokens in outputs.values()),
                ]
            ),
            "keys": np.array(self._keys, np.int64).reshape(-1, 2),
            "logits": np.array(self._logits, np.float32),
        }
        if self.scorer is not None:
            arrays |= self.scorer.close()
        with path.open("wb") as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]  # numpy's stub reads arrays as options
