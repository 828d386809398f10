"""Every format: a line that ends early, fields of later versions, counts that are missing, and repeated lines."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from spanlab.workloads.logs.log import Log
from spanlab.workloads.logs.read import LogSettings, read_log
from spanlab.workloads.logs.source import LOG_FORMATS

from ..support.files import write_lines
from .agent_samples import claude_session, codex_session
from .log_samples import SAMPLES

#: Formats whose files are lines of JSON.
LINES = tuple(name for name, sample in SAMPLES.items() if sample()[:1] == b"{" and sample().rstrip().count(b"\n"))


def changed(rows: list[dict[str, Any]], change: Callable[[dict[str, Any]], None]) -> list[dict[str, Any]]:
    """Return copies of rows of which each was changed."""
    copies = [orjson.loads(orjson.dumps(row)) for row in rows]
    for row in copies:
        change(row)
    return copies


def read_rows(folder: Path, rows: list[dict[str, Any]], **settings: Any) -> Log:
    path = folder / "log.jsonl"
    path.write_bytes(b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows))
    return read_log(path, LogSettings(**settings))


def _newer_claude(row: dict[str, Any]) -> None:
    """Give a line of Claude Code the fields that later versions have, in another order."""
    row |= {"version": "9.1.0", "slug": "a-b-c", "gitBranch": "main", "userType": "external", "entrypoint": "sdk"}
    row |= {"promptId": "p", "permissionMode": "plan", "toolUseResult": {"stdout": "much text " * 50}}
    usage = row["message"].get("usage")
    if usage is not None:
        usage |= {"service_tier": "standard", "inference_geo": "eu", "speed": "fast", "iterations": []}
        usage["server_tool_use"] = {"web_search_requests": 0, "web_fetch_requests": 0}
    for key in sorted(row):
        row[key] = row.pop(key)


def _newer_codex(row: dict[str, Any]) -> None:
    """Give a line of Codex the fields that later versions have, in another order."""
    row |= {"ordinal": 7}
    payload = row["payload"]
    info = payload.get("info")
    if info is not None:
        info["model_context_window"] = 272_000
        info["last_token_usage"] |= {"total_tokens": 1}
        payload["rate_limits"] = {"primary": {"used_percent": 4.0}, "credits": None, "plan_type": "pro"}
    if row["type"] == "turn_context":
        payload |= {"approval_policy": "never", "effort": "high", "summary": "auto", "truncation_policy": {"mode": "x"}}
    for key in sorted(row):
        row[key] = row.pop(key)


@pytest.mark.parametrize(
    ("rows", "change"), [(claude_session(), _newer_claude), (codex_session(), _newer_codex)], ids=["claude", "codex"]
)
def test_fields_of_later_versions_change_no_count(tmp_path: Path, rows: list[dict[str, Any]], change: Any):
    usual, newer = read_rows(tmp_path, rows), read_rows(tmp_path, changed(rows, change))
    assert usual.usage is not None
    assert np.array_equal(newer.usage, usual.usage, equal_nan=True)
    assert newer.pieces.tolist() == usual.pieces.tolist()
    assert newer.output_lens.tolist() == usual.output_lens.tolist()
    mixed = read_rows(tmp_path, [*rows[:3], *changed(rows[3:], change)])
    assert np.array_equal(mixed.usage, usual.usage, equal_nan=True)


def test_written_tokens_of_codex_are_counted(tmp_path: Path):
    rows = codex_session()
    for row in rows:
        if row["type"] == "event_msg":
            row["payload"]["info"]["last_token_usage"]["cache_write_input_tokens"] = 30
    log = read_rows(tmp_path, rows)
    assert log.usage is not None
    assert log.usage.tolist() == [[800.0, 0.0, 30.0], [840.0, 768.0, 30.0]]


def _without_usage(row: dict[str, Any]) -> None:
    if isinstance(row.get("message"), dict):
        row["message"].pop("usage", None)
    if row.get("type") == "event_msg":
        row["payload"]["info"] = None


@pytest.mark.parametrize("rows", [claude_session(), codex_session()], ids=["claude", "codex"])
def test_missing_counts_are_unknown_and_no_verdict_stands(tmp_path: Path, rows: list[dict[str, Any]]):
    log = read_rows(tmp_path, changed(rows, _without_usage))
    assert log.usage is None
    assert log.requests == 2
    assert not log.unread.allows_verdict


# ------------------------------------------------------------------------------
# Every format: files that end early, fields of later versions, counts that are missing, copies of lines, unknown types.
# ------------------------------------------------------------------------------

COUNTS = ("usage", "usageDetails", "usage_object", "cached_tokens", "total_token_usage", "last_token_usage")
TYPES = ("type", "kind", "event", "event_type")
#: Whole files that are one value: a part of one is no log, also where bad lines are skipped.
ONE_VALUE = ("parquet", "openai document", "agent_sessions", "vllm_bench", "trajectory", "guidellm")


def rows_of(name: str) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in SAMPLES[name]().splitlines()]


def mapped(value: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Return a value with each of its objects changed, from the inside."""
    if isinstance(value, dict):
        return change({key: mapped(item, change) for key, item in value.items()})
    return [mapped(item, change) for item in value] if isinstance(value, list) else value


