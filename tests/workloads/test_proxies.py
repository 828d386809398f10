"""Exports of Helicone, Portkey and OpenRouter: one request per call, with the counts of the provider."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spanlab.workloads.logs.log import Log
from spanlab.workloads.logs.read import LogSettings, read_log

from ..support.files import write_lines
from .cloud_samples import (
    ASKED,
    chat_body,
    chat_usage,
    converse_usage,
    gemini_usage,
    helicone_lines,
    helicone_row,
    openrouter_lines,
    portkey_lines,
    portkey_row,
)
from .test_claude_code import sums, texts

PROMPTS = [f"user\n{ASKED}", f"user\n{ASKED}|assistant\nthe first|user\nand now?"]


def read(folder: Path, *rows: Any, **settings: Any) -> Log:
    return read_log(write_lines(folder / "export", *rows), LogSettings(**settings))


def set_aside(log: Log) -> set[str]:
    return {note.removeprefix("not counted: ") for note in log.notes if note.startswith("not counted")}


def test_rows_of_helicone_have_the_counts_of_the_provider(tmp_path: Path):
    log = read(tmp_path, *helicone_lines())
    assert (log.format, texts(log), sums(log)) == ("helicone", PROMPTS, (68, 32, 0, 13))
    assert log.usage[:, :2].tolist() == [[40, 0], [60, 32]]
    assert log.observed.first_token.tolist() == [0.5, 5.5]
    assert log.observed.last_token.tolist() == [2.0, 7.0]
    assert log.waits_ns.tolist() == [0, 3_000_000_000]
    assert (log.tenant_names, log.sessions.tolist()) == (("ann",), [0, 0])


@pytest.mark.parametrize("shape", ["page", "list", "text"])
def test_every_shape_of_helicone_reads_alike(tmp_path: Path, shape: str):
    rows = helicone_lines()
    path = tmp_path / "export"
    if shape == "text":
        texts_of = [{key: json.dumps(row[key]) for key in ("request_body", "response_body")} for row in rows]
        write_lines(path, *(row | text for row, text in zip(rows, texts_of, strict=True)))
    else:
        path.write_text(json.dumps(rows if shape == "list" else {"data": rows, "error": None}, indent=2))
    log = read_log(path, LogSettings())
    assert (log.format, log.fingerprint) == ("helicone", read(tmp_path, *rows).fingerprint)


@pytest.mark.parametrize(
    ("answer", "row", "expected"),
    [
        ({"usage": chat_usage(60, 32, 9)}, {}, (28, 32, 0, 9)),
        ({"usage": {"input_tokens": 5, "cache_read_input_tokens": 30, "output_tokens": 8}}, {}, (5, 30, 0, 8)),
        ({"usageMetadata": gemini_usage(60, 32, 9)}, {}, (28, 32, 0, 9)),
        ({"usage": converse_usage(5, 30, 2, 8)}, {}, (5, 30, 2, 8)),
        ({}, {}, (28, 32, 0, 7)),  # by its own counts, the prompt without cached tokens
        (None, {"prompt_cache_read_tokens": None, "prompt_cache_write_tokens": None}, (28, 0, 0, 7)),
        ("data: " + json.dumps({"usage": chat_usage(60, 32, 9)}) + "\n\ndata: [DONE]", {}, (28, 32, 0, 9)),
    ],
)
def test_counts_of_the_answer_precede_those_of_the_row(
    tmp_path: Path, answer: Any, row: dict[str, Any], expected: tuple[int, ...]
):
    assert sums(read(tmp_path, helicone_row("a", 0, chat_body(), None, response_body=answer, **row))) == expected


@pytest.mark.parametrize("body", [None, {}, {"helicone_message": "fetching body from signed_url"}])
def test_rows_without_bodies_have_lengths_only(tmp_path: Path, body: Any):
    log = read(tmp_path, helicone_row("a", 0, body, None, response_body=body, signed_body_url="https://example.com"))
    assert (str(log.ids), log.prompt_tokens.tolist(), sums(log)) == ("none", [60], (28, 32, 0, 7))


def test_rows_of_helicone_that_called_no_model_are_counted(tmp_path: Path):
    body, usage = chat_body(), chat_usage(40, 0, 6)
    none = {"prompt_tokens": None, "prompt_cache_read_tokens": None}
    rows = [
        *helicone_lines(),
        helicone_row("c", 9, body, usage, cache_reference_id="7e0ac3c4"),
        helicone_row("d", 9, body, usage, request_path="https://api.example.com/v1/embeddings"),
        helicone_row("e", 9, body, None, response_status=429, **none),
        helicone_lines()[0],
    ]
    log = read(tmp_path, *rows)
    assert sums(log) == (68, 32, 0, 13)
    assert set_aside(log) == {
        "1 spans that are no call of a model (answered by Helicone's own cache)",
        "1 spans that are no call of a model (embeddings)",
        "1 calls that failed, without a count of tokens",
        "1 spans that repeat an earlier one",
    }


def test_lines_of_portkey_have_the_counts_of_the_provider(tmp_path: Path):
    log = read(tmp_path, *portkey_lines())
    assert (log.format, texts(log), sums(log)) == ("portkey", PROMPTS, (68, 32, 0, 13))
    assert log.observed.last_token.tolist() == [2.0, 7.0]
    assert (log.tenant_names, log.sessions.tolist()) == (("ann",), [0, 0])


@pytest.mark.parametrize("shape", ["bodies", "texts", "columns"])
def test_every_shape_of_portkey_reads_alike(tmp_path: Path, shape: str):
    def shaped(row: dict[str, Any]) -> dict[str, Any]:
        request, response = row["request"]["body"], row["response"]["body"]
        if shape == "columns":
            rest = {key: value for key, value in row.items() if key not in ("request", "response")}
            return rest | {"request.body": request, "response.body": response}
        if shape == "texts":
            return row | {"request": json.dumps(row["request"]), "response": json.dumps(row["response"])}
        return row | {"request": request, "response": response}

    log = read(tmp_path, *map(shaped, portkey_lines()))
    assert (log.format, texts(log), sums(log)) == ("portkey", PROMPTS, (68, 32, 0, 13))


def test_lines_of_portkey_without_columns_have_lengths_only(tmp_path: Path):
    rows = [{key: value for key, value in row.items() if key not in ("request", "response")} for row in portkey_lines()]
    log = read(tmp_path, *rows)
    assert (str(log.ids), log.prompt_tokens.tolist(), sums(log)) == ("none", [40, 60], (100, 0, 0, 13))
    np.testing.assert_array_equal(log.usage[:, 1], [np.nan, np.nan])


def test_lines_of_portkey_that_called_no_model_are_counted(tmp_path: Path):
    body, usage = chat_body(), chat_usage(40, 0, 6)
    failed = portkey_row("d", 9, body, usage, is_success=0, req_units=0, response={"status": 500, "body": {}})
    log = read(tmp_path, *portkey_lines(), portkey_row("c", 9, body, usage, cache_status="HIT"), failed)
    assert sums(log) == (68, 32, 0, 13)
    assert set_aside(log) == {
        "1 spans that are no call of a model (answered by Portkey's own cache)",
        "1 calls that failed, without a count of tokens",
    }


@pytest.mark.parametrize("inside", [False, True])
def test_records_of_openrouter_have_lengths_and_counts(tmp_path: Path, inside: bool):
    log = read(tmp_path, *({"data": row} if inside else row for row in openrouter_lines()))
    assert (log.format, str(log.ids), log.prompt_tokens.tolist()) == ("openrouter", "none", [40, 48])
    assert sums(log) == (56, 32, 0, 11)


@pytest.mark.parametrize(
    ("good", "bad", "problem"),
    [
        (helicone_lines, {"request_created_at": "soon"}, "request_created_at: expected a number or a date"),
        (helicone_lines, {"time_to_first_token": -1}, "time_to_first_token: expected a number from 0"),
        (helicone_lines, {"request_body": {"messages": [7]}}, "messages: expected a list of objects"),
        (portkey_lines, {"created_at": []}, "created_at: expected a number or a date"),
        (portkey_lines, {"trace_id": []}, "trace_id: expected a text or a number"),
        (openrouter_lines, {"model": []}, "model: expected a text or a number"),
    ],
)
def test_bad_call_is_named_or_skipped(tmp_path: Path, good: Any, bad: dict[str, Any], problem: str):
    rows = good()
    other = {key: "z" for key in ("request_id", "id") if key in rows[0]}
    broken = rows[0] | other | bad
    with pytest.raises(ValueError, match=f"export:3: {problem}"):
        read(tmp_path, *rows, broken)
    log = read(tmp_path, *rows, broken, bad_lines="skip")
    assert sums(log) == sums(read(tmp_path, *rows))
    assert any("bad lines" in note and "(1 times" in note for note in log.notes)
