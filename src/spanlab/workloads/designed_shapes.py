"""What is measured: few requests at a time, of all lengths, batch sizes and shares of reuse that a study may meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from spanlab.core.batch_rules import BatchRules
from spanlab.core.request import Request, Span
from spanlab.workloads.source import workload
from spanlab.workloads.workload import Workload

_SHORTEST = 16  # prompt tokens
_MOST_DOCUMENTS = 6
_MOST_LONGEST = 4  # of the longest prompts in one wave
_LARGEST = (1.0, 1.0, 1.0, 0.0, 0.5, 1.0)  # draws of the shape that no other exceeds: a plain one, of one document
_HEAD = 8  # tokens that all prompts begin with
_WAVES_NS = 3_600 * 10**9  # between waves: idle time, which virtual time skips
_STEPS = 8  # into which the token budget cuts one wave at most, so that no shape outweighs the others


@workload("designed_shapes")
def modelled() -> Workload:
    """Refuse to make shapes without a study: they depend on its arms and its batch."""
    raise ValueError("workload.kind=designed_shapes: expected a study, which designs the shapes for its arms")


class Design(Protocol):
    """Number of shapes, most tokens of a prompt and of an output, seed of all draws."""

    shapes: int
    longest: int | None
    outputs: int | None
    seed: int


@dataclass(frozen=True)
class Shape:
    """One run: requests that arrive in two waves, the second of which asks about the documents of the first.

    `rules`  of the study, with a token budget of its own
    """

    arm: str
    rules: BatchRules
    requests: tuple[Request, ...]


def design(settings: Design, arms: Mapping[str, bool], rules: BatchRules, vocab: int) -> list[Shape]:
    """Shapes by turns of the arms, each arm's spread evenly over the logarithms of sizes (a Latin hypercube).

    The first is as large as any may be. Numbers of [0, 1] are drawn, with both ends.
    `arms`  names, and whether the arm finds documents wherever they stand; the others are asked about them in order
    """
    names = list(arms)
    rng = np.random.default_rng(settings.seed)
    spread = [_drawn(-(-settings.shapes // len(arms)), rng) for _ in names]
    spread[0][0] = list(_LARGEST)
    made = []
    for number in range(settings.shapes):
        own, arm = divmod(number, len(names))
        sizes = _Sizes.of(spread[arm][own], settings, rules)
        made.append(_shape(names[arm], sizes, rules, _Words(rng, vocab), arms[names[arm]]))
    return made


def _drawn(count: int, rng: np.random.Generator) -> list[list[float]]:
    """One row of draws per shape; every column is 0, 1 and what is evenly between, in an order of its own."""
    from scipy.stats import qmc  # half a second that only a calibration needs

    centres = qmc.LatinHypercube(len(_LARGEST), scramble=False, rng=rng).random(count)
    ends = centres if count == 1 else (centres * count - 0.5) / (count - 1)
    drawn: list[list[float]] = ends.round(9).tolist()  # 1 is 1, so that the longest is no token too short
    return drawn


@dataclass(frozen=True)
class _Sizes:
    """Of one shape: requests in a wave, their documents and question in tokens, the step's budget, most output."""

    seats: int
    documents: int
    document: int
    question: int
    budget: int
    outputs: int

    @staticmethod
    def of(draws: list[float], settings: Design, rules: BatchRules) -> _Sizes:
        """Sizes from numbers in [0, 1]."""
        longest, outputs = settings.longest, settings.outputs
        assert longest is not None and outputs is not None, "a design has limits before it is drawn"
        prompt = _between(draws[0], _SHORTEST, longest)
        seats = min(_between(draws[1], 1, rules.max_num_seqs), max(1, _MOST_LONGEST * longest // prompt))
        least = min(rules.max_num_batched_tokens, max(rules.max_num_seqs, seats * prompt // _STEPS))
        documents = _between(draws[3], 1, _MOST_DOCUMENTS)
        question = _between(draws[4], 1, prompt // 4)
        document = max(1, (prompt - _HEAD - question) // documents)
        budget = _between(draws[2], least, rules.max_num_batched_tokens)
        return _Sizes(seats, documents, document, question, budget, _between(draws[5], 1, outputs))


def _between(share: float, low: int, high: int) -> int:
    """A number from low to high, evenly by its logarithm."""
    number: float = low * (high / low) ** share
    return round(number)


class _Words:
    """Random tokens, all different texts."""

    def __init__(self, rng: np.random.Generator, vocab: int) -> None:
        self.rng, self._vocab = rng, vocab

    def span(self, length: int, document: bool = False) -> Span:
        """So many tokens; documents may stand anywhere, and their end is worth a state."""
        tokens = self.rng.integers(0, self._vocab, length, dtype=np.int32)
        return Span(tokens, independent=document, reusable=document)


def _shape(arm: str, sizes: _Sizes, rules: BatchRules, words: _Words, shuffled: bool) -> Shape:
    head = words.span(_HEAD)
    asked = [[words.span(sizes.document, True) for _ in range(sizes.documents)] for _ in range(sizes.seats)]
    orders: tuple[Callable[[int], np.ndarray], ...] = (np.arange, words.rng.permutation if shuffled else np.arange)
    requests = []
    for wave, order in enumerate(orders):
        for seat, documents in enumerate(asked):
            spans = (head, *(documents[at] for at in order(len(documents))), words.span(sizes.question))
            outputs = int(words.rng.integers(1, sizes.outputs + 1))
            at = wave * _WAVES_NS
            requests.append(Request(wave * sizes.seats + seat, seat, spans, output_len=outputs, arrived_at=at))
    return Shape(arm, replace(rules, max_num_batched_tokens=sizes.budget), tuple(requests))