def read_bytes(folder: Path, data: bytes, **settings: Any) -> Log:
    path = folder / "log.jsonl"
    path.write_bytes(data)
    return read_log(path, LogSettings(**settings))


def outcome(folder: Path, data: bytes, **settings: Any) -> Log | str:
    """Return the log, or the sentence with which it is refused."""
    try:
        return read_bytes(folder, data, **settings)
    except ValueError as error:
        return str(error)


def test_every_format_has_a_sample():
    assert {name.partition(" ")[0] for name in SAMPLES} == set(LOG_FORMATS) - {"ragpulse"}  # which is a folder


@pytest.mark.parametrize("name", SAMPLES)
def test_file_that_ends_early_is_refused_with_its_place(tmp_path: Path, name: str):
    data = SAMPLES[name]()
    cut = data[: -len(data) // 5] if name != "burstgpt" else data[: data.rstrip().rindex(b",", 0, -20)]
    place = "log.jsonl:[0-9]+: |line 1 |byte [0-9]+|complete JSON value|readable Parquet"
    with pytest.raises(ValueError, match=place):
        read_bytes(tmp_path, cut)
    log = outcome(tmp_path, cut, bad_lines="skip")
    if name in ONE_VALUE:
        assert isinstance(log, str)
    else:  # if nothing is left but bad lines, the sentence says so
        notes = log if isinstance(log, str) else " ".join(log.notes)
        assert "bad lines (" in notes or "within which the capture ends" in notes


@pytest.mark.parametrize("name", [name for name in LINES if name != "otel"])
def test_fields_of_later_versions_are_no_content(tmp_path: Path, name: str):
    rows, usual = rows_of(name), read_bytes(tmp_path, SAMPLES[name]())
    later = {"zz_later": {"a": 1, "b": [1, 2]}, "aa_flag": True, "mm_count": 7}
    half = max(1, len(rows) // 2)  # a file of two versions
    mixed = read_rows(tmp_path, [*rows[:half], *mapped(rows[half:], lambda row: dict(sorted((row | later).items())))])
    assert mixed.pieces.tolist() == usual.pieces.tolist()
    assert mixed.lengths.tolist() == usual.lengths.tolist()
    assert mixed.output_lens.tolist() == usual.output_lens.tolist()
    assert np.array_equal(mixed.arrived_ns, usual.arrived_ns)
    if usual.usage is not None:
        assert np.array_equal(mixed.usage, usual.usage, equal_nan=True)


@pytest.mark.parametrize("name", LINES)
def test_counts_that_are_missing_are_unknown(tmp_path: Path, name: str):
    rows, usual = rows_of(name), read_bytes(tmp_path, SAMPLES[name]())
    less = mapped(rows, lambda row: {key: value for key, value in row.items() if key not in COUNTS})
    if name == "openai_answers":  # whose prompts have no other length
        with pytest.raises(ValueError, match="2 requests without a length of their prompt"):
            read_rows(tmp_path, less)
        return
    log = read_rows(tmp_path, less)
    assert log.requests == usual.requests
    if log.usage is not None and usual.usage is not None:  # counts outside usage, and no others, are as before
        known = ~np.isnan(log.usage)
        assert np.array_equal(log.usage[known], usual.usage[known])


#: Of formats whose records have ids: an id in each record, by format.
_IDS: dict[str, Callable[[int], dict[str, Any]]] = {
    "openai": lambda number: {"request_id": f"r{number}"},
    "openai proxy": lambda number: {"id": f"r{number}"},
    "openai_answers": lambda number: {"id": f"r{number}"},
    "sglang": lambda number: {"rid": f"r{number}"},
    "aiperf": lambda number: {"metadata": {"x_request_id": f"r{number}"}},
} | dict.fromkeys(
    ("claude_code", "codex", "otel", "langfuse", "litellm", "sagemaker", "sharegpt", "tracelab lines"), lambda _: {}
)
_IDS |= {"gemini": lambda number: {"response": {"responseId": f"r{number}"}}}
_IDS |= dict.fromkeys(("gemini_cli", "bedrock invocations", "helicone", "portkey", "openrouter"), lambda _: {})


@pytest.mark.parametrize("name", _IDS)
def test_copies_of_a_record_count_once(tmp_path: Path, name: str):
    rows = rows_of(name)
    for number, row in enumerate(rows):
        for key, value in _IDS[name](number).items():
            row[key] = row[key] | value if isinstance(row.get(key), dict) else value
    once, twice = read_rows(tmp_path, rows), read_rows(tmp_path, [*rows, *rows])
    assert twice.requests == once.requests
    assert twice.pieces.tolist() == once.pieces.tolist()
    assert any("repeat an earlier" in note or "another file has too" in note for note in twice.notes)


#: Of those without ids in their records; calls of agentic_mooncake have names, and a capture has its settings once.
@pytest.mark.parametrize("name", [name for name in LINES if name not in (*_IDS, "agentic_mooncake", "vllm_vcr")])
def test_other_formats_keep_equal_records(tmp_path: Path, name: str):
    rows = rows_of(name)
    once, twice = read_rows(tmp_path, rows), read_rows(tmp_path, [*rows, *rows], backwards="sort")
    assert twice.requests == 2 * once.requests  # without an id, an equal record is another request


@pytest.mark.parametrize(
    ("name", "key", "kind"),
    [
        ("openai", "timestamp", "timestamp"),
        ("sglang", "timestamp", "timestamp"),
        ("lmcache", "timestamp", "timestamp"),
        ("litellm", "endTime", "last_token_ts"),
        ("langfuse", "endTime", "last_token_ts"),
        ("openai proxy", "endTime", "last_token_ts"),
    ],
)
def test_time_of_no_request_is_a_bad_line(tmp_path: Path, name: str, key: str, kind: str):
    rows = rows_of(name)
    rows[-1][key] = 1e30 if kind == "timestamp" else 5.0
    with pytest.raises(ValueError, match=f"log.jsonl:{len(rows)}: {kind}: expected a time within"):
        read_rows(tmp_path, rows)
    log = read_rows(tmp_path, rows, bad_lines="skip")
    assert log.requests == 1
    assert any(f"bad lines ({kind}, first in line {len(rows)})" in note for note in log.notes)


@pytest.mark.parametrize("name", LINES)
def test_unknown_types_are_refused_or_counted(tmp_path: Path, name: str):
    rows = rows_of(name)
    odd = mapped(rows[-1], lambda row: row | {key: "hologram" for key in TYPES if isinstance(row.get(key), str)})
    usual = read_rows(tmp_path, rows)
    log = outcome(tmp_path, b"\n".join(map(orjson.dumps, [*rows[:-1], odd])))
    if isinstance(log, str):
        assert f"log.jsonl:{len(rows)}: " in log
    else:
        is_alike = log.requests == usual.requests and log.lengths.tolist() == usual.lengths.tolist()
        assert is_alike or set(log.notes) - set(usual.notes)  # never dropped without a word


def openai_rows() -> list[dict[str, Any]]:
    """Return two bodies of chat completions with usage."""
    usage = {"prompt_tokens": 40, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 16}}
    return [
        {"messages": [{"role": "user", "content": f"{'a long text ' * 20}{n}"}], "usage": usage, "time": n}
        for n in range(2)
    ]


@pytest.mark.parametrize(
    ("block", "kind"),
    [
        ({"type": "hologram", "data": "x" * 400}, "hologram"),
        ({"type": "server_tool_use", "id": "s", "name": "search", "input": {"q": "text"}}, "server_tool_use"),
        ({"type": "container_upload", "file_id": "f"}, "container_upload"),
    ],
)
def test_unknown_blocks_are_counted_by_type(tmp_path: Path, block: dict[str, Any], kind: str):
    rows = openai_rows()
    rows[1]["messages"].append({"role": "assistant", "content": [block]})
    log = read_rows(tmp_path, rows)
    assert log.requests == 2
    known = any(kind in note for note in log.notes)
    read_as_text = log.prompt_tokens[1] > log.prompt_tokens[0] + 1
    assert known or read_as_text  # never dropped without a word


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"prompt_tokens": 90, "prompt_tokens_details": {"cached_tokens": 64, "audio_tokens": 0}}, (90, 64)),
        ({"input_tokens": 90, "input_tokens_details": {"cached_tokens": 64}, "output_tokens": 1}, (90, 64)),
        ({"prompt_cache_hit_tokens": 64, "prompt_cache_miss_tokens": 26, "prompt_tokens": 90}, (90, 64)),
        ({"input_tokens": 6, "cache_read_input_tokens": 64, "cache_creation_input_tokens": 20}, (90, 64)),
        (
            {
                "cache_creation": {"ephemeral_1h_input_tokens": 15, "ephemeral_5m_input_tokens": 5},
                "cache_read_input_tokens": 64,
                "cache_creation_input_tokens": 20,
                "input_tokens": 6,
                "service_tier": "standard",
            },
            (90, 64),
        ),
        ({"inputTokens": 6, "cacheReadInputTokens": 64, "cacheWriteInputTokens": 20, "totalTokens": 95}, (90, 64)),
        ({"inputTokens": 90, "cachedInputTokens": 64, "totalTokens": 95}, (90, 64)),
        ({"promptTokenCount": 90, "cachedContentTokenCount": 64, "totalTokenCount": 95}, (90, 64)),
        ({"prompt_tokens": 90, "prompt_tokens_details": None}, (90, None)),
        ({"prompt_tokens": 90, "prompt_tokens_details": {"cached_tokens": None}}, (90, None)),
    ],
)
def test_counts_of_every_provider_are_exact(tmp_path: Path, usage: dict[str, Any], expected: tuple[int, int | None]):
    events = [{"message": {"usage": usage}}, {"usage": {"output_tokens": 5}}, "[DONE]"]
    stream = "".join(f"event: x\ndata: {json.dumps(event)}\n\n" for event in events)
    places = (
        {"usage": usage},
        usage,
        {"response": {"usage": usage}},
        {"response": stream},
        {"response": {"body": stream}},
    )
    for beside in places:
        log = read_rows(tmp_path, [row | {"usage": None} | beside for row in openai_rows()])
        assert log.usage is not None
        prompt, cached = log.usage[0, :2].tolist()
        assert prompt == expected[0]
        assert np.isnan(cached) if expected[1] is None else cached == expected[1]
    assert log.output_lens[0] == 5


