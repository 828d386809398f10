"""Missing and invalid inputs raise an error of one sentence."""

import json
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
        ("[1]", "line 1 is \\[1\\], not a JSON object"),
        ('{"article": "x"}', "line 1 has no field 'article_id'"),
        ('{"article_id": 1}', "line 1 has no field 'article'"),
        ('{"article_id": 1, "article": "x", "questions": [{"options": []}]}', "line 1 has no field 'question'"),
        (
            '{"article_id": 1, "article": "x", "questions": [{"question": "q", "options": ["a"], "gold_label": 2}]}',
            "line 1 has the gold option number 1 of 1",
        ),
        ('{"article_id": 1, "article": 5}', "line 1 has article=5, not a string"),
        ('{"article_id": 1, "article": "x", "question": null}', "line 1 has question=null, not a string"),
        ('{"article_id": 1, "article": "x", "questions": {}}', "line 1 has questions={}, not a list"),
        ('{"article_id": 1, "article": "x", "questions": [1]}', "line 1 has 1 in questions, not an object"),
        ('{"article_id": 1, "article": "x", "question": "q", "options": "ab"}', 'line 1 has options="ab", not a list'),
        ('{"article_id": 1, "article": "x", "question": "q", "options": [1]}', "line 1 has 1 in options, not a string"),
        (
            '{"article_id": 1, "article": "x", "question": "q", "options": ["a"], "gold_label": "1"}',
            'line 1 has gold_label="1", not a whole number',
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
def test_a_source_without_questions_or_text_is_refused(tmp_path: Path, make_tokenizer, row: str, problem: str):
    path = write(tmp_path / "bad.jsonl", row)
    with pytest.raises(ValueError, match=rf"^workload.kind=quality {problem}"):
        load_workload("quality", "local", path=path, tokenizer=make_tokenizer())


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"document_id,question,answer1,answer2\nn1,who ?\n", "line 2 has no answer1"),
        (b"document_id,question,answer1\nn1,who ?,x\n", "has no column 'answer2'"),
        (b"document_id,question,answer1,answer2,question\nn1,who ?,x,y,z\n", "has 2 columns 'question'"),
        (b"document_id,question,answer1,answer2\nn1,\xff,x,y\n", "is not UTF-8 text, at byte 40"),
        (b'document_id,question,answer1,answer2\nn1,who ?,x,y\n"' + b"x" * 200_000, "line 3 is not CSV"),
    ],
)
def test_a_bad_narrativeqa_table_gets_its_sentence(narrativeqa_files: dict[str, Path], data: bytes, problem: str):
    (narrativeqa_files["path"] / "qaps.csv").write_bytes(data)
    with pytest.raises(ValueError, match=rf"^workload.path=.*qaps.csv {problem}.*; expected the NarrativeQA folder"):
        load_workload("narrativeqa", "local", **narrativeqa_files)


@pytest.mark.parametrize(
    ("lengths", "tale", "words", "problem"),
    [
        ("n1,many", {}, {}, "path=.*has story_word_count='many' for n1; expected a whole number from 0 up"),
        ("n1,9", {"story": None}, {}, "questions_path=.*line 1 has story=null, not a string"),
        ("n1,9", {"questions": [{}]}, {}, "questions_path=.*line 1 has no field 'question'"),
        ("n1,9", {"questions": [{"question": "q", "answers": [1]}]}, {}, "questions_path=.*has 1 in answers, not a"),
        ("n1,9", {}, {"article": [1]}, r"words_path=.*line 1 has article=\[1\], not a string"),
        ("n1,9", {}, {"article": " "}, "words_path=.*has no word in any article"),
    ],
)
def test_bad_inputs_of_the_modelled_shape_get_their_sentence(
    tmp_path: Path, make_tokenizer, lengths: str, tale: dict, words: dict, problem: str
):
    entries = [{"question": f"q{number}", "answers": ["a"]} for number in range(30)]
    files = {
        "questions_path": write(tmp_path / "t.jsonl", json.dumps({"story": "s", "questions": entries} | tale)),
        "words_path": write(tmp_path / "w.jsonl", json.dumps({"article": "a"} | words)),
    }
    path = write(tmp_path / "documents.csv", f"document_id,story_word_count\n{lengths}\n")
    with pytest.raises(ValueError, match=rf"^workload.{problem}"):
        make_shape("narrativeqa", path, make_tokenizer("a s q0"), tmp_path / "out", **files)


@pytest.mark.parametrize(
    ("name", "data", "problem"),
    [
        ("queries.jsonl", b'{"query": null}', r"^workload.queries_path=.* line 1 has query=null, not a string"),
        ("prompts/a.md", b"be \xff", r"^workload.path=.*a.md is not UTF-8 text, at byte 3"),
        ("toy/tokenizer.json", b'{"model": null}', r"^workload.tokenizer=.* has model=null; expected a tokenizer"),
        ("toy/tokenizer.json", b'{"model": {}}', r"^workload.tokenizer=toy is not a tokenizer file \("),
    ],
)
def test_a_bad_file_of_system_prompts_gets_its_sentence(
    prompt_files: dict[str, Path], tmp_path: Path, name: str, data: bytes, problem: str
):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=problem):
        load_workload("system_prompts", "local", **prompt_files)


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
        (("poetry",), "workload.kind=poetry: expected one of .*quality, .*synthetic, .*"),
        (("tokenised", "shape"), "workload.source=shape: expected one of local"),
        (("system_prompts", "hub"), "workload.source=hub: expected one of shape, local"),
    ],
)
def test_an_unknown_kind_or_source_lists_the_known_ones(arguments: tuple[str, ...], sentence: str):
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        load_workload(*arguments)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"path": "x"}, "workload.path=x has no quality.npz; expected a file that make_shape wrote, or its folder"),
        ({"queries_per_prompt": 3}, "workload.queries_per_prompt=3 with workload.kind=quality: expected"),
        ({"queries_path": "x"}, "workload.queries_path=x with workload.kind=quality: expected"),
        ({"vocab_fold": 9}, "workload.vocab_fold=9 with workload.kind=quality: expected"),
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
