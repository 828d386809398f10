"""Retrieval-augmented generation: modelled retrieval over measured passage lengths (or over local text).

Passages, questions and their lengths are those of real articles; who asks for what is modelled. A document has a Zipf
popularity, and so has a passage within its document; ranks are dealt at random by the seed. A question about a document
gets k different passages, most of them from that document and some (`noise`) from the whole corpus. What a question
gets is drawn once, so asking it again finds the same passages; only their order may differ from request to request.
The gold answer may therefore stand in no passage that was found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from spanlab.checks import one_of
from spanlab.core.request import Tokens
from spanlab.workloads import passages
from spanlab.workloads.corpus import Corpus, Expand, Row
from spanlab.workloads.novelty import with_novel
from spanlab.workloads.retrieval import ORDERS, Ints, Popularity, popularity, retrieve
from spanlab.workloads.selection import Selection, check_documents, refuse_cut, select
from spanlab.workloads.shape import committed
from spanlab.workloads.source import workload
from spanlab.workloads.workload import Workload

# Steeper shares would vanish in floating point, and with them the passages.
STEEPEST = 20


@dataclass
class Rag:
    """A modelled retriever: `k` passages for each question, documents and passages by Zipf popularity.

    `k`              passages per question
    `requests`       requests to draw by popularity; null: every question once
    `zipf`           exponent of the documents' popularity; it moves the noise too
    `passage_zipf`   exponent of the passages' popularity within a document
    `noise`          share of passages that come from anywhere in the corpus
    `order`          of passages in a prompt: shuffled anew for each, ranked (first drawn first), or fixed (as in the
                     corpus)
    `system_tokens`  length of the system prompt; null: as it is
    `passage_tokens` length of every passage, for measured shapes; null: as they are
    `seed`           of the draws
    `novel`          further requests for k passages that no other request gets, of the lengths of another one's
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
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"workload.rag.{key}={value}; expected a whole number from 1 up")
        for key in ("zipf", "passage_zipf"):
            if not 0 <= getattr(self, key) <= STEEPEST:
                raise ValueError(f"workload.rag.{key}={getattr(self, key)}; expected an exponent from 0 to {STEEPEST}")
        if not 0 <= self.noise <= 1:
            raise ValueError(f"workload.rag.noise={self.noise}; expected a share from 0 to 1")
        one_of("workload.rag.order", self.order, ORDERS)
        for key in ("seed", "novel"):
            if getattr(self, key) < 0:
                raise ValueError(f"workload.rag.{key}={getattr(self, key)}; expected a number from 0 up")


@dataclass(frozen=True, slots=True, eq=False)
class Library:
    """Selected documents: span numbers of their passages, and their questions as rows of the source."""

    passages: tuple[tuple[int, ...], ...]
    questions: tuple[tuple[Row, ...], ...]

    @property
    def sizes(self) -> list[int]:
        """Passages of each document."""
        return [len(passages) for passages in self.passages]


@workload("rag", "shape")
def measured(rag: Rag, selection: Selection, path: Path | None = None) -> Workload:
    """Retrieval over measured passage lengths: the committed ones, those at `path`, or one length for all."""
    source = committed("rag", path).corpus()
    return drawn(source if rag.passage_tokens is None else of_length(source, rag.passage_tokens), selection, rag)


@workload("rag", "local")
def local(
    path: Path, rag: Rag, selection: Selection, tokenizer: str | Path | None = None, cache_dir: Path | None = None
) -> Workload:
    """Retrieval over the passages of QuALITY articles."""
    if rag.passage_tokens is not None:
        given = f"workload.rag.passage_tokens={rag.passage_tokens} with workload.source=local"
        raise ValueError(f"{given}: expected null, for text has its own length, or source=shape")
    return drawn(passages.local(path, tokenizer, cache_dir), selection, rag)


def of_length(source: Corpus, length: int) -> Corpus:
    """The same passages, each cut or repeated to `length` tokens."""
    changed = source.independent

    def expand(wanted: Mapping[int, int]) -> dict[int, Tokens]:
        own = {span: int(source.lengths[span]) if changed[span] else size for span, size in wanted.items()}
        made = source.expand(own)
        return {
            span: stretched(made[span], length)[:size] if changed[span] else made[span] for span, size in wanted.items()
        }

    return replace(
        source,
        detail=f"{source.detail}; each passage cut or repeated to {length} tokens",
        lengths=np.where(changed, length, source.lengths),
        expand=expand,
    )


def drawn(source: Corpus, selection: Selection, rag: Rag) -> Workload:
    """Requests over the selected documents: retrieval draws from those only, so they are selected before it."""
    refuse_cut("rag", selection, "workload.rag.k to set the length")
    whole = replace(selection, documents=None, questions_per_document=None)
    known = select(drawn_requests(source, selection, rag), whole)
    return with_novel(known, rag.novel, np.random.default_rng([rag.seed, 4]))