def test_folder_of_bodies_is_one_log_by_time(tmp_path: Path):
    rows = openai_rows()
    whole = read_rows(tmp_path, rows)
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    write_lines(folder / "b.jsonl", rows[0])
    write_lines(folder / "inner" / "a.jsonl", rows[1])
    write_lines(folder / "other.json", {"a": 1})
    log = read_log(folder, LogSettings())
    assert (log.format, log.fingerprint) == ("openai", whole.fingerprint)
    assert "not counted: 1 files of the folder without a body of a request" in log.notes
    write_lines(folder / "c.jsonl", rows[0] | {"time": 99}, {"messages": 5})
    with pytest.raises(ValueError, match=r"c\.jsonl:2: messages: expected a list"):
        read_log(folder, LogSettings())


def test_bad_lines_of_a_folder_are_counted_by_file(tmp_path: Path):
    rows, bad = openai_rows(), {"messages": 5, "time": 0}
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    write_lines(folder / "a.jsonl", rows[0], bad, bad)
    write_lines(folder / "inner" / "b.jsonl", rows[1], bad)
    log = read_log(folder, LogSettings(bad_lines="skip"))
    assert log.requests == 2
    assert "bad lines by file: a.jsonl (2), inner/b.jsonl (1)" in log.notes
    assert any("bad lines (messages, first in line 2 of a.jsonl) (3 times" in note for note in log.notes)
    for number in range(6):
        write_lines(folder / f"c{number}.jsonl", rows[0], bad)
    notes = read_log(folder, LogSettings(bad_lines="skip")).notes
    [note] = [note for note in notes if note.startswith("bad lines by file: a.jsonl (2), ")]
    assert note.endswith(" and 3 other files (3)")
