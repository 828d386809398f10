"""Toy tokenizers and toy sources that the workload tests share."""

import csv
from collections.abc import Callable
from pathlib import Path

import pytest

from ..support.files import write_lines
from ..support.tokenizers import MARKS, save_word_tokenizer


@pytest.fixture
def make_tokenizer(tmp_path: Path) -> Callable[..., Path]:
    """Write a word-level tokenizer with every word of `texts`."""

    def make(*texts: str, marks: bool = True, name: str = "toy") -> Path:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        return save_word_tokenizer(folder / "tokenizer.json", *texts, marks=marks)

    return make


QUALITY_ROWS = [
    {
        "article_id": article,
        "article": " ".join(f"{article}word{i}" for i in range(length)),
        "questions": [
            {
                "question": f"why {article} {writer} {number} ?",
                "options": [f"pick{letter}{article}{writer}{number}" for letter in "abcd"],
                "gold_label": 1 + number % 4,
            }
            for number in range(2)
        ],
    }
    for writer in ("w1", "w2")
    for article, length in (("alpha", 20), ("beta", 60), ("gamma", 30))
]


@pytest.fixture
def quality_rows() -> list[dict]:
    """Three articles, two questions by each of two writers."""
    return QUALITY_ROWS


@pytest.fixture
def quality_files(tmp_path: Path, make_tokenizer: Callable[..., Path]) -> dict[str, Path]:
    """Official-style QuALITY rows, two per document, and their tokenizer."""
    path = write_lines(tmp_path / "toy.jsonl", *QUALITY_ROWS)
    return {"path": path, "tokenizer": make_tokenizer(path.read_text(encoding="utf-8"))}


@pytest.fixture
def make_quality(tmp_path: Path) -> Callable[..., dict[str, Path]]:
    """Official-style QuALITY rows, two per document, and a byte-level tokenizer, which keeps every character."""

    def make(marks: bool = True) -> dict[str, Path]:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

        path = write_lines(tmp_path / "toy.jsonl", *QUALITY_ROWS)
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        letters = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=letters, show_progress=False)
        tokenizer.train_from_iterator([row["article"] for row in QUALITY_ROWS], trainer)
        tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS] if marks else [])
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        return {"path": path, "tokenizer": tmp_path / "tokenizer.json"}

    return make


STORIES = {"n1": "once upon a time there was a fox", "n2": "the sea was calm and the ship was old"}
ASKED = [
    ("n1", "who was there ?", "zorblax", "the zorblax creature"),
    ("n2", "what was old ?", "quuxship", "old quuxship"),
    ("n1", "when was it ?", "yesterglorp", ""),
]


@pytest.fixture
def narrativeqa_rows() -> list[dict]:
    """The toy NarrativeQA as on the hub, with one question per row."""
    return [
        {
            "document": {"id": name, "text": STORIES[name]},
            "question": {"text": question},
            "answers": [{"text": first_answer}, {"text": second_answer}],
        }
        for name, question, first_answer, second_answer in ASKED
    ]


@pytest.fixture
def prompt_files(tmp_path: Path, make_tokenizer: Callable[..., Path]) -> dict[str, Path]:
    """Two Markdown prompts, six chat queries and one search query, and their tokenizer."""
    folder = tmp_path / "prompts"
    folder.mkdir()
    (folder / "b.md").write_text("be brief", encoding="utf-8")
    (folder / "a.md").write_text("be kind", encoding="utf-8")
    rows = [{"query": f"ask{i}", "kind": "chat"} for i in range(6)] + [{"query": "find", "kind": "search"}]
    queries = write_lines(tmp_path / "queries.jsonl", *rows)
    tokenizer = make_tokenizer("be brief kind find", *(row["query"] for row in rows))
    return {"path": folder, "queries_path": queries, "tokenizer": tokenizer}


@pytest.fixture
def narrativeqa_files(tmp_path: Path, make_tokenizer: Callable[..., Path]) -> dict[str, Path]:
    """NarrativeQA's folder with answers that occur in no text, and its tokenizer."""
    folder = tmp_path / "narrative"
    (folder / "tmp").mkdir(parents=True)
    for name, story in STORIES.items():
        (folder / "tmp" / f"{name}.content").write_text(story, encoding="utf-8")
    _write_csv(folder / "documents.csv", ("document_id", "set"), [(name, "test") for name in STORIES])
    _write_csv(folder / "qaps.csv", ("document_id", "question", "answer1", "answer2"), ASKED)
    return {"path": folder, "tokenizer": make_tokenizer(*STORIES.values(), *(" ".join(row) for row in ASKED))}


def _write_csv(path: Path, header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([header, *rows])
