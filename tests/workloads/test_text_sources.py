"""Text sources yield prompts without answers, and missing inputs raise an error of one sentence."""

import re
from pathlib import Path

import numpy as np
import pytest

from spanlab.workloads import SourceUnavailable, make_shape
from spanlab.workloads.text import QUALITY, Document, Question, cache_key

from ..support.files import write_lines
from .factories import load_workload, token_lists, words_of


def test_quality_prompt_is_laid_out_in_chat_turns(quality_files: dict[str, Path]):
    request = load_workload("quality", "local", **quality_files).requests[1]
    prompt = words_of(request.tokens, quality_files["tokenizer"])
    assert re.fullmatch(
        r"<\|im_start\|> system .* <\|im_end\|> <\|im_start\|> user Article : alphaword0 .* alphaword19 "
        r"Question : why alpha w1 1 \? A \. pickaalphaw11 B \. pickbalphaw11 C \. pickcalphaw11 D \. pickdalphaw11 "
        r"<\|im_end\|> <\|im_start\|> assistant Answer :",
        prompt,
    )
    assert request.answer == "B. pickbalphaw11"
    assert request.output_len == 3
    assert [(span.independent, span.reusable) for span in request.spans] == [
        (False, False),
        (True, True),
        (False, False),
    ]


def test_without_turn_marks_the_prompt_is_plain_text(quality_files: dict[str, Path], make_tokenizer):
    tokenizer = make_tokenizer(quality_files["path"].read_text(encoding="utf-8"), marks=False, name="plain")
    request = load_workload("quality", "local", path=quality_files["path"], tokenizer=tokenizer).requests[0]
    prompt = words_of(request.tokens, tokenizer)
    assert "im_start" not in prompt
    assert prompt.startswith("You read an article")
    assert prompt.endswith("Answer :")


def test_a_turn_mark_spelled_out_in_a_text_closes_no_turn(quality_files: dict[str, Path]):
    path = quality_files["path"]
    path.write_text(path.read_text(encoding="utf-8").replace("alphaword3 ", "<|im_end|> "), encoding="utf-8")
    request = load_workload("quality", "local", path=path, tokenizer=quality_files["tokenizer"]).requests[0]
    assert "alphaword2 [UNK] im_end [UNK] alphaword4" in words_of(request.tokens, quality_files["tokenizer"])


def test_questions_share_their_instruction_and_document_spans(quality_files: dict[str, Path]):
    requests = load_workload("quality", "local", **quality_files).requests
    assert len({request.spans[0].tokens.tobytes() for request in requests}) == 1
    assert len({request.spans[1].tokens.tobytes() for request in requests}) == 3
    assert len({request.spans[2].tokens.tobytes() for request in requests}) == 12


def test_the_local_form_with_gold_index_reads_alike(quality_files: dict[str, Path], quality_rows, tmp_path: Path):
    official = load_workload("quality", "local", **quality_files)
    merged: dict[str, dict] = {}
    for row in quality_rows:
        entry = merged.setdefault(
            row["article_id"], {"doc_id": row["article_id"], "article": row["article"], "questions": []}
        )
        for question in row["questions"]:
            entry["questions"].append(
                {
                    "question": question["question"],
                    "options": question["options"],
                    "gold_index": question["gold_label"] - 1,
                }
            )
    path = write_lines(tmp_path / "merged.jsonl", *merged.values())
    other = load_workload("quality", "local", path=path, tokenizer=quality_files["tokenizer"])
    assert token_lists(official) == token_lists(other)
    assert [r.answer for r in official.requests] == [r.answer for r in other.requests]


def test_narrativeqa_asks_every_question_once_and_holds_no_answer(narrativeqa_files: dict[str, Path]):
    workload = load_workload("narrativeqa", "local", **narrativeqa_files)
    assert [(r.group_id, r.answer, r.output_len) for r in workload.requests] == [
        (0, "zorblax\nthe zorblax creature", 1),
        (0, "yesterglorp", 1),
        (1, "quuxship\nold quuxship", 1),
    ]
    for request in workload.requests:
        prompt = words_of(request.tokens, narrativeqa_files["tokenizer"])
        assert not re.search("zorblax|quuxship|yesterglorp", prompt)
        assert "[UNK]" not in prompt
    assert workload.provenance.detail == "2 NarrativeQA stories, 3 questions, narrative, toy tokenizer"


def test_narrativeqa_also_reads_the_folder_stories(narrativeqa_files: dict[str, Path]):
    tokens = token_lists(load_workload("narrativeqa", "local", **narrativeqa_files))
    folder = narrativeqa_files["path"]
    (folder / "tmp").rename(folder / "stories")
    assert token_lists(load_workload("narrativeqa", "local", **narrativeqa_files)) == tokens
    (folder / "stories" / "n2.content").unlink()
    with pytest.raises(SourceUnavailable, match=r"workload.path=.* has no story n2.content; expected .*"):
        load_workload("narrativeqa", "local", **narrativeqa_files)


def test_system_prompts_come_before_distinct_chat_queries(prompt_files: dict[str, Path]):
    workload = load_workload("system_prompts", "local", queries_per_prompt=6, **prompt_files)
    prompts = [words_of(request.tokens, prompt_files["tokenizer"]) for request in workload.requests]
    assert re.fullmatch(
        r"<\|im_start\|> system be kind <\|im_end\|> <\|im_start\|> user ask\d <\|im_end\|> <\|im_start\|> assistant",
        prompts[0],
    )
    assert (
        sum("be kind" in prompt for prompt in prompts[:6]) == sum("be brief" in prompt for prompt in prompts[6:]) == 6
    )
    assert len(set(prompts)) == 12
    assert [(s.independent, s.reusable) for s in workload.requests[0].spans] == [(False, True), (False, False)]
    assert {request.output_len for request in workload.requests} == {64}


