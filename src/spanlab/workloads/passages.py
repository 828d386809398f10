"""Articles cut into passages, with the questions about them: the corpus that a modelled retriever draws from."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from spanlab.core.request import Tokens
from spanlab.workloads import prompts, quality
from spanlab.workloads.cache import cache_key, cached
from spanlab.workloads.corpus import Corpus, EncodedText, Row
from spanlab.workloads.encoding import encode_texts, joined
from spanlab.workloads.files import read_jsonl
from spanlab.workloads.prompts import Document, Part, PassagesLayout, Question, option_line
from spanlab.workloads.text_source import refuse_nothing
from spanlab.workloads.tokenizer import TokenizerFile, find_tokenizer

NAME = "rag"
# A sentence with the white space behind it; whatever follows the last full stop is one too.
SENTENCE = re.compile(r"\S.*?(?:[.!?][\"'”’)\]]*(?=\s)|\Z)\s*", re.DOTALL)
WORD = re.compile(r"\S+\s*")


def local(path: Path, tokenizer: str | Path | None = None, cache_dir: Path | None = None) -> Corpus:
    """QuALITY articles in passages: each row is a question behind the system prompt and all its article's passages.

    The rows are what retrieval draws from; nobody is ever served one as it is.
    """
    rows = read_jsonl(path, quality.KEY, quality.EXPECTED)
    documents = [_plain(document) for document in quality.articles(rows, path)]
    refuse_nothing(NAME, documents)
    found = find_tokenizer(tokenizer)
    key = cache_key(NAME, documents, prompts.RAG, found.sha256)
    text = cached(cache_dir, key, lambda: encode_passages(documents, prompts.RAG, found))
    return text.corpus(NAME, "local text", f"QuALITY articles, {path.name}, {found.name} tokenizer")


def cut(text: str, words: int) -> list[str]:
    """Whole sentences of `text`, packed in order into passages of at most `words` words; a longer one is divided."""
    passages: list[str] = []
    held = 0
    for piece in _pieces(text, words):
        size = len(piece.split())
        if not passages or held + size > words:
            passages.append("")
            held = 0
        passages[-1] += piece
        held += size
    return [passage.strip() for passage in passages]


def encode_passages(documents: Sequence[Document], layout: PassagesLayout, tokenizer: TokenizerFile) -> EncodedText:
    """Tokenise each span on its own; a row's spans are system prompt, turn, the article's passages, question."""
    spans = [layout.system(tokenizer.marks), layout.turn(tokenizer.marks)]
    flags = [(False, True), (False, False)]
    drafts: list[tuple[int, tuple[int, ...], Question]] = []
    for group, document in enumerate(documents):
        assert isinstance(document.body, str), "only text can be cut"
        found = [layout.passage(text) for text in cut(document.body, layout.passage_words)]
        passages = range(len(spans), len(spans) + len(found))
        asked = [layout.question(question, tokenizer.marks) for question in document.questions]
        drafts += [(group, (0, 1, *passages, passages.stop + i), q) for i, q in enumerate(document.questions)]
        spans += found + asked
        flags += [(True, False)] * len(found) + [(False, False)] * len(asked)
    tokens = _encoded(spans, [question for _, _, question in drafts], tokenizer)
    return EncodedText(
        tuple(joined(parts, tokens) for parts in spans),
        np.array([independent for independent, _ in flags], dtype=bool),
        np.array([reusable for _, reusable in flags], dtype=bool),
        tuple(Row(group, used, _output_len(question, tokens), question.answer) for group, used, question in drafts),
    )


def _plain(document: Document) -> Document:
    """The same questions without their options: who asks a search engine has none."""
    return Document(document.body, tuple(_open(question) for question in document.questions))


def _open(question: Question) -> Question:
    answers = (option for i, option in enumerate(question.options) if option_line(i, option) in question.answers)
    return Question(question.text, answers=tuple(answers))


def _pieces(text: str, words: int) -> Iterator[str]:
    for sentence in SENTENCE.findall(text):
        tokens = WORD.findall(sentence)
        yield from ("".join(tokens[start : start + words]) for start in range(0, len(tokens), words))


def _encoded(spans: Sequence[list[Part]], questions: Sequence[Question], tokenizer: TokenizerFile) -> dict[str, Tokens]:
    texts = {part for part in chain.from_iterable(spans) if isinstance(part, str)}
    texts |= {_first(question) for question in questions if question.answers}
    return encode_texts(sorted(texts), tokenizer)


def _first(question: Question) -> str:
    return f" {question.answers[0]}"


def _output_len(question: Question, tokens: dict[str, Tokens]) -> int:
    return max(1, len(tokens[_first(question)])) if question.answers else 0