def drawn_requests(source: Corpus, selection: Selection, options: Rag) -> Corpus:
    """Requests with k passages each, drawn from the documents and questions that `selection` takes of `source`."""
    library = _library(source, selection)
    _check_k(library, options)
    # One stream for each kind of draw, so that more requests or another order change nothing else.
    streams = [np.random.default_rng([options.seed, i]) for i in range(4)]
    shares = popularity(library.sizes, options.zipf, options.passage_zipf, streams[0])
    found = _found(library, shares, options, streams[1])
    asked = _asked(library, shares, options, streams[2])
    ordered = [ORDERS[options.order](found[document][question], streams[3]) for document, question in asked]
    return _prompts(source, library, options, asked, ordered)


def _library(source: Corpus, selection: Selection) -> Library:
    """A row of the source is (system prompt, turn, passages of its document…, question)."""
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
    """Without noise a question finds only its own document; with nothing but noise, or some, everything."""
    sizes = library.sizes
    most, where = (sum(sizes), "the corpus") if options.noise else (min(sizes), "its shortest document, as noise=0")
    if options.k > most:
        raise ValueError(f"workload.rag.k={options.k}; expected at most {most}, the passages of {where}")


def _found(library: Library, shares: Popularity, options: Rag, draw: np.random.Generator) -> list[list[Ints]]:
    """For each question of each document, its passages as ranked; numbers count the library's passages end to end."""
    found = []
    for document, questions in enumerate(library.questions):
        weights = shares.weights(document, options.noise)
        found.append([retrieve(weights, options.k, draw) for _ in questions])
    return found


def _asked(library: Library, shares: Popularity, options: Rag, draw: np.random.Generator) -> list[tuple[int, int]]:
    """(document, question) of each request: every question once, or documents by popularity and questions uniformly."""
    if options.requests is None:
        return [(d, q) for d, questions in enumerate(library.questions) for q in range(len(questions))]
    # One row of numbers a request, so that the first n requests are the same whatever n is.
    places = draw.random((options.requests, 2))
    # Sums of shares end a rounding error away from 1: the last document takes what lies beyond.
    documents = np.searchsorted(np.cumsum(shares.documents)[:-1], places[:, 0], side="right").tolist()
    return [(d, int(place * len(library.questions[d]))) for d, place in zip(documents, places[:, 1], strict=True)]


def _prompts(
    source: Corpus, library: Library, options: Rag, asked: Sequence[tuple[int, int]], ordered: Sequence[Ints]
) -> Corpus:
    """The source with one more span, the head, and rows of (head, passages in order, question)."""
    system, turn = library.questions[0][0].spans[:2]
    length = _head_tokens(source, system, turn, options)
    head = len(source.lengths)
    passages = np.array([span for spans in library.passages for span in spans], dtype=np.int64)
    rows = []
    for (document, number), found in zip(asked, ordered, strict=True):
        question = library.questions[document][number]
        rows.append(question._replace(spans=(head, *passages[found].tolist(), question.spans[-1])))
    return replace(
        source,
        kind="modelled",
        detail=_detail(source, library, options),
        lengths=np.append(source.lengths, length),
        independent=np.append(source.independent, False),
        reusable=np.append(source.reusable, True),
        rows=rows,
        expand=_with_head(source, (system, turn), head, length),
    )


def _head_tokens(source: Corpus, system: int, turn: int, options: Rag) -> int:
    own, least = int(source.lengths[[system, turn]].sum()), int(source.lengths[turn]) + 1
    if options.system_tokens is None:
        return own
    if options.system_tokens < least:
        raise ValueError(
            f"workload.rag.system_tokens={options.system_tokens}; expected at least {least}, of which {least - 1} "
            f"open the user's turn"
        )
    return options.system_tokens


def _with_head(source: Corpus, parts: tuple[int, int], head: int, length: int) -> Expand:
    """Add the head to what can be expanded: the system prompt, said over until it is long enough, and the turn."""
    sizes = {part: int(source.lengths[part]) for part in parts}

    def expand(wanted: Mapping[int, int]) -> dict[int, Tokens]:
        made = source.expand({span: size for span, size in wanted.items() if span != head} | sizes)
        system, turn = (made[part] for part in parts)
        whole = np.concatenate([stretched(system, length - len(turn)), turn])
        return {span: whole[:size] if span == head else made[span] for span, size in wanted.items()}

    return expand


def stretched(tokens: Tokens, length: int) -> Tokens:
    """Make `tokens` `length` long by cutting or repeating all but the first, which may open a turn."""
    return np.concatenate([tokens[:1], np.resize(tokens[1:], length - 1)]).astype(np.int32)


def _detail(source: Corpus, library: Library, options: Rag) -> str:
    over = "measured passage lengths" if source.kind == "measured shape" else source.kind
    questions = sum(map(len, library.questions))
    return (
        f"retrieval over {over}: {{requests}} requests of {options.k} passages in {options.order} order, document Zipf "
        f"{options.zipf:g}, passage Zipf {options.passage_zipf:g}, noise {options.noise:g}, seed {options.seed}; "
        f"{sum(library.sizes)} passages and {questions} questions of {len(library.passages)} {source.detail}"
    )
