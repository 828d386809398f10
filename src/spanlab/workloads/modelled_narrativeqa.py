"""Shape of NarrativeQA from its published story lengths, because we may not ship the stories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spanlab.workloads import prompts
from spanlab.workloads.encoding import encode_documents, encode_texts
from spanlab.workloads.files import JsonRow, read_csv, read_jsonl
from spanlab.workloads.parquet import LARGEST_TOKEN
from spanlab.workloads.prompts import Document, Question
from spanlab.workloads.selection import Selection, select
from spanlab.workloads.shape import JOINTS, REUSABLE, Shape, measure
from spanlab.workloads.text_source import joints_of
from spanlab.workloads.tokenizer import TokenizerFile

# Published: 46,765 questions on 1,572 documents, 29.7 per document.
QUESTIONS_PER_DOCUMENT = 30
ASSIGNMENT_SEED = 1712
STUB_START = 2**30

QUESTIONS_KEY, WORDS_KEY = "workload.questions_path", "workload.words_path"
LENGTHS_EXPECTED = "NarrativeQA's documents.csv with document_id and story_word_count"
QUESTIONS_EXPECTED = "the FairytaleQA jsonl with story and questions[{question, answers}]"
WORDS_EXPECTED = "the QuALITY jsonl with article, one article a row"


def model(lengths_path: Path, questions_path: Path | None, words_path: Path | None, tokenizer: TokenizerFile) -> Shape:
    """Model each story by its published word count, QuALITY's tokens per word, and thirty FairytaleQA questions."""
    word_counts = _story_words(lengths_path)
    tales = read_jsonl(questions_path, QUESTIONS_KEY, QUESTIONS_EXPECTED)
    articles = read_jsonl(words_path, WORDS_KEY, WORDS_EXPECTED)
    ratios = {
        "quality": tokens_per_word(_texts(articles, "article", words_path, WORDS_KEY, WORDS_EXPECTED), tokenizer),
        "fairytaleqa": tokens_per_word(
            _texts(tales, "story", questions_path, QUESTIONS_KEY, QUESTIONS_EXPECTED), tokenizer
        ),
    }
    shape = _stub_shape(assign_questions(_questions(tales), len(word_counts)), tokenizer, ratios)
    return _with_document_lengths(shape, np.rint(word_counts * ratios["quality"]).astype(np.int64))


def tokens_per_word(texts: Sequence[str], tokenizer: TokenizerFile) -> float:
    """Return tokens divided by words over all distinct texts; words are separated by white space."""
    distinct = list(dict.fromkeys(texts))
    tokens = encode_texts(distinct, tokenizer)
    return sum(len(tokens[text]) for text in distinct) / sum(len(text.split()) for text in distinct)


def _texts(rows: Sequence[JsonRow], name: str, path: Path | None, key: str, expected: str) -> list[str]:
    """Return a text of each row; raise ValueError if there is no word in any."""
    texts = [row.field(name, str) for row in rows]
    if not any(map(str.split, texts)):
        raise ValueError(f"{key}={path} has no word in any {name}; expected {expected}")
    return texts


def assign_questions(questions: Sequence[Question], documents: int) -> list[tuple[Question, ...]]:
    """Shuffle the questions once and assign them cyclically, so that no document has the same question twice."""
    order = np.random.default_rng(ASSIGNMENT_SEED).permutation(len(questions)).tolist()
    if len(order) < QUESTIONS_PER_DOCUMENT:
        raise ValueError(
            f"workload.questions_path holds {len(order)} questions; expected at least {QUESTIONS_PER_DOCUMENT}"
        )
    ranges = (range(start, start + QUESTIONS_PER_DOCUMENT) for start in _starts(documents))
    return [tuple(questions[order[index % len(order)]] for index in indexes) for indexes in ranges]


def _starts(documents: int) -> range:
    return range(0, documents * QUESTIONS_PER_DOCUMENT, QUESTIONS_PER_DOCUMENT)


def _story_words(path: Path) -> NDArray[np.float64]:
    rows = read_csv(path, ("document_id", "story_word_count"), "workload.path", LENGTHS_EXPECTED)
    for row in rows:
        count = row["story_word_count"].strip()
        if not count.isdecimal() or len(count) > len(str(LARGEST_TOKEN)):
            raise ValueError(
                f"workload.path={path} has story_word_count={count[:40]!r} for {row['document_id']}; expected a whole "
                f"number from 0 up, as {LENGTHS_EXPECTED}"
            )
    return np.array([int(row["story_word_count"]) for row in rows], dtype=np.float64)


def _questions(tales: Sequence[JsonRow]) -> list[Question]:
    """Return distinct questions; a repeated question has the answers of its first occurrence."""
    distinct: dict[str, Question] = {}
    for row in tales:
        for entry in row.rows("questions"):
            text = entry.field("question", str).strip()
            distinct.setdefault(text, Question(text, answers=tuple(entry.list_of("answers", str))))
    return list(distinct.values())


def _stub_shape(
    question_sets: Sequence[tuple[Question, ...]], tokenizer: TokenizerFile, ratios: dict[str, float]
) -> Shape:
    """Measure real questions around stub documents of one token each, with ids outside any vocabulary."""
    documents = [
        Document(np.array([STUB_START + number], dtype=np.int32), questions)
        for number, questions in enumerate(question_sets)
    ]
    detail = (
        f"{{documents}} NarrativeQA stories by published word count at {ratios['quality']:.3f} tokens per word "
        f"(QuALITY articles), {{requests}} FairytaleQA questions and answer lengths, {tokenizer.name} tokenizer"
    )
    corpus = encode_documents(documents, prompts.NARRATIVEQA, tokenizer).corpus("narrativeqa", "modelled", detail)
    workload = select(corpus, Selection(unknown_output=0))
    joints = {JOINTS: joints_of(prompts.NARRATIVEQA, tokenizer).counts()}
    return measure(workload, detail=detail, tokens_per_word=ratios, **joints)


def _with_document_lengths(shape: Shape, lengths: NDArray[np.int64]) -> Shape:
    """Replace stub lengths by document lengths; stubs are the reusable spans, in the order of their documents."""
    stubs = np.flatnonzero(shape.flags & REUSABLE)
    assert len(stubs) == len(lengths), "one stub per document"
    assert not shape.lcps[stubs].any(), "stubs share nothing"
    replaced = shape.lengths.copy()
    replaced[stubs] = lengths
    return replace(shape, lengths=replaced)
