"""Workloads from text: prompts, tokenizers, encoding and the cache of tokenised text."""

from __future__ import annotations

import hashlib
import logging
import re
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import orjson

from spanlab.core.token_string import Tokens
from spanlab.model_files import installed_model, look_for_network
from spanlab.workloads.files import JsonRow, SourceUnavailable, write_atomically
from spanlab.workloads.workload import (
    Corpus,
    EncodedText,
    Joints,
    ProvenanceKind,
    Row,
    shared_length,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer


# ------------------------------------------------------------------------------
# Layouts of prompts as spans: instruction, document and question, each tokenised separately.
# ------------------------------------------------------------------------------

# Part of every cache key and of every shape: raise it when any text or order in this file changes.
LAYOUT_VERSION = 1

Part = str | Tokens


@dataclass(frozen=True, slots=True)
class Question:
    """One question of a document; `answers` are the gold references, which are never part of a
    prompt."""

    text: str
    options: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()

    @property
    def answer(self) -> str | None:
        """The gold references, one per line, or None if they are unknown."""
        return "\n".join(self.answers) if self.answers else None


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """A text, or its token ids if we may not store the text, and its questions."""

    body: Part
    questions: tuple[Question, ...]


@dataclass(frozen=True, slots=True, eq=False)
class TurnMarks:
    """Token ids, each of shape (1,), of the special tokens that open and close a turn."""

    open: Tokens
    close: Tokens


@dataclass(frozen=True, slots=True)
class ReadingLayout:
    """Instruction (ordered), document (independent, reusable), question: for reading
    comprehension."""

    instruction: str
    heading: str
    independent: bool = True

    def opening(self, marks: TurnMarks | None) -> list[Part]:
        """Return the parts of the span that all requests share."""
        if marks is None:
            return [f"{self.instruction}\n\n{self.heading}\n"]
        return [
            marks.open,
            f"system\n{self.instruction}",
            marks.close,
            "\n",
            marks.open,
            f"user\n{self.heading}\n",
        ]

    def separator(self, marks: TurnMarks | None) -> list[Part]:
        """Return the parts after a document if there are several."""
        return ["\n\n"]

    def document(self, body: Part, marks: TurnMarks | None) -> list[Part]:
        """Return the parts of the document span: only the text, so that the span does not depend on
        its position."""
        return [body]

    def question(self, question: Question, marks: TurnMarks | None) -> list[Part]:
        """Return the parts of the question span, up to the start of the answer."""
        question_text = f"\n\nQuestion: {question.text}{option_lines(question.options)}"
        if marks is None:
            return [f"{question_text}\nAnswer:"]
        return [question_text, marks.close, "\n", marks.open, "assistant\nAnswer:"]


@dataclass(frozen=True, slots=True)
class SystemLayout:
    """System prompt (ordered, reusable) and user query, without an instruction."""

    independent: bool = False

    def opening(self, marks: TurnMarks | None) -> list[Part]:
        """Return no parts, because the system prompt comes first."""
        return []

    def separator(self, marks: TurnMarks | None) -> list[Part]:
        """Return the parts after a system prompt if there are several: the end of its turn."""
        return ["\n\n"] if marks is None else [marks.close, "\n"]

    def document(self, body: Part, marks: TurnMarks | None) -> list[Part]:
        """Return the parts of the system prompt span; the query closes its turn, so a cut prompt
        stays well formed."""
        return [body] if marks is None else [marks.open, "system\n", body]

    def question(self, question: Question, marks: TurnMarks | None) -> list[Part]:
        """Return the parts of the query span, up to the start of the answer."""
        if marks is None:
            return [f"\n\nUser: {question.text}\nAssistant:"]
        return [
            marks.close,
            "\n",
            marks.open,
            f"user\n{question.text}",
            marks.close,
            "\n",
            marks.open,
            "assistant\n",
        ]


@dataclass(frozen=True, slots=True)
class PassagesLayout:
    """System prompt (ordered, reusable), passages (independent), question: for retrieval-augmented
    answers.

    `passage_words`  most words of a passage; words are separated by white space.
    """

    instruction: str
    heading: str
    passage_words: int

    def system(self, marks: TurnMarks | None) -> list[Part]:
        """Return the parts of the system prompt, without the end of its turn."""
        return [self.instruction] if marks is None else [marks.open, f"system\n{self.instruction}"]

    def turn(self, marks: TurnMarks | None) -> list[Part]:
        """Return the parts between the system prompt and the first passage."""
        if marks is None:
            return [f"\n\n{self.heading}\n\n"]
        return [marks.close, "\n", marks.open, f"user\n{self.heading}\n\n"]

    def passage(self, text: str) -> list[Part]:
        """Return the parts of a passage span, with a final blank line that separates passages in
        any order."""
        return [f"{text}\n\n"]

    def question(self, question: Question, marks: TurnMarks | None) -> list[Part]:
        """Return the parts of the question span, up to the start of the answer."""
        if marks is None:
            return [f"Question: {question.text}\nAnswer:"]
        return [f"Question: {question.text}", marks.close, "\n", marks.open, "assistant\nAnswer:"]


Layout = ReadingLayout | SystemLayout

QUALITY = ReadingLayout(
    "You read an article and answer a multiple-choice question about it. Reply with the line of the right option.",
    "Article:",
)
NARRATIVEQA = ReadingLayout(
    "You read a story and answer a question about it in a few words.", "Story:"
)
SYSTEM_PROMPTS = SystemLayout()
# 200 words are about 241 tokens, the mean length of passages in the RAGPulse trace.
RAG = PassagesLayout(
    "You answer questions from the passages that a search found. Reply in a few words; say so if they do not tell.",
    "Passages:",
    200,
)


def option_lines(options: Sequence[str]) -> str:
    """Return the options as lines that start with a letter, `A. …` first; empty without options."""
    return "".join(f"\n{option_line(index, option)}" for index, option in enumerate(options))


def option_line(index: int, option: str) -> str:
    """Return one option as in the prompt, which is also the form of the gold answer."""
    return f"{chr(ord('A') + index)}. {option}"


# ------------------------------------------------------------------------------
# Lookup of a tokenizer: a file, a folder with one, a packaged model, or a name on the hub.
# ------------------------------------------------------------------------------

EXPECTED = "a tokenizer.json, a folder that holds one, a packaged model, or a hub name"


@dataclass(frozen=True)
class TokenizerFile:
    """The bytes of a tokenizer file; it is parsed on first use, because parsing is slow."""

    name: str
    content: bytes

    @cached_property
    def sha256(self) -> str:
        """Hexadecimal SHA-256 of the tokenizer's file."""
        return hashlib.sha256(self.content).hexdigest()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The parsed tokenizer, which encodes special tokens in text as plain characters."""
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_buffer(self.content)
        except ValueError as error:
            raise ValueError(
                f"workload.tokenizer={self.name} is not a tokenizer file ({error}); expected {EXPECTED}"
            ) from error
        # A document that contains the text <|im_end|> must not close its turn.
        tokenizer.encode_special_tokens = True
        return tokenizer

    @cached_property
    def marks(self) -> TurnMarks | None:
        """Turn marks of the chat template, or None if the vocabulary has none."""
        ids = [self.tokenizer.token_to_id(mark) for mark in ("<|im_start|>", "<|im_end|>")]
        if None in ids:
            return None
        return TurnMarks(*(np.array([number], dtype=np.int32) for number in ids))


def find_tokenizer(source: str | Path | None) -> TokenizerFile:
    """Load a tokenizer's file; raise SourceUnavailable, naming `workload.tokenizer`, if it is not
    available."""
    if source is None:
        raise SourceUnavailable(
            f"workload.tokenizer is not set and text needs one; expected {EXPECTED}"
        )
    source = installed_model(source)
    path = Path(source)
    file = path / "tokenizer.json" if path.is_dir() else path
    if file.is_file():
        name = file.resolve().parent.name if file.name == "tokenizer.json" else file.stem
        return _load(name, file, file)
    if (
        isinstance(source, Path)
        or path.suffix == ".json"
        or path.is_absolute()
        or str(source).startswith(".")
    ):
        raise SourceUnavailable(f"workload.tokenizer={source} does not exist; expected {EXPECTED}")
    look_for_network()
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HFValidationError

    try:
        file = Path(hf_hub_download(str(source), "tokenizer.json"))
    except (OSError, HFValidationError) as error:
        raise SourceUnavailable(
            f"workload.tokenizer={source} cannot be loaded from the hub ({type(error).__name__}); "
            f"expected {EXPECTED}"
        ) from error
    return _load(str(source).rsplit("/", 1)[-1], file, source)


def _load(name: str, file: Path, source: str | Path) -> TokenizerFile:
    content = file.read_bytes()
    try:
        model = orjson.loads(content)["model"]
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"workload.tokenizer={source} is not a tokenizer file; expected {EXPECTED}"
        ) from error
    if model is None:
        raise ValueError(f"workload.tokenizer={source} has model=null; expected {EXPECTED}")
    return TokenizerFile(name, content)


# ------------------------------------------------------------------------------
# Tokenisation of documents and questions, one span at a time.
# ------------------------------------------------------------------------------

BATCH = 64


def encode_documents(
    documents: Sequence[Document], layout: Layout, tokenizer: TokenizerFile
) -> EncodedText:
    """Tokenise each distinct span once and return one row per question, in input order."""
    drafts = _Drafts(layout, tokenizer)
    for group, document in enumerate(documents):
        drafts.add(group, document)
    return drafts.encode()


class _Drafts:
    """Spans as text parts, collected before tokenisation so that distinct texts are encoded once,
    in large batches."""

    def __init__(self, layout: Layout, tokenizer: TokenizerFile) -> None:
        self.layout, self.tokenizer, self.marks = layout, tokenizer, tokenizer.marks
        self.spans: list[list[Part]] = []
        self.document_spans: set[int] = set()
        self.rows: list[tuple[int, tuple[int, ...], str | None, str | None]] = []
        opening = layout.opening(self.marks)
        self.opening = (self._span(opening),) if opening else ()

    def add(self, group: int, document: Document) -> None:
        span = self._span(self.layout.document(document.body, self.marks))
        self.document_spans.add(span)
        for question in document.questions:
            question_span = self._span(self.layout.question(question, self.marks))
            first = f" {question.answers[0]}" if question.answers else None
            self.rows.append((group, (*self.opening, span, question_span), first, question.answer))

    def encode(self) -> EncodedText:
        texts = {content for parts in self.spans for content in parts if isinstance(content, str)}
        texts |= {first for _, _, first, _ in self.rows if first is not None}
        tokens = encode_texts(sorted(texts), self.tokenizer)
        return EncodedText(
            tuple(join_parts(parts, tokens) for parts in self.spans),
            np.array(
                [
                    self.layout.independent and i in self.document_spans
                    for i in range(len(self.spans))
                ],
                bool,
            ),
            np.array([i in self.document_spans for i in range(len(self.spans))], bool),
            tuple(
                Row(group, spans, 0 if first is None else max(1, len(tokens[first])), answer)
                for group, spans, first, answer in self.rows
            ),
        )

    def _span(self, parts: list[Part]) -> int:
        self.spans.append(parts)
        return len(self.spans) - 1


def join_parts(parts: Sequence[Part], tokens: dict[str, Tokens]) -> Tokens:
    """Concatenate a span's token ids, int32; `tokens` maps its texts to their ids, other parts are
    ids already."""
    return np.concatenate(
        [tokens[content] if isinstance(content, str) else content for content in parts]
    ).astype(np.int32)


def encode_parts(parts: Sequence[Part], tokenizer: TokenizerFile) -> Tokens:
    """Tokenise one span, int32, without adding special tokens."""
    encode_text = tokenizer.tokenizer.encode
    texts = [content for content in parts if isinstance(content, str)]
    return join_parts(
        parts,
        {
            text: np.array(encode_text(text, add_special_tokens=False).ids, np.int32)
            for text in texts
        },
    )


def encode_texts(texts: Sequence[str], tokenizer: TokenizerFile) -> dict[str, Tokens]:
    """Tokenise each text separately, int32, without adding special tokens."""
    encoded: dict[str, Tokens] = {}
    with _progress(len(texts)) as advance:
        for start in range(0, len(texts), BATCH):
            batch = list(texts[start : start + BATCH])
            for text, encoding in zip(
                batch,
                tokenizer.tokenizer.encode_batch_fast(batch, add_special_tokens=False),
                strict=True,
            ):
                encoded[text] = np.array(encoding.ids, dtype=np.int32)
            advance(len(batch))
    return encoded


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar if stderr is a terminal; yield the function that advances it by a number
    of texts."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("tokenising", total=total)
        yield lambda count: bar.advance(task, count)


# ------------------------------------------------------------------------------
# Disk cache of tokenised text.
# ------------------------------------------------------------------------------

FORMAT_VERSION = 1
BROKEN = (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error)


def cache_key(
    name: str, documents: Sequence[Document], layout: Layout | PassagesLayout, tokenizer_sha256: str
) -> str:
    """Return the SHA-256 of all inputs of tokenisation: text, layout, tokenizer, and versions of
    format and layout."""
    digest = hashlib.sha256(
        f"{FORMAT_VERSION} {LAYOUT_VERSION} {name} {layout!r} {tokenizer_sha256}".encode()
    )
    for document in documents:
        body = document.body.encode() if isinstance(document.body, str) else document.body.tobytes()
        question_bytes = orjson.dumps([[q.text, q.options, q.answers] for q in document.questions])
        for content in (type(document.body).__name__.encode(), body, question_bytes):
            digest.update(len(content).to_bytes(8, "big") + content)
    return digest.hexdigest()


def load_or_build(
    cache_dir: Path | None, key: str, build: Callable[[], EncodedText]
) -> EncodedText:
    """Read the entry of `key`, or build and store it.

    A broken entry is rebuilt. Without a folder, the text is built and not stored.
    """
    if cache_dir is None:
        return build()
    path = cache_dir / f"{key}.npz"
    if path.is_file():
        try:
            return _read_entry(path)
        except BROKEN:
            path.unlink()
    text = build()
    arrays = {
        "tokens": np.concatenate(text.spans),
        "lengths": np.array([len(span) for span in text.spans], dtype=np.int64),
        "independent": text.independent,
        "reusable": text.reusable,
        "rows": np.frombuffer(orjson.dumps(text.rows, default=tuple), dtype=np.uint8),
    }
    # numpy's stub reads arrays by name as options
    write_atomically(path, lambda file: np.savez(file, **arrays))  # type: ignore[arg-type]
    return text


def _read_entry(path: Path) -> EncodedText:
    with np.load(path, allow_pickle=False) as arrays:
        ends = np.cumsum(arrays["lengths"])
        tokens = arrays["tokens"]
        if ends[-1] != len(tokens):
            raise ValueError(f"{path.name} is inconsistent")
        rows = tuple(
            Row(group, tuple(spans), output_len, answer)
            for group, spans, output_len, answer in orjson.loads(arrays["rows"].tobytes())
        )
        return EncodedText(
            tuple(np.split(tokens, ends[:-1])), arrays["independent"], arrays["reusable"], rows
        )


# ------------------------------------------------------------------------------
# Corpora of text documents: find the tokenizer, tokenise or read the cache, record the
# provenance.
# ------------------------------------------------------------------------------

#: Two questions whose last tokens differ, so that their prompts share only the answer's opening as
#: a suffix.
PROBES = (Question("A"), Question("B?"))


def text_corpus(
    about: tuple[str, ProvenanceKind, str],
    documents: Sequence[Document],
    layout: Layout,
    tokenizer: str | Path | None,
    cache_dir: Path | None,
) -> Corpus:
    """Make the corpus of `documents`.

    `about`  name, provenance, and start of the detail, with placeholders `{documents}` and
             `{requests}`
    """
    name, kind, nouns = about
    check_not_empty(name, documents)
    tokenizer_file = find_tokenizer(tokenizer)
    key = cache_key(name, documents, layout, tokenizer_file.sha256)
    text = load_or_build(
        cache_dir, key, lambda: encode_documents(documents, layout, tokenizer_file)
    )
    corpus = text.corpus(name, kind, f"{nouns}, {tokenizer_file.name} tokenizer")
    return replace(corpus, joints=partial(joints_of, layout, tokenizer_file))


def joints_of(layout: Layout, tokenizer: TokenizerFile) -> Joints:
    """Return the joints of a layout's prompts in tokens of `tokenizer`."""
    marks = tokenizer.marks
    separator = encode_parts(layout.separator(marks), tokenizer)
    first, second = (encode_parts(layout.question(probe, marks), tokenizer) for probe in PROBES)
    answer = shared_length(first[::-1], second[::-1])
    opening = first[len(first) - answer :]
    return Joints(
        separator, shared_length(separator, first), shared_length(separator, opening), answer
    )


def check_not_empty(name: str, documents: Sequence[Document]) -> None:
    """Raise ValueError for a source without questions or with an empty document."""
    if not any(document.questions for document in documents):
        raise ValueError(
            f"workload.kind={name} has a source without any question; expected at least one"
        )
    for number, document in enumerate(documents):
        if len(document.body) == 0:
            raise ValueError(
                f"workload.kind={name} has an empty document, number {number}; expected text in each"
            )


def hub_rows(dataset: str, split: str, expected: str) -> Iterator[JsonRow]:
    """Load the rows of one split from the hub or its local cache; raise SourceUnavailable if
    neither has it.

    `expected`  content of the rows, for error messages
    """
    look_for_network()
    import datasets

    # The client logs every retry, and one error at the end is enough.
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
    try:
        rows = datasets.load_dataset(dataset, split=split)
    except (OSError, datasets.exceptions.DatasetsError) as error:
        raise SourceUnavailable(
            f"workload.source=hub cannot load {dataset} ({type(error).__name__}); expected a reachable hub"
        ) from error
    return (
        JsonRow(row, f"workload.source=hub row {number} of {dataset}", expected)
        for number, row in enumerate(rows)
    )


# ------------------------------------------------------------------------------
# Passages of a text.
# ------------------------------------------------------------------------------

SENTENCE = re.compile(r"\S.*?(?:[.!?][\"'”’)\]]*(?=\s)|\Z)\s*", re.DOTALL)
WORD = re.compile(r"\S+\s*")


def split_passages(text: str, max_words: int) -> list[str]:
    """Pack sentences of `text` in order into passages of at most `words` words; split longer
    sentences."""
    passages: list[str] = []
    used = 0
    for sentence in SENTENCE.findall(text):
        words = WORD.findall(sentence)
        for start in range(0, len(words), max_words):
            piece = "".join(words[start : start + max_words])
            count = len(piece.split())
            if not passages or used + count > max_words:
                passages.append("")
                used = 0
            passages[-1] += piece
            used += count
    return [passage.strip() for passage in passages]
