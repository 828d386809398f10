"""Retrieval-augmented generation: modelled retrieval over measured passage lengths (or over local text).

Passages, questions and their lengths are those of real articles; the retrieval is modelled. A document has a Zipf
popularity, and so has a passage within its document; the seed assigns ranks at random. A question about a document
gets k different passages, most of them from that document and some (`noise`) from the whole corpus. The passages of a
question are drawn once, so a repeated question gets the same passages; only their order may differ between requests.
The retrieved passages therefore need not contain the gold answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from spanlab.checks import not_negative, one_of, positive, share
from spanlab.core.request import Tokens
from spanlab.workloads import passages
from spanlab.workloads.corpus import Corpus, Expand, Row
from spanlab.workloads.novelty import with_novel
from spanlab.workloads.retrieval import ORDERS, Ints, Popularity, popularity, retrieve
from spanlab.workloads.selection import Selection, check_documents, refuse_length_limit, select
from spanlab.workloads.shape import committed
from spanlab.workloads.source import workload
from spanlab.workloads.workload import Workload

# A larger exponent makes shares underflow to zero, so that their passages could not be drawn.
STEEPEST = 20


@dataclass
class Rag:
    """A modelled retriever: `k` passages for each question, documents and passages by Zipf popularity.

    `k`              passages per question
    `requests`       requests to draw by popularity; null: every question once
    `zipf`           exponent of the documents' popularity, also among noise passages
    `passage_zipf`   exponent of the passages' popularity within a document
    `noise`          share of passages that are drawn from the whole corpus
    `order`          order of passages in a prompt: shuffled for each request, ranked (first drawn first), or fixed (as
                     in the corpus)
    `system_tokens`  length of the system prompt; null: unchanged
    `passage_tokens` length of every passage, for measured shapes; null: unchanged
    `seed`           seed of the draws
    `novel`          additional requests with k passages that no other request has, as long as those of a drawn request
    """

    k: int = 6
    requests: int | None = None
    zipf: float = 1.0
    passage_zipf: float = 1.0
    noise: float = 0.2
    order: str = "shuffled"
    system_tokens: int | None = None
    passage_tokens: int | None = None
    seed: int = 0
    novel: int = 0

    def __post_init__(self) -> None:
        for key in ("k", "requests", "system_tokens", "passage_tokens"):
            positive(f"workload.rag.{key}", getattr(self, key))
        for key in ("zipf", "passage_zipf"):
            if not 0 <= getattr(self, key) <= STEEPEST:
                raise ValueError(f"workload.rag.{key}={getattr(self, key)}; expected an exponent from 0 to {STEEPEST}")
        share("workload.rag.noise", self.noise)
        one_of("workload.rag.order", self.order, ORDERS)
        for key in ("seed", "novel"):
            not_negative(f"workload.rag.{key}", getattr(self, key))


@dataclass(frozen=True, slots=True, eq=False)
class Library:
    """Selected documents: the span numbers of their passages, and their questions as rows of the source."""

    passages: tuple[tuple[int, ...], ...]
    questions: tuple[tuple[Row, ...], ...]

    @property
    def sizes(self) -> list[int]:
        """Number of passages of each document."""
        return [len(passages) for passages in self.passages]


@workload("rag", "shape")
def measured(rag: Rag, selection: Selection, path: Path | None = None) -> Workload:
    """Return retrieval over passage lengths from the committed shape, the one at `path`, or one length for all."""
    source = committed("rag", path).corpus()
    return draw_workload(
        source if rag.passage_tokens is None else with_passage_length(source, rag.passage_tokens), selection, rag
    )


@workload("rag", "local")
def local(
    path: Path, rag: Rag, selection: Selection, tokenizer: str | Path | None = None, cache_dir: Path | None = None
) -> Workload:
    """Return retrieval over the passages of QuALITY articles."""
    if rag.passage_tokens is not None:
        setting = f"workload.rag.passage_tokens={rag.passage_tokens} with workload.source=local"
        raise ValueError(f"{setting}: expected null, because text has its own length, or source=shape")
    return draw_workload(passages.local(path, tokenizer, cache_dir), selection, rag)


def with_passage_length(source: Corpus, length: int) -> Corpus:
    """Return the corpus with each passage cut or repeated to `length` tokens."""
    is_passage = source.independent

    def expand(sizes: Mapping[int, int]) -> dict[int, Tokens]:
        source_lengths = {span: int(source.lengths[span]) if is_passage[span] else size for span, size in sizes.items()}
        tokens = source.expand(source_lengths)
        return {
            span: fit_length(tokens[span], length)[:size] if is_passage[span] else tokens[span]
            for span, size in sizes.items()
        }

    return replace(
        source,
        detail=f"{source.detail}; each passage cut or repeated to {length} tokens",
        lengths=np.where(is_passage, length, source.lengths),
        expand=expand,
    )


def draw_workload(source: Corpus, selection: Selection, rag: Rag) -> Workload:
    """Return requests over the selected documents; selection comes first, because retrieval draws from them only."""
    refuse_length_limit("rag", selection, "workload.rag.k to set the length")
    remaining = replace(selection, documents=None, questions_per_document=None)
    drawn = select(draw_requests(source, selection, rag), remaining)
    return with_novel(drawn, rag.novel, np.random.default_rng([rag.seed, 4]))


def draw_requests(source: Corpus, selection: Selection, options: Rag) -> Corpus:
    """Return requests with k passages each, drawn from the selected documents and questions of `source`."""
    library = _library(source, selection)
    _check_k(library, options)
    # One random stream per kind of draw, so that the number of requests and the order do not affect other draws.
    streams = [np.random.default_rng([options.seed, i]) for i in range(4)]
    shares = popularity(library.sizes, options.zipf, options.passage_zipf, streams[0])
    ranked = _ranked_passages(library, shares, options, streams[1])
    questions = _draw_questions(library, shares, options, streams[2])
    passages = [ORDERS[options.order](ranked[document][question], streams[3]) for document, question in questions]
    return _prompts(source, library, options, questions, passages)


def _library(source: Corpus, selection: Selection) -> Library:
    """Group the selected rows by document; a row is (system prompt, turn, passages of its document…, question)."""
    groups: dict[int, list[Row]] = {}
    for row in source.rows:
        groups.setdefault(row.group_id, []).append(row)
    check_documents(selection, len(groups), source.name)
    chosen = list(groups.values())[: selection.documents]
    return Library(
        tuple(rows[0].spans[2:-1] for rows in chosen),
        tuple(tuple(rows[: selection.questions_per_document]) for rows in chosen),
    )


def _check_k(library: Library, options: Rag) -> None:
    """Reject k above the passages that a question can get: those of its document, or with noise all."""
    sizes = library.sizes
    limit, scope = (sum(sizes), "the corpus") if options.noise else (min(sizes), "its shortest document, as noise=0")
    if options.k > limit:
        raise ValueError(f"workload.rag.k={options.k}; expected at most {limit}, the passages of {scope}")


def _ranked_passages(library: Library, shares: Popularity, options: Rag, rng: np.random.Generator) -> list[list[Ints]]:
    """Return ranked passages for each question of each document; numbers index all passages of the library."""
    ranked = []
    for document, questions in enumerate(library.questions):
        weights = shares.weights(document, options.noise)
        ranked.append([retrieve(weights, options.k, rng) for _ in questions])
    return ranked


def _draw_questions(
    library: Library, shares: Popularity, options: Rag, rng: np.random.Generator
) -> list[tuple[int, int]]:
    """Return (document, question) of each request: every question once, or drawn by popularity of documents."""
    if options.requests is None:
        return [(d, q) for d, questions in enumerate(library.questions) for q in range(len(questions))]
    # One row of numbers per request, so that the first n requests do not depend on n.
    uniforms = rng.random((options.requests, 2))
    # Sums of shares end a rounding error away from 1: the last document gets the remainder.
    documents = np.searchsorted(np.cumsum(shares.documents)[:-1], uniforms[:, 0], side="right").tolist()
    return [(d, int(uniform * len(library.questions[d]))) for d, uniform in zip(documents, uniforms[:, 1], strict=True)]


def _prompts(
    source: Corpus, library: Library, options: Rag, requested: Sequence[tuple[int, int]], rankings: Sequence[Ints]
) -> Corpus:
    """Return the source with one more span, the head, and with rows of (head, passages in order, question)."""
    system, user_turn = library.questions[0][0].spans[:2]
    length = _head_tokens(source, system, user_turn, options)
    head = len(source.lengths)
    passages = np.array([span for spans in library.passages for span in spans], dtype=np.int64)
    rows = []
    for (document, index), ranking in zip(requested, rankings, strict=True):
        question = library.questions[document][index]
        rows.append(question._replace(spans=(head, *passages[ranking].tolist(), question.spans[-1])))
    return replace(
        source,
        kind="modelled",
        detail=_detail(source, library, options),
        lengths=np.append(source.lengths, length),
        independent=np.append(source.independent, False),
        reusable=np.append(source.reusable, True),
        rows=rows,
        expand=_with_head(source, (system, user_turn), head, length),
    )


def _head_tokens(source: Corpus, system: int, user_turn: int, options: Rag) -> int:
    natural, minimum = int(source.lengths[[system, user_turn]].sum()), int(source.lengths[user_turn]) + 1
    if options.system_tokens is None:
        return natural
    if options.system_tokens < minimum:
        raise ValueError(
            f"workload.rag.system_tokens={options.system_tokens}; expected at least {minimum}, because "
            f"{minimum - 1} tokens open the user's turn"
        )
    return options.system_tokens


def _with_head(source: Corpus, parts: tuple[int, int], head: int, length: int) -> Expand:
    """Extend `expand` by the head: the system prompt, repeated to its length, and the turn."""
    sizes = {number: int(source.lengths[number]) for number in parts}

    def expand(counts: Mapping[int, int]) -> dict[int, Tokens]:
        tokens = source.expand({span: size for span, size in counts.items() if span != head} | sizes)
        system, user_turn = (tokens[number] for number in parts)
        head_tokens = np.concatenate([fit_length(system, length - len(user_turn)), user_turn])
        return {span: head_tokens[:size] if span == head else tokens[span] for span, size in counts.items()}

    return expand


def fit_length(tokens: Tokens, length: int) -> Tokens:
    """Cut or repeat `tokens` to `length`; the first token is not repeated, because it may open a turn."""
    return np.concatenate([tokens[:1], np.resize(tokens[1:], length - 1)]).astype(np.int32)


def _detail(source: Corpus, library: Library, options: Rag) -> str:
    basis = "measured passage lengths" if source.kind == "measured shape" else source.kind
    questions = sum(map(len, library.questions))
    return (
        f"retrieval over {basis}: {{requests}} requests of {options.k} passages in {options.order} order, "
        f"document Zipf {options.zipf:g}, passage Zipf {options.passage_zipf:g}, noise {options.noise:g}, "
        f"seed {options.seed}; "
        f"{sum(library.sizes)} passages and {questions} questions of {len(library.passages)} {source.detail}"
    )