def test_token_id_table_stands_in_for_the_folder(prompt_files: dict[str, Path], tmp_path: Path):
    import pyarrow as pa
    from pyarrow import parquet
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(prompt_files["tokenizer"]))
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in ("be kind", "be brief")]
    path = tmp_path / "prompts.parquet"
    parquet.write_table(pa.table({"prompt_id": [0, 1], "tokens": ids}), path)
    chosen = {"queries_per_prompt": 3}
    text = load_workload("system_prompts", "local", **prompt_files, **chosen)
    table = load_workload("system_prompts", "local", **(prompt_files | {"path": path}), **chosen)
    assert token_lists(text) == token_lists(table)


def test_few_queries_are_all_asked(prompt_files: dict[str, Path]):
    assert len(load_workload("system_prompts", "local", **prompt_files).requests) == 2 * 6


def test_a_made_shape_is_read_from_its_file_and_its_folder(quality_files: dict[str, Path], tmp_path: Path):
    made = make_shape("quality", out=tmp_path / "shapes", **quality_files)
    text = load_workload("quality", "local", **quality_files)
    for path in (made, made.parent):
        shape = load_workload("quality", "shape", path=path)
        assert [request.num_tokens for request in shape.requests] == [request.num_tokens for request in text.requests]
        assert shape.provenance.kind == "measured shape"


def test_more_queries_than_there_are_is_refused(prompt_files: dict[str, Path]):
    with pytest.raises(ValueError, match=r"workload.queries_per_prompt=7; expected 1 to 6"):
        load_workload("system_prompts", "local", queries_per_prompt=7, **prompt_files)


def test_a_folder_or_a_hub_name_finds_the_same_tokenizer(quality_files: dict[str, Path], monkeypatch):
    file = quality_files["tokenizer"]
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda name, filename: str(file))
    loaded = [
        load_workload("quality", "local", path=quality_files["path"], tokenizer=source).requests[0].tokens.tolist()
        for source in (file, file.parent, str(file.parent), "some/model")
    ]
    assert loaded[0] == loaded[1] == loaded[2] == loaded[3]


@pytest.fixture
def on_hub(quality_rows: list[dict], narrativeqa_rows: list[dict], monkeypatch: pytest.MonkeyPatch) -> None:
    """The toys as on the hub, with one question per row."""
    import datasets

    questions = [
        {"article_id": row["article_id"], "article": row["article"], **question}
        for row in quality_rows
        for question in row["questions"]
    ]
    rows = {"tasksource/QuALITY": questions, "deepmind/narrativeqa": narrativeqa_rows}
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: datasets.Dataset.from_list(rows[name]))


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("quality", "hub text: 3 QuALITY articles, 12 questions, tasksource/QuALITY validation, toy tokenizer"),
        ("narrativeqa", "hub text: 2 NarrativeQA stories, 3 questions, deepmind/narrativeqa validation, toy tokenizer"),
    ],
)
def test_text_from_the_hub_equals_the_local_one(request: pytest.FixtureRequest, on_hub, kind: str, line: str):
    files = request.getfixturevalue(f"{kind}_files")
    hub, local = load_workload(kind, "hub", tokenizer=files["tokenizer"]), load_workload(kind, "local", **files)
    assert token_lists(hub) == token_lists(local)
    assert [r.answer for r in hub.requests] == [r.answer for r in local.requests]
    assert hub.provenance.line() == line


# -- A text is tokenised once. ---


def test_a_second_load_reads_the_cache_and_does_not_tokenise(quality_files, tmp_path: Path, monkeypatch):
    cache = tmp_path / "cache"
    first = load_workload("quality", "local", cache_dir=cache, **quality_files)
    monkeypatch.setattr("spanlab.workloads.text.encode_documents", _refuse)
    second = load_workload("quality", "local", cache_dir=cache, **quality_files)
    for before, after in zip(first.requests, second.requests, strict=True):
        assert [span.tokens.tolist() for span in before.spans] == [span.tokens.tolist() for span in after.spans]
        assert [span.tokens.dtype for span in after.spans] == [np.dtype(np.int32)] * 3
        for key in ("answer", "output_len", "boundaries"):
            assert getattr(before, key) == getattr(after, key)
    assert first.provenance == second.provenance


def _refuse(*_):
    raise AssertionError("tokenised again")


@pytest.mark.parametrize("damage", [lambda content: b"", lambda content: content[:300], lambda content: b"x" * 50])
def test_a_corrupt_cache_file_is_rebuilt(quality_files, tmp_path: Path, damage):
    cache = tmp_path / "cache"
    first = load_workload("quality", "local", cache_dir=cache, **quality_files)
    (entry,) = cache.iterdir()
    whole = entry.read_bytes()
    entry.write_bytes(damage(whole))
    second = load_workload("quality", "local", cache_dir=cache, **quality_files)
    assert token_lists(first) == token_lists(second)
    assert entry.read_bytes() == whole
    assert list(cache.iterdir()) == [entry]


def test_the_cache_key_depends_on_everything_that_decides_the_tokens():
    def key(name="n", body="text", question="q", answer="a", tokenizer="t"):
        return cache_key(name, [Document(body, (Question(question, answers=(answer,)),))], QUALITY, tokenizer)

    keys = [key(name="m"), key(body="texts"), key(question="p"), key(answer="b"), key(tokenizer="u")]
    assert len({key(), *keys}) == 6
    assert key() == key()
