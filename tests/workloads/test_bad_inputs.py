"""Missing and invalid inputs raise an error of one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from spanlab.workloads import SourceUnavailable, make_shape

from .factories import load_workload

ALTERNATIVES = (
    r"; alternatives: workload.source=shape, workload.source=local workload.path=\.\.\., "
    r"or workload.source=hub with network$"
)


def _raise(error: Exception):
    def load(*_, **__):
        raise error

    return load


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "holds no rows"),
        ("{broken", "line 1 is not JSON"),
        ("[1]", "line 1 is not a JSON object"),
        ('{"article": "x"}', "has a row without the field 'article_id'"),
        ('{"article_id": 1}', "has a row without the field 'article'"),
        ('{"article_id": 1, "article": "x", "questions": [{"options": []}]}', "has a row without the field 'question'"),
        (
            '{"article_id": 1, "article": "x", "questions": [{"question": "q", "options": ["a"], "gold_label": 2}]}',
            "has the gold option number 1 of 1",
        ),
        ('{"article_id": 1, "article": 5}', "has a field 'article' that is a number, not a string"),
        ('{"article_id": 1, "article": "x", "question": null}', "has a field 'question' that is null, not a string"),
        ('{"article_id": 1, "article": "x", "questions": {}}', "has a field 'questions' that is an object, not a list"),
        ('{"article_id": 1, "article": "x", "questions": [1]}', "has a question that is not an object"),
        (
            '{"article_id": 1, "article": "x", "question": "q", "options": "ab"}',
            "has a field 'options' that is a string, not a list",
        ),
        ('{"article_id": 1, "article": "x", "question": "q", "options": [1]}', "has an option that is not a string"),
        (
            '{"article_id": 1, "article": "x", "question": "q", "options": ["a"], "gold_label": "1"}',
            "has a field 'gold_label' that is a string, not a number",
        ),
    ],
)
def test_a_bad_quality_file_gets_its_sentence(tmp_path: Path, make_tokenizer, text: str, problem: str):
    path = write(tmp_path / "bad.jsonl", text)
    with pytest.raises(ValueError, match=rf"^workload.path=.*bad.jsonl {problem}.*; expected a QuALITY jsonl"):
        load_workload("quality", "local", path=path, tokenizer=make_tokenizer())


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ('{"article_id": 1, "article": "x", "questions": []}', "has a source without any question"),
        ('{"article_id": 1, "article": " ", "questions": [{"question": "q", "options": []}]}', "has an empty document"),
    ],
)
def test_a_source_that_asks_or_tells_nothing_is_refused(tmp_path: Path, make_tokenizer, row: str, problem: str):
    path = write(tmp_path / "bad.jsonl", row)
    with pytest.raises(ValueError, match=rf"^workload.kind=quality {problem}"):
        load_workload("quality", "local", path=path, tokenizer=make_tokenizer())


@pytest.mark.parametrize("kind", ["quality", "narrativeqa", "system_prompts"])
def test_a_missing_path_names_the_ways_out(kind: str):
    with pytest.raises(SourceUnavailable, match=rf"^workload.path.*; expected .*{ALTERNATIVES}"):
        load_workload(kind, "local", path="no_such_place", tokenizer="toy")


def test_a_missing_queries_file_is_named(prompt_files: dict[str, Path]):
    files = prompt_files | {"queries_path": None}
    with pytest.raises(SourceUnavailable, match=rf"^workload.queries_path is not set; expected .*{ALTERNATIVES}"):
        load_workload("system_prompts", "local", **files)


@pytest.mark.parametrize(
    ("tokenizer", "problem"),
    [(None, " is not set and text needs one"), ("no/such/tokenizer.json", "=no/such/tokenizer.json does not exist")],
)
def test_a_missing_tokenizer_is_named(quality_files: dict[str, Path], tokenizer: str | None, problem: str):
    with pytest.raises(SourceUnavailable, match=rf"^workload.tokenizer{problem}; expected .*{ALTERNATIVES}"):
        load_workload("quality", "local", path=quality_files["path"], tokenizer=tokenizer)


def test_a_tokenizer_that_is_none_is_refused(quality_files: dict[str, Path], tmp_path: Path):
    path = write(tmp_path / "tokenizer.json", "{}")
    with pytest.raises(ValueError, match=r"^workload.tokenizer=.* is not a tokenizer file; expected a tokenizer.json"):
        load_workload("quality", "local", path=quality_files["path"], tokenizer=path)


def test_a_tokenizer_that_the_hub_does_not_give_is_named(quality_files: dict[str, Path], monkeypatch):
    monkeypatch.setattr("huggingface_hub.hf_hub_download", _raise(ConnectionError("offline")))
    with pytest.raises(
        SourceUnavailable, match=rf"workload.tokenizer=some/model cannot be loaded from the hub .*{ALTERNATIVES}"
    ):
        load_workload("quality", "local", path=quality_files["path"], tokenizer="some/model")


@pytest.mark.parametrize("kind", ["quality", "narrativeqa"])
@pytest.mark.parametrize("error", ["ConnectionError", "OSError", "DatasetNotFoundError", "DatasetGenerationError"])
def test_an_unreachable_hub_names_the_ways_out(kind: str, error: str, make_tokenizer, monkeypatch):
    import datasets

    error_types = {"ConnectionError": ConnectionError, "OSError": OSError}
    raised = error_types.get(error) or getattr(datasets.exceptions, error)
    monkeypatch.setattr(datasets, "load_dataset", _raise(raised("no network")))
    with pytest.raises(SourceUnavailable, match=rf"^workload.source=hub cannot load .* \({error}\).*{ALTERNATIVES}"):
        load_workload(kind, "hub", tokenizer=make_tokenizer())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ("poetry",),
            "workload.kind=poetry: expected one of .*quality, .*synthetic",
        ),
        (("tokenised", "shape"), "workload.source=shape: expected one of local"),
        (
            ("system_prompts", "hub"),
            "workload.source=hub: expected one of shape, local",
        ),
    ],
)
def test_an_unknown_kind_or_source_lists_the_known_ones(arguments: tuple[str, ...], sentence: str):
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        load_workload(*arguments)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"path": "x"}, "workload.path=x has no quality.npz; expected a file that make_shape wrote, or its folder"),
        ({"queries_per_prompt": 3}, "workload.queries_per_prompt=3 with workload.kind=quality, source=shape: expected"),
        ({"queries_path": "x"}, "workload.queries_path=x with workload.kind=quality, source=shape: expected"),
        ({"vocab_fold": 9}, "workload.vocab_fold=9 with workload.kind=quality, source=shape: expected"),
    ],
)
def test_a_setting_that_would_change_nothing_is_refused(options: dict, sentence: str):
    with pytest.raises(ValueError, match=f"^{sentence}"):
        load_workload("quality", **options)


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("tokenised", r"workload.kind=tokenised has no shape to make; expected one of quality, system_prompts"),
        ("quality", r"workload.path=nowhere is not a file; expected a QuALITY jsonl"),
        ("narrativeqa", r"workload.path=nowhere is not a file; expected NarrativeQA's documents.csv"),
    ],
)
def test_a_shape_that_cannot_be_made_is_refused(tmp_path: Path, make_tokenizer, kind: str, sentence: str):
    with pytest.raises(ValueError, match=f"^{sentence}"):
        make_shape(kind, "nowhere", make_tokenizer(), tmp_path / "out")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut", b"random bytes"], ids=["empty", "cut", "random"])
def test_a_file_that_is_no_shape_is_named(tmp_path: Path, content: bytes):
    path = tmp_path / "mine.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"^shape .*mine\.npz cannot be read; expected a file that make_shape"):
        load_workload("quality", "shape", path=path)
