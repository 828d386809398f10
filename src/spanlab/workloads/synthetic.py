"""Synthetic prompts: groups of requests that share a prefix of chosen length."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from spanlab.core.admission import BatchRules
from spanlab.core.request import Request, Span
from spanlab.core.token_string import Tokens
from spanlab.kinds import check_fields, field
from spanlab.registry import not_negative, positive, share
from spanlab.workloads.files import LARGEST_TOKEN
from spanlab.workloads.load import WORKLOADS, Cut, Drawn, WithOutput, WithPreamble, WorkloadSettings
from spanlab.workloads.selection import Selection
from spanlab.workloads.workload import (
    Corpus,
    EncodedText,
    FreshIds,
    Labelled,
    Row,
    Workload,
    labelled_workload,
    workload,
)

Draw = Callable[["Synthetic", np.random.Generator, int], NDArray[np.float64]]

DISTRIBUTIONS: dict[str, Draw] = {
    "fixed": lambda options, draw, count: np.full(count, float(options.value)),
    "uniform": lambda options, draw, count: draw.uniform(options.low, options.high, count),
    "normal": lambda options, draw, count: draw.normal(options.mean, options.sd, count),
}


@dataclass
class Synthetic:
    """Groups of prompts with a shared prefix, the overlap; draws are clipped to the length of a
    prompt."""

    groups: int = field(48, positive, "groups of requests")
    requests_per_group: int = field(16, positive, "requests of each group")
    prompt_tokens: int = field(4096, positive, "length of every prompt")
    kind: str = field(
        "uniform", DISTRIBUTIONS, "distribution of the overlap: uniform, normal or fixed"
    )
    unit: str = field(
        "fraction", ("fraction", "tokens"), "unit of the overlap: fraction of the prompt, or tokens"
    )
    value: float = field(0.8, None, "the overlap; fixed only")
    low: float = field(0.5, None, "smallest overlap; uniform only")
    high: float = field(0.95, None, "largest overlap; uniform only")
    mean: float = field(0.8, None, "mean overlap; normal only")
    sd: float = field(0.1, not_negative, "standard deviation of the overlap; normal only")
    seed: int = field(0, not_negative, "seed of the draws")

    def __post_init__(self) -> None:
        check_fields(self, "workload.synthetic")
        for key in ("value", "low", "high", "mean"):
            if self.unit == "fraction":
                share(f"workload.synthetic.{key}", getattr(self, key))
        if self.low > self.high:
            raise ValueError(
                f"workload.synthetic.low={self.low}; expected at most workload.synthetic.high={self.high}"
            )


@dataclass
@WORKLOADS.register("synthetic")
class SyntheticWorkload(Drawn, WithPreamble, Cut):
    """Groups of prompts with a drawn overlap."""

    output_tokens: int | None = field(32, positive, "output tokens per request")
    synthetic: Synthetic = field(Synthetic, None, "number, length and overlap of the prompts")


@workload("synthetic", "modelled")
def modelled_synthetic(synthetic: Synthetic) -> Corpus:
    """Make the prompts: the first `overlap` tokens of the group's base, then ids that occur nowhere
    else."""
    options = synthetic
    # draw the shared tokens of each request, shape (groups, requests_per_group)
    draw = np.random.default_rng(options.seed)
    drawn = DISTRIBUTIONS[options.kind](options, draw, options.groups * options.requests_per_group)
    scale = options.prompt_tokens if options.unit == "fraction" else 1
    tokens = np.clip(np.rint(drawn * scale), 0, options.prompt_tokens).astype(np.int64)
    overlaps = tokens.reshape(options.groups, options.requests_per_group)
    total = options.groups * options.prompt_tokens + int((options.prompt_tokens - overlaps).sum())
    if total > LARGEST_TOKEN:
        raise ValueError(
            f"workload.synthetic.prompt_tokens={options.prompt_tokens} needs {total} ids; expected fewer than 2^31"
        )
    ids = FreshIds()
    spans: list[tuple[Tokens, bool]] = []  # with their reusable flag
    rows = []
    for group, shared in enumerate(overlaps):
        base = ids.take(options.prompt_tokens)
        for overlap in shared.tolist():
            begin, fresh = base[:overlap], ids.take(options.prompt_tokens - overlap)
            # a known boundary only if all requests share the same length
            if options.kind == "fixed":
                both = ((begin, True), (fresh, False))
                parts = [(tokens, reusable) for tokens, reusable in both if len(tokens)]
            else:
                parts = [(np.concatenate([begin, fresh]), False)]
            rows.append(Row(group, tuple(range(len(spans), len(spans) + len(parts)))))
            spans += parts
    reusable = np.array([is_base for _, is_base in spans], dtype=bool)
    text = EncodedText(
        tuple(tokens for tokens, _ in spans), np.zeros_like(reusable), reusable, tuple(rows)
    )
    detail = (
        f"{{documents}} groups, {{requests}} prompts of {options.prompt_tokens} tokens, {options.kind} overlap "
        f"of {overlaps.min()} to {overlaps.max()} tokens, seed {options.seed}"
    )
    return text.corpus("synthetic", "modelled", detail)


# ------------------------------------------------------------------------------
# Repeated documents: prompts with the same documents in the same order, which prefix caches
# reuse, or shuffled.
# ------------------------------------------------------------------------------

ORDERS = ("same", "shuffled")


@dataclass
class RepeatedDocuments:
    """A cold request over fresh documents, then warm requests over the same documents."""

    documents: int = field(4, positive, "documents of a prompt")
    document_tokens: int = field(500, positive, "tokens of each document")
    system_tokens: int = field(9, positive, "tokens of the system prompt")
    question_tokens: int = field(
        64, positive, "tokens of the question, which is fresh in every request"
    )
    repeats: int = field(5, positive, "warm requests after each cold one")
    trials: int = field(3, positive, "number of sets of fresh documents")
    orders: list[str] = field(
        list(ORDERS),
        ORDERS,
        "orders of the documents in warm requests: same, shuffled; each has its own cold request",
    )
    prepare: bool = field(False, None, "every document is computed alone before the cold request")
    seed: int = field(0, not_negative, "seed of the shuffled orders")

    def __post_init__(self) -> None:
        check_fields(self, "workload.repeated_documents")


@dataclass
@WORKLOADS.register("repeated_documents")
class RepeatedDocumentsWorkload(Drawn, WithOutput):
    """Repeated questions about the same documents, in the same order and shuffled."""

    output_tokens: int | None = field(1, positive, "output tokens per request")
    repeated_documents: RepeatedDocuments = field(
        RepeatedDocuments, None, "number, lengths and orders of the documents"
    )


@workload("repeated_documents")
def modelled_repeated_documents(
    repeated_documents: RepeatedDocuments, selection: Selection
) -> Workload:
    """Return the requests with the selected output length."""
    return requests_of_repeated_documents(repeated_documents, selection.output_tokens or 1)


def requests_of_repeated_documents(options: RepeatedDocuments, output_tokens: int) -> Workload:
    """Return the requests by trial and order; each trial and order has its own cache salt, so cold
    requests are cold.

    Labels: `order` of warm requests, `kind` (prepare, cold or warm).
    """
    ids, count = FreshIds(), options.documents
    requests = []
    for trial in range(options.trials):
        # all orders of a trial have the same documents and questions
        rng = np.random.default_rng([options.seed, trial])
        system = Span(ids.take(options.system_tokens))
        documents = [
            Span(ids.take(options.document_tokens), independent=True) for _ in range(count)
        ]
        questions = [Span(ids.take(options.question_tokens)) for _ in range(options.repeats + 1)]
        shuffles = [rng.permutation(count).tolist() for _ in range(options.repeats)]
        original = list(range(count))
        for index, order in enumerate(options.orders):
            group = trial * len(options.orders) + index
            prompts = [(system, document) for document in documents] if options.prepare else []
            kinds = ["prepare"] * len(prompts) + ["cold"] + ["warm"] * options.repeats
            warm = shuffles if order == "shuffled" else [original] * options.repeats
            for numbers, question in zip([original, *warm], questions, strict=True):
                prompts.append((system, *(documents[number] for number in numbers), question))
            for kind, spans in zip(kinds, prompts, strict=True):
                length = 1 if kind == "prepare" else output_tokens
                salt = f"{order} {trial}"
                request = Request(0, group, spans, output_len=length, cache_salt=salt)
                labels = {"kind": kind, "order": order if kind == "warm" else ""}
                requests.append(Labelled(request, labels))
    prompt = (
        options.system_tokens
        + options.documents * options.document_tokens
        + options.question_tokens
    )
    detail = (
        f"{options.documents} documents of {options.document_tokens:,} tokens, prompts of {prompt:,}; "
        f"{options.trials} trials of 1 cold and {options.repeats} warm requests, orders: {', '.join(options.orders)}"
    )
    return labelled_workload("repeated documents", detail, requests)


# ------------------------------------------------------------------------------
# One long sequence, then prompts that share prefixes of known depths with it.
# ------------------------------------------------------------------------------


@dataclass
class ForkedSequence:
    """A cold request, then requests of the same length that fork from it."""

    prompt_tokens: int = field(4096, positive, "tokens of every prompt")
    depths: list[float] = field(
        [0.5, 0.95], None, "shared prefixes with the cold request, as fractions of the prompt"
    )
    visits: int = field(
        2,
        positive,
        "requests at each depth: a policy may place a state at the first and use it at the second",
    )
    families: int = field(
        3,
        positive,
        "number of fresh sequences; a policy that learns has seen the depths from the second one on",
    )

    def __post_init__(self) -> None:
        check_fields(self, "workload.forked_sequence")
        shared = self.shared()
        if (
            not shared
            or shared[0] < 1
            or shared[-1] >= self.prompt_tokens
            or len(set(shared)) < len(shared)
        ):
            raise ValueError(
                f"workload.forked_sequence.depths={self.depths} with prompt_tokens={self.prompt_tokens}: "
                "expected different shares above 0 and below 1, a token apart"
            )

    def shared(self) -> list[int]:
        """Return the lengths of the shared prefixes in tokens, increasing."""
        return sorted(round(depth * self.prompt_tokens) for depth in self.depths)


@dataclass
@WORKLOADS.register("forked_sequence")
class ForkedSequenceWorkload(Drawn, WithOutput):
    """One long sequence, then prompts that share its beginning up to known depths."""

    output_tokens: int | None = field(1, positive, "output tokens per request")
    forked_sequence: ForkedSequence = field(
        ForkedSequence, None, "length and depths of the prompts"
    )


@workload("forked_sequence")
def modelled_forked_sequence(forked_sequence: ForkedSequence, selection: Selection) -> Workload:
    """Return the requests with the selected output length."""
    return requests_of_forked_sequence(forked_sequence, selection.output_tokens or 1)


def requests_of_forked_sequence(options: ForkedSequence, output_tokens: int) -> Workload:
    """Return the requests of each family: the cold one, then every visit at every depth, shallow to
    deep.

    The depths are marked as boundaries. Labels: `kind` (cold or fork), `depth` and `visit` of a
    fork.
    """
    ids, shared = FreshIds(), options.shared()
    # a prompt has the trunk's spans up to its depth, then fresh tokens; the cold one the whole trunk
    prompts = [(len(shared), {"kind": "cold", "depth": "", "visit": ""})]
    for visit in range(options.visits):
        for index, depth in enumerate(sorted(options.depths)):
            labels = {
                "kind": "fork",
                "depth": f"{100 * depth:g} % shared",
                "visit": f"visit {visit + 1}",
            }
            prompts.append((index + 1, labels))
    requests = []
    for family in range(options.families):
        trunk = [
            Span(ids.take(stop - start), reusable=True)
            for start, stop in zip([0, *shared[:-1]], shared, strict=True)
        ]
        for spans, labels in prompts:
            tail = Span(ids.take(options.prompt_tokens - shared[spans - 1]))
            request = Request(0, family, (*trunk[:spans], tail), output_len=output_tokens)
            requests.append(Labelled(request, labels))
    shares = ", ".join(f"{100 * depth:g} %" for depth in sorted(options.depths))
    detail = (
        f"sequences of {options.prompt_tokens:,} tokens, then prompts that share {shares} of them, "
        f"{options.visits} visits each; {options.families} families"
    )
    return labelled_workload("forked sequence", detail, requests)


# ------------------------------------------------------------------------------
# Calibration runs: few requests at a time, over all prompt lengths, batch sizes and shares of
# reuse of a study.
# ------------------------------------------------------------------------------

_SHORTEST = 16  # prompt tokens
_MOST_DOCUMENTS = 6
_MOST_LONGEST = 4  # most tokens of a wave, in prompts of the largest length
_LARGEST = (1.0, 1.0, 1.0, 0.0, 0.5, 1.0)  # draws of the largest shape, which has one document
_HEAD = 8  # tokens of the common prefix of all prompts
_WAVES_NS = 3_600 * 10**9  # between waves: idle time, which virtual time skips
_STEPS = 8  # most steps per wave, which bounds the token budget from below, so that no shape outweighs the others


@dataclass
@WORKLOADS.register("designed_shapes")
class DesignedShapes(WorkloadSettings):
    """Small runs of all lengths, batch sizes and shares of reuse, for calibration."""


@workload("designed_shapes")
def modelled_designed_shapes() -> Workload:
    """Raise ValueError: shapes depend on the arms and the batch of a study, which designs them."""
    raise ValueError(
        "workload.kind=designed_shapes: expected a study, which designs the shapes for its arms"
    )


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


def design(
    settings: Design, arms: Mapping[str, bool], rules: BatchRules, vocab: int
) -> list[Shape]:
    """Return shapes that alternate between arms; each arm's sizes form a Latin hypercube over
    logarithms of sizes.

    The first shape is the largest. Draws are numbers in the closed interval [0, 1].
    `arms`  maps each name to whether the arm reuses documents at any position; other arms get them
            in the same order
    """
    names = list(arms)
    rng = np.random.default_rng(settings.seed)
    draws = [_latin_hypercube(-(-settings.shapes // len(arms)), rng) for _ in names]
    draws[0][0] = list(_LARGEST)
    designed = []
    for number in range(settings.shapes):
        index, arm = divmod(number, len(names))
        sizes = _Sizes.of(draws[arm][index], settings, rules)
        designed.append(
            _shape(names[arm], sizes, rules, _RandomSpans(rng, vocab), arms[names[arm]])
        )
    return designed


def _latin_hypercube(count: int, rng: np.random.Generator) -> list[list[float]]:
    """Return one row of draws per shape; each column is a random permutation of evenly spaced
    numbers from 0 to 1."""
    from scipy.stats import qmc  # importing takes half a second, and only a calibration needs it

    centres = qmc.LatinHypercube(len(_LARGEST), scramble=False, rng=rng).random(count)
    ends = centres if count == 1 else (centres * count - 0.5) / (count - 1)
    # 1 is exact, so the longest prompt has its full length
    drawn: list[list[float]] = ends.round(9).tolist()
    return drawn


@dataclass(frozen=True)
class _Sizes:
    """Sizes of one shape: requests per wave, documents, tokens of document and question, step
    budget, most output."""

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
        requests_per_wave = min(
            _between(draws[1], 1, rules.max_num_seqs), max(1, _MOST_LONGEST * longest // prompt)
        )
        least = min(
            rules.max_num_batched_tokens,
            max(rules.max_num_seqs, requests_per_wave * prompt // _STEPS),
        )
        documents = _between(draws[3], 1, _MOST_DOCUMENTS)
        question = _between(draws[4], 1, prompt // 4)
        document = max(1, (prompt - _HEAD - question) // documents)
        budget = _between(draws[2], least, rules.max_num_batched_tokens)
        return _Sizes(
            requests_per_wave, documents, document, question, budget, _between(draws[5], 1, outputs)
        )


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


def _shape(
    arm: str, sizes: _Sizes, rules: BatchRules, random_spans: _RandomSpans, shuffled: bool
) -> Shape:
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
            spans = (
                head,
                *(documents[index] for index in order(len(documents))),
                random_spans.span(sizes.question),
            )
            outputs = int(random_spans.rng.integers(1, sizes.outputs + 1))
            arrived_at = wave * _WAVES_NS
            requests.append(
                Request(
                    wave * sizes.requests_per_wave + group,
                    group,
                    spans,
                    output_len=outputs,
                    arrived_at=arrived_at,
                )
            )
    return Shape(arm, replace(rules, max_num_batched_tokens=sizes.budget), tuple(requests))
