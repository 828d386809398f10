"""Documents and questions become token ids, span by span."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np

from spanlab.core.request import Tokens
from spanlab.workloads.corpus import EncodedText, Row
from spanlab.workloads.prompts import Document, Layout, Part
from spanlab.workloads.tokenizer import TokenizerFile

BATCH = 64


class Advance(Protocol):
    """Tells a progress bar how many more texts are done."""

    def __call__(self, count: int, /) -> None: ...


def encode_documents(documents: Sequence[Document], layout: Layout, tokenizer: TokenizerFile) -> EncodedText:
    """Tokenise each distinct span once and list one row per question, in the order given."""
    drafts = _Drafts(layout, tokenizer)
    for group, document in enumerate(documents):
        drafts.add(group, document)
    return drafts.encode()


class _Drafts:
    """Spans as text parts, collected first so that each distinct text is tokenised once, in large batches."""

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
            asked = self._span(self.layout.question(question, self.marks))
            first = f" {question.answers[0]}" if question.answers else None
            self.rows.append((group, (*self.opening, span, asked), first, question.answer))

    def encode(self) -> EncodedText:
        texts = {part for parts in self.spans for part in parts if isinstance(part, str)}
        texts |= {first for _, _, first, _ in self.rows if first is not None}
        tokens = encode_texts(sorted(texts), self.tokenizer)
        return EncodedText(
            tuple(joined(parts, tokens) for parts in self.spans),
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


def joined(parts: Sequence[Part], tokens: dict[str, Tokens]) -> Tokens:
    """A span's token ids, int32: its texts as tokenised in `tokens`, its marks as they are."""
    return np.concatenate([tokens[part] if isinstance(part, str) else part for part in parts]).astype(np.int32)


def encode_parts(parts: Sequence[Part], tokenizer: TokenizerFile) -> Tokens:
    """A single span's token ids, int32, without any special token added."""
    parse = tokenizer.tokenizer.encode
    texts = [part for part in parts if isinstance(part, str)]
    return joined(parts, {text: np.array(parse(text, add_special_tokens=False).ids, np.int32) for text in texts})


def encode_texts(texts: Sequence[str], tokenizer: TokenizerFile) -> dict[str, Tokens]:
    """Token ids of each text on its own, int32, without any special token added."""
    encoded: dict[str, Tokens] = {}
    with _progress(len(texts)) as advance:
        for start in range(0, len(texts), BATCH):
            batch = list(texts[start : start + BATCH])
            for text, one in zip(
                batch, tokenizer.tokenizer.encode_batch_fast(batch, add_special_tokens=False), strict=True
            ):
                encoded[text] = np.array(one.ids, dtype=np.int32)
            advance(len(batch))
    return encoded


@contextmanager
def _progress(total: int) -> Iterator[Advance]:
    """A bar on a terminal's stderr; a log file gets nothing."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("tokenising", total=total)
        yield lambda count: bar.advance(task, count)
