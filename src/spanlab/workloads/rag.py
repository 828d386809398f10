"""Retrieval-augmented generation: modelled retrieval over measured passage lengths (or over local
text).

Passages, questions and their lengths are those of real articles; the retrieval is modelled. A
document has a Zipf popularity, and so has a passage within its document; the seed assigns ranks at
random. A question about a document gets k different passages, most of them from that document and
some (`noise`) from the whole corpus. The passages of a question are drawn once, so a repeated
question gets the same passages; only their order may differ between requests. The retrieved
passages therefore need not contain the gold answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spanlab.core.token_string import Tokens, array_of
from spanlab.kinds import check_fields, field
from spanlab.registry import not_negative, positive, share
from spanlab.workloads.files import read_jsonl
from spanlab.workloads.load import WORKLOADS, OfFile, OfTextFile, Selected, WithPreamble
from spanlab.workloads.ragpulse import RagPulse
from spanlab.workloads.reading import KEY, QUALITY_EXPECTED, articles
from spanlab.workloads.selection import Selection, check_documents, select, with_novel
from spanlab.workloads.shape import committed
from spanlab.workloads.text import (
    RAG,
    Document,
    PassagesLayout,
    Question,
    TokenizerFile,
    cache_key,
    check_not_empty,
    encode_texts,
    find_tokenizer,
    join_parts,
    load_or_build,
    option_line,
    split_passages,
)
from spanlab.workloads.workload import Corpus, EncodedText, Expand, Row, Workload, workload

# ------------------------------------------------------------------------------
# Modelled retriever: the passages of a question and their order in the prompt.
# ------------------------------------------------------------------------------

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

ORDERS: dict[str, Callable[[Ints, np.random.Generator], Ints]] = {
    "shuffled": lambda ranked, draw: draw.permutation(ranked),
    "ranked": lambda ranked, draw: ranked,
    "fixed": lambda ranked, draw: np.sort(ranked),
}


@dataclass(frozen=True, slots=True, eq=False)
class Popularity:
    """Popularity of documents, and of passages within each document.

    `documents`    shape (documents,), sums to 1.
    `passages`     shape (passages,), sums to 1 within each document.
    `document_of`  int64, shape (passages,).
    """

    documents: Floats
    passages: Floats
    document_of: Ints

    def weights(self, document: int, noise: float) -> Floats:
        """Return the probability that each passage ranks first for a question about `document`,
        shape (passages,).

        The passage comes from the question's document with probability 1 − noise, else from the
        whole corpus; documents and passages within a document are drawn by popularity.
        """
        from_corpus = noise * self.documents[self.document_of]
        from_document = (1 - noise) * (self.document_of == document)
        shares: Floats = (from_corpus + from_document) * self.passages
        return shares


def zipf(count: int, exponent: float, draw: np.random.Generator) -> Floats:
    """Return shares proportional to rank^−exponent, summing to 1, with random ranks; shape
    (count,)."""
    shares = np.arange(1, count + 1, dtype=np.float64) ** -exponent
    return draw.permutation(shares / shares.sum())


def popularity(
    sizes: Sequence[int], documents: float, passages: float, draw: np.random.Generator
) -> Popularity:
    """Return Zipf shares with exponents `documents` and `passages`, for documents of `sizes`
    passages."""
    document_shares = zipf(len(sizes), documents, draw)
    passage_shares = [zipf(size, passages, draw) for size in sizes]
    return Popularity(
        document_shares, np.concatenate(passage_shares), np.repeat(np.arange(len(sizes)), sizes)
    )


def retrieve(weights: Floats, k: int, draw: np.random.Generator) -> Ints:
    """Draw k different passages, one after the other in proportion to `weights`; the first drawn
    ranks first.

    An exponential race draws all k at once: passage i arrives after Exp(1) / w_i, and the first k
    arrivals are drawn (Efraimidis and Spirakis 2006).
    """
    candidates = np.flatnonzero(weights)
    assert len(candidates) >= k, "at least k passages with a positive weight"
    times = draw.standard_exponential(len(candidates)) / weights[candidates]
    return candidates[np.argsort(times, kind="stable")[:k]]


# ------------------------------------------------------------------------------
# Articles split into passages, with their questions: the corpus of a modelled retriever.
# ------------------------------------------------------------------------------

NAME = "rag"
# A sentence with the white space after it; text after the last full stop counts as a sentence.


def local_passages(
    path: Path, tokenizer: str | Path | None = None, cache_dir: Path | None = None
) -> Corpus:
    """Read QuALITY articles as passages; a row is system prompt, all passages of an article, and a
    question.

    Retrieval draws from the rows; they are not served themselves.
    """
    rows = read_jsonl(path, KEY, QUALITY_EXPECTED)
    documents = []
    for document in articles(rows):
        # open questions, because a query to a search engine has no options
        questions = []
        for question in document.questions:
            options = enumerate(question.options)
            answers = [text for i, text in options if option_line(i, text) in question.answers]
            questions.append(Question(question.text, answers=tuple(answers)))
        documents.append(Document(document.body, tuple(questions)))
    check_not_empty(NAME, documents)
    tokenizer_file = find_tokenizer(tokenizer)
    key = cache_key(NAME, documents, RAG, tokenizer_file.sha256)
    text = load_or_build(cache_dir, key, lambda: encode_passages(documents, RAG, tokenizer_file))
    return text.corpus(
        NAME, "local text", f"QuALITY articles, {path.name}, {tokenizer_file.name} tokenizer"
    )


def encode_passages(
    documents: Sequence[Document], layout: PassagesLayout, tokenizer: TokenizerFile
) -> EncodedText:
    """Tokenise each span separately; a row's spans are system prompt, turn, the article's passages,
    question."""
    spans = [layout.system(tokenizer.marks), layout.turn(tokenizer.marks)]
    flags = [(False, True), (False, False)]
    drafts: list[tuple[int, tuple[int, ...], Question]] = []
    for group, document in enumerate(documents):
        assert isinstance(document.body, str), "only text can be split"
        passage_parts = [
            layout.passage(text) for text in split_passages(document.body, layout.passage_words)
        ]
        passages = range(len(spans), len(spans) + len(passage_parts))
        question_parts = [
            layout.question(question, tokenizer.marks) for question in document.questions
        ]
        drafts += [
            (group, (0, 1, *passages, passages.stop + i), q)
            for i, q in enumerate(document.questions)
        ]
        spans += passage_parts + question_parts
        flags += [(True, False)] * len(passage_parts) + [(False, False)] * len(question_parts)
    texts = {content for content in chain.from_iterable(spans) if isinstance(content, str)}
    texts |= {_first_answer(question) for _, _, question in drafts if question.answers}
    tokens = encode_texts(sorted(texts), tokenizer)
    rows = []
    for group, used, question in drafts:
        output_len = max(1, len(tokens[_first_answer(question)])) if question.answers else 0
        rows.append(Row(group, used, output_len, question.answer))
    return EncodedText(
        tuple(join_parts(parts, tokens) for parts in spans),
        np.array([independent for independent, _ in flags], dtype=bool),
        np.array([reusable for _, reusable in flags], dtype=bool),
        tuple(rows),
    )


def _first_answer(question: Question) -> str:
    return f" {question.answers[0]}"


# A larger exponent makes shares underflow to zero, so that their passages could not be drawn.
STEEPEST = 20


def _exponent(key: str, value: float) -> None:
    if not 0 <= value <= STEEPEST:
        raise ValueError(f"{key}={value}; expected an exponent from 0 to {STEEPEST}")


@dataclass
class Rag:
    """A modelled retriever: `k` passages for each question, documents and passages by Zipf
    popularity."""

    k: int = field(6, positive, "passages per question")
    requests: int | None = field(
        None, positive, "requests to draw by popularity; null: every question once"
    )
    zipf: float = field(
        1.0, _exponent, "exponent of the documents' popularity, also among noise passages"
    )
    passage_zipf: float = field(
        1.0, _exponent, "exponent of the passages' popularity within a document"
    )
    noise: float = field(0.2, share, "share of passages that are drawn from the whole corpus")
    order: str = field(
        "shuffled",
        ORDERS,
        "order of passages in a prompt: shuffled for each request, ranked (first drawn first), or fixed (as in the "
        "corpus)",
    )
    system_tokens: int | None = field(
        None, positive, "length of the system prompt; null: unchanged"
    )
    passage_tokens: int | None = field(
        None, positive, "length of every passage, for measured shapes; null: unchanged"
    )
    seed: int = field(0, not_negative, "seed of the draws")
    novel: int = field(
        0,
        not_negative,
        "additional requests with k passages that no other request has, as long as those of a drawn request",
    )

    def __post_init__(self) -> None:
        check_fields(self, "workload.rag")


@dataclass
@WORKLOADS.register("rag")
class RagWorkload(WithPreamble, Selected, OfTextFile):
    """Several passages a question by a modelled retriever, passages and questions cut from QuALITY
    articles."""

    rag: Rag = field(Rag, None, "the retriever")


@dataclass(frozen=True, slots=True, eq=False)
class Library:
    """Selected documents: the span numbers of their passages, and their questions as rows of the
    source."""

    passages: tuple[tuple[int, ...], ...]
    questions: tuple[tuple[Row, ...], ...]

    @property
    def sizes(self) -> list[int]:
        """Number of passages of each document."""
        return [len(passages) for passages in self.passages]


@workload("rag", "shape")
def measured(rag: Rag, selection: Selection, path: Path | None = None) -> Workload:
    """Return retrieval over passage lengths from the committed shape, the one at `path`, or one
    length for all."""
    source = committed("rag", path).corpus()
    return draw_workload(
        source if rag.passage_tokens is None else with_passage_length(source, rag.passage_tokens),
        selection,
        rag,
    )


@workload("rag", "local")
def local_rag(
    path: Path,
    rag: Rag,
    selection: Selection,
    tokenizer: str | Path | None = None,
    cache_dir: Path | None = None,
) -> Workload:
    """Return retrieval over the passages of QuALITY articles."""
    if rag.passage_tokens is not None:
        setting = f"workload.rag.passage_tokens={rag.passage_tokens} with workload.source=local"
        raise ValueError(
            f"{setting}: expected null, because text has its own length, or source=shape"
        )
    return draw_workload(local_passages(path, tokenizer, cache_dir), selection, rag)


def with_passage_length(source: Corpus, length: int) -> Corpus:
    """Return the corpus with each passage cut or repeated to `length` tokens."""
    is_passage = source.independent

    def expand(sizes: Mapping[int, int]) -> dict[int, Tokens]:
        source_lengths = {
            span: int(source.lengths[span]) if is_passage[span] else size
            for span, size in sizes.items()
        }
        tokens = {span: array_of(ids) for span, ids in source.expand(source_lengths).items()}
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
    """Return requests over the selected documents; selection comes first, because retrieval draws
    from them only."""
    remaining = replace(selection, documents=None, questions_per_document=None)
    drawn = select(draw_requests(source, selection, rag), remaining)
    return with_novel(drawn, rag.novel, np.random.default_rng([rag.seed, 4]))


def draw_requests(source: Corpus, selection: Selection, options: Rag) -> Corpus:
    """Return requests with k passages each, drawn from the selected documents and questions of
    `source`."""
    # a row is (system prompt, turn, passages of its document…, question)
    groups: dict[int, list[Row]] = {}
    for row in source.rows:
        groups.setdefault(row.group_id, []).append(row)
    check_documents(selection, len(groups), source.name)
    chosen = list(groups.values())[: selection.documents]
    library = Library(
        tuple(rows[0].spans[2:-1] for rows in chosen),
        tuple(tuple(rows[: selection.questions_per_document]) for rows in chosen),
    )
    sizes = library.sizes
    limit, scope = (
        (sum(sizes), "the corpus")
        if options.noise
        else (min(sizes), "its shortest document, as noise=0")
    )
    if options.k > limit:
        raise ValueError(
            f"workload.rag.k={options.k}; expected at most {limit}, the passages of {scope}"
        )
    # One random stream per kind of draw, so that the number of requests and the order do not affect
    # other draws.
    streams = [np.random.default_rng([options.seed, i]) for i in range(4)]
    shares = popularity(library.sizes, options.zipf, options.passage_zipf, streams[0])
    ranked = []
    for number, members in enumerate(library.questions):
        weights = shares.weights(number, options.noise)
        ranked.append([retrieve(weights, options.k, streams[1]) for _ in members])
    questions = _draw_questions(library, shares, options, streams[2])
    passages = [
        ORDERS[options.order](ranked[document][question], streams[3])
        for document, question in questions
    ]
    return _prompts(source, library, options, questions, passages)


def _draw_questions(
    library: Library, shares: Popularity, options: Rag, rng: np.random.Generator
) -> list[tuple[int, int]]:
    """Return (document, question) of each request: every question once, or drawn by popularity of
    documents."""
    if options.requests is None:
        return [
            (d, q) for d, questions in enumerate(library.questions) for q in range(len(questions))
        ]
    # One row of numbers per request, so that the first n requests do not depend on n.
    uniforms = rng.random((options.requests, 2))
    # Sums of shares end a rounding error away from 1: the last document gets the remainder.
    documents = np.searchsorted(
        np.cumsum(shares.documents)[:-1], uniforms[:, 0], side="right"
    ).tolist()
    return [
        (d, int(uniform * len(library.questions[d])))
        for d, uniform in zip(documents, uniforms[:, 1], strict=True)
    ]


def _prompts(
    source: Corpus,
    library: Library,
    options: Rag,
    requested: Sequence[tuple[int, int]],
    rankings: Sequence[Ints],
) -> Corpus:
    """Return the source with one more span, the head, and with rows of (head, passages in order,
    question)."""
    system, user_turn = library.questions[0][0].spans[:2]
    length, minimum = options.system_tokens, int(source.lengths[user_turn]) + 1
    if length is None:
        length = int(source.lengths[[system, user_turn]].sum())
    elif length < minimum:
        raise ValueError(
            f"workload.rag.system_tokens={length}; expected at least {minimum}, because "
            f"{minimum - 1} tokens open the user's turn"
        )
    head = len(source.lengths)
    passages = np.array([span for spans in library.passages for span in spans], dtype=np.int64)
    rows = []
    for (document, index), ranking in zip(requested, rankings, strict=True):
        question = library.questions[document][index]
        rows.append(
            question._replace(spans=(head, *passages[ranking].tolist(), question.spans[-1]))
        )
    basis = "measured passage lengths" if source.kind == "measured shape" else source.kind
    questions = sum(map(len, library.questions))
    detail = (
        f"retrieval over {basis}: {{requests}} requests of {options.k} passages in {options.order} "
        f"order, document Zipf {options.zipf:g}, passage Zipf {options.passage_zipf:g}, "
        f"noise {options.noise:g}, seed {options.seed}; {sum(library.sizes)} passages and "
        f"{questions} questions of {len(library.passages)} {source.detail}"
    )
    return replace(
        source,
        kind="modelled",
        detail=detail,
        lengths=np.append(source.lengths, length),
        independent=np.append(source.independent, False),
        reusable=np.append(source.reusable, True),
        rows=rows,
        expand=_with_head(source, (system, user_turn), head, length),
    )


def _with_head(source: Corpus, parts: tuple[int, int], head: int, length: int) -> Expand:
    """Extend `expand` by the head: the system prompt, repeated to its length, and the turn."""
    sizes = {number: int(source.lengths[number]) for number in parts}

    def expand(counts: Mapping[int, int]) -> dict[int, Tokens]:
        expanded = source.expand(
            {span: size for span, size in counts.items() if span != head} | sizes
        )
        tokens = {span: array_of(ids) for span, ids in expanded.items()}
        system, user_turn = (tokens[number] for number in parts)
        head_tokens = np.concatenate([fit_length(system, length - len(user_turn)), user_turn])
        return {
            span: head_tokens[:size] if span == head else tokens[span]
            for span, size in counts.items()
        }

    return expand


def fit_length(tokens: Tokens, length: int) -> Tokens:
    """Cut or repeat `tokens` to `length`; the first token is not repeated, because it may open a
    turn."""
    return np.concatenate([tokens[:1], np.resize(tokens[1:], length - 1)]).astype(np.int32)


# ------------------------------------------------------------------------------
# The recorded trace of an assistant that retrieves passages; `ragpulse.py` reads it.
# ------------------------------------------------------------------------------


@dataclass
@WORKLOADS.register("ragpulse")
class RagPulseWorkload(WithPreamble, Selected, OfFile):
    """Two recorded weeks of a RAG assistant, as content ids."""

    ragpulse: RagPulse = field(RagPulse, None, "the part of the trace, and its times")

    def pace(self) -> dict[str, float]:
        values = {
            "rate_rps": (self.ragpulse.rate_rps, None),
            "speedup": (self.ragpulse.speedup, 1.0),
        }
        return {
            f"workload.ragpulse.{key}": value
            for key, (value, unset) in values.items()
            if value is not None and value != unset
        }
