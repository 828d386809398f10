"""NarrativeQA's shape from its published story lengths, because the stories themselves are not ours to ship."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spanlab.workloads import prompts
from spanlab.workloads.encoding import encode_documents, encode_texts
from spanlab.workloads.files import field, read_jsonl
from spanlab.workloads.narrativeqa import read_table
from spanlab.workloads.prompts import Document, Question
from spanlab.workloads.selection import Selection, select
from spanlab.workloads.shape import JOINTS, REUSABLE, Shape, measure
from spanlab.workloads.text_source import joints_of
from spanlab.workloads.tokenizer import TokenizerFile

# Published: 46,765 questions on 1,572 documents, 29.7 a document.
QUESTIONS_PER_DOCUMENT = 30
DEAL_SEED = 1712
STUB_START = 2**30

LENGTHS_EXPECTED = "NarrativeQA's documents.csv with document_id and story_word_count"
QUESTIONS_EXPECTED = "the FairytaleQA jsonl with story and questions[{question, answers}]"
WORDS_EXPECTED = "the QuALITY jsonl with article, one article a row"


def model(lengths_path: Path, questions_path: Path | None, words_path: Path | None, tokenizer: TokenizerFile) -> Shape:
    """Give each published story length the tokens per word of QuALITY and thirty FairytaleQA questions."""
    words = _story_words(lengths_path)
    tales = read_jsonl(questions_path, "workload.questions_path", QUESTIONS_EXPECTED)
    articles = read_jsonl(words_path, "workload.words_path", WORDS_EXPECTED)
    ratios = {
        "quality": tokens_per_word([row["article"] for row in articles], tokenizer),
        "fairytaleqa": tokens_per_word([row["story"] for row in tales], tokenizer),
    }
    shape = _stub_shape(deal(_questions(tales, questions_path), len(words)), tokenizer, ratios)
    return _with_document_lengths(shape, np.rint(words * ratios["quality"]).astype(np.int64))


def tokens_per_word(texts: Sequence[str], tokenizer: TokenizerFile) -> float:
    """Tokens of all texts divided by their words, a word being what white space parts."""
    distinct = list(dict.fromkeys(texts))
    tokens = encode_texts(distinct, tokenizer)
    return sum(len(tokens[text]) for text in distinct) / sum(len(text.split()) for text in distinct)


def deal(questions: Sequence[Question], documents: int) -> list[tuple[Question, ...]]:
    """Shuffle the questions once and deal them round and round, so that no document is asked the same one twice."""
    order = np.random.default_rng(DEAL_SEED).permutation(len(questions)).tolist()
    if len(order) < QUESTIONS_PER_DOCUMENT:
        raise ValueError(
            f"workload.questions_path holds {len(order)} questions; expected at least {QUESTIONS_PER_DOCUMENT}"
        )
    dealt = (range(start, start + QUESTIONS_PER_DOCUMENT) for start in _starts(documents))
    return [tuple(questions[order[index % len(order)]] for index in hand) for hand in dealt]


def _starts(documents: int) -> range:
    return range(0, documents * QUESTIONS_PER_DOCUMENT, QUESTIONS_PER_DOCUMENT)


def _story_words(path: Path) -> NDArray[np.float64]:
    rows = read_table(path, ("document_id", "story_word_count"), "workload.path", LENGTHS_EXPECTED)
    return np.array([int(row["story_word_count"]) for row in rows], dtype=np.float64)


def _questions(tales: Sequence[dict[str, Any]], path: Path | None) -> list[Question]:
    """Distinct questions with the answers of their first asking."""
    distinct: dict[str, Question] = {}
    for row in tales:
        for entry in field(row, "questions", str(path), "workload.questions_path", QUESTIONS_EXPECTED):
            text = entry["question"].strip()
            distinct.setdefault(text, Question(text, answers=tuple(entry["answers"])))
    return list(distinct.values())


def _stub_shape(hands: Sequence[tuple[Question, ...]], tokenizer: TokenizerFile, ratios: dict[str, float]) -> Shape:
    """Measure real questions around documents of one token each, an id that no vocabulary has."""
    documents = [Document(np.array([STUB_START + number], dtype=np.int32), hand) for number, hand in enumerate(hands)]
    detail = (
        f"{{documents}} NarrativeQA stories by published word count at {ratios['quality']:.3f} tokens per word "
        f"(QuALITY articles), {{requests}} FairytaleQA questions and answer lengths, {tokenizer.name} tokenizer"
    )
    corpus = encode_documents(documents, prompts.NARRATIVEQA, tokenizer).corpus("narrativeqa", "modelled", detail)
    workload = select(corpus, Selection(unknown_output=0))
    joints = {JOINTS: joints_of(prompts.NARRATIVEQA, tokenizer).counts()}
    return measure(workload, detail=detail, tokens_per_word=ratios, **joints)


def _with_document_lengths(shape: Shape, lengths: NDArray[np.int64]) -> Shape:
    """Stubs are the reusable spans and sort in the order of their documents."""
    stubs = np.flatnonzero(shape.flags & REUSABLE)
    assert len(stubs) == len(lengths), "one stub per document"
    assert not shape.lcps[stubs].any(), "stubs share nothing"
    long = shape.lengths.copy()
    long[stubs] = lengths
    return replace(shape, lengths=long)
