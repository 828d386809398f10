"""Calibration runs: few requests at a time, over all prompt lengths, batch sizes and shares of reuse of a study."""

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
_MOST_LONGEST = 4  # most tokens of a wave, in prompts of the largest length
_LARGEST = (1.0, 1.0, 1.0, 0.0, 0.5, 1.0)  # draws of the largest shape, which has one document
_HEAD = 8  # tokens of the common prefix of all prompts
_WAVES_NS = 3_600 * 10**9  # between waves: idle time, which virtual time skips
_STEPS = 8  # most steps per wave, which bounds the token budget from below, so that no shape outweighs the others


@workload("designed_shapes")
def modelled() -> Workload:
    """Raise ValueError: shapes depend on the arms and the batch of a study, which designs them."""
    raise ValueError("workload.kind=designed_shapes: expected a study, which designs the shapes for its arms")


class Design(Protocol):
    """Number of shapes, largest prompt and output in tokens, and seed of all draws."""

    shapes: int
    longest: int | None
    outputs: int | None
    seed: int


@dataclass(frozen=True)
class Shape:
    """One run of two waves of requests; the second wave has the documents of the first.

    `rules`  batch rules of the study with the token budget of this run
    """

    arm: str
    rules: BatchRules
    requests: tuple[Request, ...]


def design(settings: Design, arms: Mapping[str, bool], rules: BatchRules, vocab: int) -> list[Shape]:
    """Return shapes that alternate between arms; each arm's sizes form a Latin hypercube over logarithms of sizes.

    The first shape is the largest. Draws are numbers in the closed interval [0, 1].
    `arms`  maps each name to whether the arm reuses documents at any position; other arms get them in the same order
    """
    names = list(arms)
    rng = np.random.default_rng(settings.seed)
    draws = [_latin_hypercube(-(-settings.shapes // len(arms)), rng) for _ in names]
    draws[0][0] = list(_LARGEST)
    designed = []
    for number in range(settings.shapes):
        index, arm = divmod(number, len(names))
        sizes = _Sizes.of(draws[arm][index], settings, rules)
        designed.append(_shape(names[arm], sizes, rules, _RandomSpans(rng, vocab), arms[names[arm]]))
    return designed


def _latin_hypercube(count: int, rng: np.random.Generator) -> list[list[float]]:
    """Return one row of draws per shape; each column is a random permutation of evenly spaced numbers from 0 to 1."""
    from scipy.stats import qmc  # importing takes half a second, and only a calibration needs it

    centres = qmc.LatinHypercube(len(_LARGEST), scramble=False, rng=rng).random(count)
    ends = centres if count == 1 else (centres * count - 0.5) / (count - 1)
    drawn: list[list[float]] = ends.round(9).tolist()  # 1 is exact, so the longest prompt has its full length
    return drawn


@dataclass(frozen=True)
class _Sizes:
    """Sizes of one shape: requests per wave, documents, tokens of document and question, step budget, most output."""

    requests_per_wave: int
    documents: int
    document: int
    question: int
    budget: int
    outputs: int

    @staticmethod
    def of(draws: list[float], settings: Design, rules: BatchRules) -> _Sizes:
        """Return the sizes for six draws in [0, 1]."""
        longest, outputs = settings.longest, settings.outputs
        assert longest is not None and outputs is not None, "a design has limits before it is drawn"
        prompt = _between(draws[0], _SHORTEST, longest)
        requests_per_wave = min(_between(draws[1], 1, rules.max_num_seqs), max(1, _MOST_LONGEST * longest // prompt))
        least = min(rules.max_num_batched_tokens, max(rules.max_num_seqs, requests_per_wave * prompt // _STEPS))
        documents = _between(draws[3], 1, _MOST_DOCUMENTS)
        question = _between(draws[4], 1, prompt // 4)
        document = max(1, (prompt - _HEAD - question) // documents)
        budget = _between(draws[2], least, rules.max_num_batched_tokens)
        return _Sizes(requests_per_wave, documents, document, question, budget, _between(draws[5], 1, outputs))


def _between(share: float, low: int, high: int) -> int:
    """Interpolate between `low` and `high` on a logarithmic scale."""
    number: float = low * (high / low) ** share
    return round(number)


class _RandomSpans:
    """Source of spans of random token ids."""

    def __init__(self, rng: np.random.Generator, vocab: int) -> None:
        self.rng, self._vocab = rng, vocab

    def span(self, length: int, document: bool = False) -> Span:
        """Return a span of `length` tokens; documents are independent and reusable."""
        tokens = self.rng.integers(0, self._vocab, length, dtype=np.int32)
        return Span(tokens, independent=document, reusable=document)


def _shape(arm: str, sizes: _Sizes, rules: BatchRules, random_spans: _RandomSpans, shuffled: bool) -> Shape:
    head = random_spans.span(_HEAD)
    prompts = [
        [random_spans.span(sizes.document, True) for _ in range(sizes.documents)]
        for _ in range(sizes.requests_per_wave)
    ]
    orders: tuple[Callable[[int], np.ndarray], ...] = (
        np.arange,
        random_spans.rng.permutation if shuffled else np.arange,
    )
    requests = []
    for wave, order in enumerate(orders):
        for group, documents in enumerate(prompts):
            spans = (head, *(documents[index] for index in order(len(documents))), random_spans.span(sizes.question))
            outputs = int(random_spans.rng.integers(1, sizes.outputs + 1))
            arrived_at = wave * _WAVES_NS
            requests.append(
                Request(wave * sizes.requests_per_wave + group, group, spans, output_len=outputs, arrived_at=arrived_at)
            )
    return Shape(arm, replace(rules, max_num_batched_tokens=sizes.budget), tuple(requests))
