"""Articles split into passages, with their questions: the corpus of a modelled retriever."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from spanlab.core.request import Tokens
from spanlab.workloads import prompts, quality
from spanlab.workloads.cache import cache_key, load_or_build
from spanlab.workloads.corpus import Corpus, EncodedText, Row
from spanlab.workloads.encoding import encode_texts, join_parts
from spanlab.workloads.files import read_jsonl
from spanlab.workloads.prompts import Document, Part, PassagesLayout, Question, option_line
from spanlab.workloads.text_source import check_not_empty
from spanlab.workloads.tokenizer import TokenizerFile, find_tokenizer

NAME = "rag"
# A sentence with the white space after it; text after the last full stop counts as a sentence.
SENTENCE = re.compile(r"\S.*?(?:[.!?][\"'”’)\]]*(?=\s)|\Z)\s*", re.DOTALL)
WORD = re.compile(r"\S+\s*")


def local(path: Path, tokenizer: str | Path | None = None, cache_dir: Path | None = None) -> Corpus:
    """Read QuALITY articles as passages; a row is system prompt, all passages of an article, and a question.

    Retrieval draws from the rows; they are not served themselves.
    """
    rows = read_jsonl(path, quality.KEY, quality.EXPECTED)
    documents = [_without_options(document) for document in quality.articles(rows)]
    check_not_empty(NAME, documents)
    tokenizer_file = find_tokenizer(tokenizer)
    key = cache_key(NAME, documents, prompts.RAG, tokenizer_file.sha256)
    text = load_or_build(cache_dir, key, lambda: encode_passages(documents, prompts.RAG, tokenizer_file))
    return text.corpus(NAME, "local text", f"QuALITY articles, {path.name}, {tokenizer_file.name} tokenizer")


def split_passages(text: str, max_words: int) -> list[str]:
    """Pack sentences of `text` in order into passages of at most `words` words; split longer sentences."""
    passages: list[str] = []
    used = 0
    for piece in _sentence_pieces(text, max_words):
        count = len(piece.split())
        if not passages or used + count > max_words:
            passages.append("")
            used = 0
        passages[-1] += piece
        used += count
    return [passage.strip() for passage in passages]


def encode_passages(documents: Sequence[Document], layout: PassagesLayout, tokenizer: TokenizerFile) -> EncodedText:
    """Tokenise each span separately; a row's spans are system prompt, turn, the article's passages, question."""
    spans = [layout.system(tokenizer.marks), layout.turn(tokenizer.marks)]
    flags = [(False, True), (False, False)]
    drafts: list[tuple[int, tuple[int, ...], Question]] = []
    for group, document in enumerate(documents):
        assert isinstance(document.body, str), "only text can be split"
        passage_parts = [layout.passage(text) for text in split_passages(document.body, layout.passage_words)]
        passages = range(len(spans), len(spans) + len(passage_parts))
        question_parts = [layout.question(question, tokenizer.marks) for question in document.questions]
        drafts += [(group, (0, 1, *passages, passages.stop + i), q) for i, q in enumerate(document.questions)]
        spans += passage_parts + question_parts
        flags += [(True, False)] * len(passage_parts) + [(False, False)] * len(question_parts)
    tokens = _encode_spans(spans, [question for _, _, question in drafts], tokenizer)
    return EncodedText(
        tuple(join_parts(parts, tokens) for parts in spans),
        np.array([independent for independent, _ in flags], dtype=bool),
        np.array([reusable for _, reusable in flags], dtype=bool),
        tuple(Row(group, used, _output_len(question, tokens), question.answer) for group, used, question in drafts),
    )


def _without_options(document: Document) -> Document:
    """Return the document with open questions, because a query to a search engine has no options."""
    return Document(document.body, tuple(_open_question(question) for question in document.questions))


def _open_question(question: Question) -> Question:
    answers = (option for i, option in enumerate(question.options) if option_line(i, option) in question.answers)
    return Question(question.text, answers=tuple(answers))


def _sentence_pieces(text: str, max_words: int) -> Iterator[str]:
    for sentence in SENTENCE.findall(text):
        words = WORD.findall(sentence)
        yield from ("".join(words[start : start + max_words]) for start in range(0, len(words), max_words))


def _encode_spans(
    spans: Sequence[list[Part]], questions: Sequence[Question], tokenizer: TokenizerFile
) -> dict[str, Tokens]:
    texts = {content for content in chain.from_iterable(spans) if isinstance(content, str)}
    texts |= {_first_answer(question) for question in questions if question.answers}
    return encode_texts(sorted(texts), tokenizer)


def _first_answer(question: Question) -> str:
    return f" {question.answers[0]}"


def _output_len(question: Question, tokens: dict[str, Tokens]) -> int:
    return max(1, len(tokens[_first_answer(question)])) if question.answers else 0
