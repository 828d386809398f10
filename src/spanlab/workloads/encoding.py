"""Tokenisation of documents and questions, one span at a time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from spanlab.core.request import Tokens
from spanlab.workloads.corpus import EncodedText, Row
from spanlab.workloads.prompts import Document, Layout, Part
from spanlab.workloads.tokenizer import TokenizerFile

BATCH = 64


def encode_documents(documents: Sequence[Document], layout: Layout, tokenizer: TokenizerFile) -> EncodedText:
    """Tokenise each distinct span once and return one row per question, in input order."""
    drafts = _Drafts(layout, tokenizer)
    for group, document in enumerate(documents):
        drafts.add(group, document)
    return drafts.encode()


class _Drafts:
    """Spans as text parts, collected before tokenisation so that distinct texts are encoded once, in large batches."""

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
            np.array([self.layout.independent and i in self.document_spans for i in range(len(self.spans))], bool),
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
    """Concatenate a span's token ids, int32; `tokens` maps its texts to their ids, other parts are ids already."""
    return np.concatenate([tokens[content] if isinstance(content, str) else content for content in parts]).astype(
        np.int32
    )


def encode_parts(parts: Sequence[Part], tokenizer: TokenizerFile) -> Tokens:
    """Tokenise one span, int32, without adding special tokens."""
    encode_text = tokenizer.tokenizer.encode
    texts = [content for content in parts if isinstance(content, str)]
    return join_parts(
        parts, {text: np.array(encode_text(text, add_special_tokens=False).ids, np.int32) for text in texts}
    )


def encode_texts(texts: Sequence[str], tokenizer: TokenizerFile) -> dict[str, Tokens]:
    """Tokenise each text separately, int32, without adding special tokens."""
    encoded: dict[str, Tokens] = {}
    with _progress(len(texts)) as advance:
        for start in range(0, len(texts), BATCH):
            batch = list(texts[start : start + BATCH])
            for text, encoding in zip(
                batch, tokenizer.tokenizer.encode_batch_fast(batch, add_special_tokens=False), strict=True
            ):
                encoded[text] = np.array(encoding.ids, dtype=np.int32)
            advance(len(batch))
    return encoded


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar if stderr is a terminal; yield the function that advances it by a number of texts."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("tokenising", total=total)
        yield lambda count: bar.advance(task, count)
