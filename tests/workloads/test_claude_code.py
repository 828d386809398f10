"""Sessions of Claude Code: each call once, with the history before it and the provider's own counts."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spanlab.workloads.logs.log import Log
from spanlab.workloads.logs.read import LogSettings, read_log
from spanlab.workloads.logs.rendering import sections_of

from ..support.files import write_lines
from .agent_samples import ClaudeSession, claude_session, clock, counts, result, text, tool

LONG = "a sentence that is long enough to be several pieces of sixteen tokens, and is said again. " * 6


def read(folder: Path, rows: list[Any], **settings: Any) -> Log:
    return read_log(write_lines(folder / "session", *rows), LogSettings(**settings))


def sums(log: Log) -> tuple[int, int, int, int]:
    """Return fresh, cached, created and output tokens."""
    prompt, cached, created = (int(total) for total in np.nansum(log.usage, axis=0))
    return prompt - cached - created, cached, created, int(log.output_lens.sum())


def texts(log: Log) -> list[str]:
    """Return the text of each prompt, parts joined by a bar."""
    sections = [[] if prompt is None else sections_of(prompt, log.source.options) for prompt in log.source.prompts]
    return [
        "|".join(part.content if isinstance(part.content, str) else f"<{part.content.kind}>" for part in parts)
        for parts in sections
    ]


def tokens(content: str) -> int:
    return -(-len(content.encode()) // 4)


def test_each_call_counts_once(tmp_path: Path):
    log = read(tmp_path, claude_session())
    assert (log.format, log.requests) == ("claude_code", 2)
    assert sums(log) == (9, 900, 960, 75)
    assert log.usage.tolist() == [[905, 0, 900], [964, 900, 60]]


def test_prompt_is_the_history_before_the_call(tmp_path: Path):
    first, second = texts(read(tmp_path, claude_session()))
    asked = "user\nplease read the two files that hold the settings"
    assert first == asked
    call = '{"tool_calls":[{"id":"t1","type":"function","function":{"name":"Read","arguments":{"path":"a"}}}]}'
    assert second == f'{asked}|assistant\n{call}|tool\nthe first file has a single line{{"tool_call_id":"t1"}}'


def test_unseen_front_has_the_length_that_the_provider_counts(tmp_path: Path):
    log = read(tmp_path, claude_session())
    asked = tokens("user\nplease read the two files that hold the settings")
    front = 905 - asked
    assert log.lengths[log.starts[:2]].tolist() == [front, front]
    assert log.pieces[log.starts[0]] == log.pieces[log.starts[1]]
    assert log.prompt_tokens[0] == 905
    assert log.unread.left == {"system prompt and tools, which the log does not have": 2 * 4 * front}
    assert not log.unread.allows_verdict
    assert any(note.startswith("system prompt and tools are not in the log") for note in log.notes)


def test_waits_are_those_between_calls(tmp_path: Path):
    session = ClaudeSession()
    session.user("go", timestamp=clock(10))
    session.model("m1", tool("t1"), counts(1, 0, 0, 1), timestamp=clock(13))
    session.user([result("t1", "done")], timestamp=clock(33.5))
    session.model("m2", text("ok"), counts(1, 0, 0, 1), timestamp=clock(35))
    log = read(tmp_path, session.lines)
    assert log.arrived_ns.tolist() == [0, 23_500_000_000]
    assert log.waits_ns.tolist() == [0, 20_500_000_000]
    assert log.observed.last_token.tolist() == [3.0, 25.0]
    assert log.sessions.tolist() == [0, 0]


@pytest.mark.parametrize("outputs", [(1, 40), (40, 1), (40, 40)])
def test_largest_output_of_a_message_is_the_final_one(tmp_path: Path, outputs: tuple[int, int]):
    session = ClaudeSession()
    session.user("go")
    for output in outputs:
        session.model("m1", text(f"part {output}"), counts(3, 100, output, output))
    assert sums(read(tmp_path, session.lines)) == (3, 100, 40, 40)


def test_results_of_parallel_tools_are_on_branches(tmp_path: Path):
    session = ClaudeSession()
    session.user("compare")
    first = session.model("m1", tool("t1"), counts(1, 0, 0, 9))
    second = session.model("m1", tool("t2"), counts(1, 0, 0, 9))
    session.user([result("t1", "left side")], parentUuid=first)
    session.user([result("t2", "right side")], parentUuid=second)
    session.model("m2", text("equal"), counts(1, 0, 0, 2))
    log = read(tmp_path, session.lines)
    assert log.requests == 2
    assert "left side" in texts(log)[1]
    assert "right side" in texts(log)[1]
    assert texts(log)[1].count("assistant") == 1


def test_result_between_two_blocks_of_a_message(tmp_path: Path):
    session = ClaudeSession()
    session.user("compare")
    session.model("m1", tool("t1"), counts(1, 0, 7, 3))
    session.user([result("t1", "left side")])
    session.model("m1", tool("t2"), counts(1, 0, 7, 9))
    session.user([result("t2", "right side")])
    session.model("m2", text("equal"), counts(1, 7, 0, 2))
    log = read(tmp_path, session.lines)
    assert (log.requests, sums(log)) == (2, (2, 7, 7, 11))
    assert texts(log)[1].index('"t2"') < texts(log)[1].index("left side")


def test_edited_message_starts_a_branch(tmp_path: Path):
    session = ClaudeSession()
    session.user("first")
    start = session.model("m1", text("answer"), counts(1, 0, 0, 1))
    session.user("second, as it was", parentUuid=start)
    session.model("m2", text("x"), counts(1, 0, 0, 1))
    session.user("second, edited", parentUuid=start)
    session.model("m3", text("y"), counts(1, 0, 0, 1))
    prompts = texts(read(tmp_path, session.lines))
    assert prompts[2] == "user\nfirst|assistant\nanswer|user\nsecond, edited"


@pytest.mark.parametrize("has_parent", [False, True])
def test_compaction_begins_a_new_history(tmp_path: Path, has_parent: bool):
    session = ClaudeSession()
    session.user(LONG)
    last = session.model("m1", text("answer"), counts(1, 0, 0, 1))
    session.line("system", subtype="compact_boundary", parentUuid=last if has_parent else None, logicalParentUuid=last)
    session.user("what happened so far", isCompactSummary=True, isVisibleInTranscriptOnly=True)
    session.model("m2", text("y"), counts(1, 0, 0, 1))
    log = read(tmp_path, session.lines)
    assert texts(log)[1] == "user\nwhat happened so far"
    assert "not counted: 1 lines of the type system (compact_boundary)" in log.notes


@pytest.mark.parametrize("names", [{}, {"agentId": "a1"}])
def test_subagent_has_a_history_of_its_own(tmp_path: Path, names: dict[str, str]):
    session = ClaudeSession()
    session.user("ask another")
    caller = session.model("m1", tool("t1"), counts(1, 0, 50, 5))
    session.user("you are another", parentUuid=None, isSidechain=True, **names)
    session.model("m2", text("found it"), counts(2, 0, 30, 6), isSidechain=True, **names)
    session.user([result("t1", "found it")], parentUuid=caller)
    session.model("m3", text("thanks"), counts(1, 50, 10, 7))
    log = read(tmp_path, session.lines)
    assert sums(log) == (4, 50, 90, 18)
    assert log.sessions.tolist() == [0, 1, 0]
    assert [len(prompt.split("|")) for prompt in texts(log)] == [1, 1, 3]


def test_messages_of_the_program_are_no_calls(tmp_path: Path):
    session = ClaudeSession()
    session.user("go")
    synthetic = {"model": "<synthetic>", "id": "x1"}
    session.model("x1", text("API Error: 529"), counts(0, 0, 0, 0), message=synthetic, isApiErrorMessage=True)
    session.line("system", subtype="api_error", level="error")
    session.user("again")
    session.model("m1", text("here"), counts(3, 0, 20, 4))
    log = read(tmp_path, session.lines)
    assert (log.requests, sums(log)) == (1, (3, 0, 20, 4))
    assert texts(log) == ["user\ngo|user\nagain"]
    assert "not counted: 1 messages that Claude Code wrote itself, such as errors of the API" in log.notes
    assert "not counted: 1 lines of the type system (api_error)" in log.notes


def test_other_lines_are_counted_by_their_type(tmp_path: Path):
    rows: list[dict[str, Any]] = [
        {"type": "summary", "summary": "s", "leafUuid": "u"},
        {"type": "file-history-snapshot", "messageId": "m", "snapshot": {}},
        *claude_session(),
        {"type": "never-heard-of", "sessionId": "s1"},
        {"type": "never-heard-of", "sessionId": "s1"},
    ]
    log = read(tmp_path, rows)
    assert sums(log) == (9, 900, 960, 75)
    assert {note for note in log.notes if note.startswith("not counted")} == {
        "not counted: 1 lines of the type summary",
        "not counted: 1 lines of the type file-history-snapshot",
        "not counted: 2 lines of the type never-heard-of",
    }


def test_unknown_blocks_are_counted_by_their_type(tmp_path: Path):
    session = ClaudeSession()
    session.user([text("go"), {"type": "hologram", "payload": "x" * 40}])
    session.line("attachment", attachment={"type": "todo", "content": "x" * 9})
    session.model("m1", text("here"), counts(3, 0, 20, 4))
    log = read(tmp_path, session.lines)
    assert texts(log) == ["user\ngo|<hologram>|user\n|<attachment>"]
    assert {"hologram", "attachment"} < set(log.unread.left)
    assert log.unread.endless == 1


def test_missing_usage_is_unknown(tmp_path: Path):
    session = ClaudeSession()
    session.user("go")
    session.model("m1", text("one"), None)
    session.user("on")
    session.model("m2", text("two"), {"input_tokens": 70, "output_tokens": 8})
    session.user("on")
    session.model("m3", text("three"), {"input_tokens": 7, "cache_read_input_tokens": 70, "output_tokens": 8})
    session.user("on")
    session.model("m4", text("four"), {"input_tokens": 7, "cache_creation": {"ephemeral_1h_input_tokens": 5}})
    log = read(tmp_path, session.lines)
    nan = np.nan
    expected = [[nan, nan, nan], [70, nan, nan], [77, 70, nan], [12, nan, 5]]
    np.testing.assert_array_equal(log.usage, np.array(expected))
    assert log.unread.endless == 1  # the length of the first prompt is unknown


def test_repeated_lines_and_ids_count_once(tmp_path: Path):
    rows = claude_session()
    log = read(tmp_path, [*rows, rows[1], rows[4]])
    assert (log.requests, sums(log)) == (2, (9, 900, 960, 75))
    assert "not counted: 2 lines that repeat an earlier line" in log.notes


def test_copies_under_another_session_count_once(tmp_path: Path):
    names = ("uuid", "parentUuid")
    copies = [
        row | {"sessionId": "s2"} | {name: row[name] and f"copy of {row[name]}" for name in names}
        for row in claude_session()
    ]
    goes_on = ClaudeSession("s2")
    goes_on.last = copies[-1]["uuid"]
    goes_on.user("go on", timestamp=clock(60))
    goes_on.model("m9", text("yes"), counts(1, 1000, 20, 3), timestamp=clock(61))
    log = read(tmp_path, [*claude_session(), *copies, *goes_on.lines])
    assert (log.requests, sums(log)) == (3, (10, 1900, 980, 78))
    assert texts(log)[2].count("both are short") == 1
    assert texts(log)[2].endswith("|user\ngo on")


def test_message_without_id_is_a_call_of_its_own(tmp_path: Path):
    session = ClaudeSession()
    for number in range(2):
        session.user(f"go {number}")
        session.model(None, text("x"), counts(1, 2, 3, 4))
    assert sums(read(tmp_path, session.lines)) == (2, 4, 6, 8)


def test_request_ids_tell_equal_message_ids_apart(tmp_path: Path):
    session = ClaudeSession()
    for request in ("r1", "r2"):
        session.user("go")
        session.model("m1", text("x"), counts(1, 2, 3, 4), requestId=request)
        session.model("m1", text("y"), counts(1, 2, 3, 4), requestId=request)
    assert sums(read(tmp_path, session.lines)) == (2, 4, 6, 8)


def test_missing_parent_is_counted(tmp_path: Path):
    log = read(tmp_path, claude_session()[2:])
    assert log.requests == 1
    assert any("whose parent is not in the log" in note for note in log.notes)


def test_output_stream_is_one_branch(tmp_path: Path):
    rows: list[dict[str, Any]] = [{"type": "system", "subtype": "init", "session_id": "s", "tools": ["Read"]}]
    rows.append({"type": "user", "session_id": "s", "message": {"role": "user", "content": "go"}})
    for number in range(2):
        message = {
            "role": "assistant",
            "id": f"m{number}",
            "content": [text(f"x{number}")],
            "usage": counts(1, 2, 3, 4),
        }
        rows.append({"type": "assistant", "session_id": "s", "message": message})
        rows.append({"type": "user", "session_id": "s", "message": {"role": "user", "content": f"on {number}"}})
    log = read(tmp_path, rows)
    assert (log.format, sums(log)) == ("claude_code", (2, 4, 6, 8))
    assert texts(log)[1] == "user\ngo|assistant\nx0|user\non 0"


# ------------------------------------------------------------------------------
# The output of `claude -p --output-format stream-json`, with a line about the whole run at its end.
# ------------------------------------------------------------------------------


def of_stream(kind: str, name: str, usage: dict[str, Any], agent: str | None = None) -> dict[str, Any]:
    message = {"role": kind, "id": name, "model": "m", "content": [text(name)], "usage": usage}
    return {"type": kind, "session_id": "s", "parent_tool_use_id": agent, "uuid": f"u-{name}", "message": message}


def result_line(usage: dict[str, Any], models: dict[str, Any] | None = None) -> dict[str, Any]:
    row = {"type": "result", "subtype": "success", "session_id": "s", "uuid": "end", "num_turns": 2, "usage": usage}
    return row | {"modelUsage": models or {}}


def by_model(fresh: int, cached: int, created: int, output: int) -> dict[str, Any]:
    names = ("inputTokens", "cacheReadInputTokens", "cacheCreationInputTokens", "outputTokens")
    return dict(zip(names, (fresh, cached, created, output), strict=True)) | {"costUSD": 0.5, "webSearchRequests": 0}


RUN = [
    of_stream("assistant", "m1", counts(1, 0, 30, 4)),
    of_stream("assistant", "a1", counts(5, 6, 7, 8), "t1"),
    of_stream("assistant", "m2", counts(2, 30, 3, 5)),
]
AGAIN = of_stream("assistant", "m3", counts(1, 33, 2, 6))


@pytest.mark.parametrize(
    "rows",
    [
        [*RUN, result_line(counts(3, 30, 33, 9))],
        [*RUN, result_line(counts(3, 30, 33, 9), {"m": by_model(8, 36, 40, 17)})],
        [*RUN, result_line(counts(3, 30, 33, 9)), AGAIN, result_line(counts(1, 33, 2, 6))],
        [*RUN, result_line(counts(3, 30, 33, 9)), AGAIN, result_line(counts(4, 63, 35, 15))],
        [*RUN, result_line({}, {"m": by_model(3, 30, 33, 9), "small": by_model(5, 6, 7, 8)})],
    ],
)
def test_result_line_of_a_run_is_no_call(tmp_path: Path, rows: list[dict[str, Any]]):
    calls = [row for row in rows if row["type"] == "assistant"]
    log = read(tmp_path, rows)
    assert (log.requests, sums(log)) == (len(calls), sums(read(tmp_path, calls)))
    assert not any("result line" in note for note in log.notes)
    assert any("lines of the type result (success)" in note for note in log.notes)


@pytest.mark.parametrize(
    ("line", "note"),
    [
        (
            result_line(counts(3, 30, 33, 90)),
            "line 4: it counts 3 fresh, 30 cached, 33 created and 90 output tokens, and its 2 calls in the log 3 "
            "fresh, 30 cached, 33 created and 9 output tokens; lines of a message have its output as it was",
        ),
        (
            result_line({}, {"m": by_model(8, 36, 40, 17), "small": by_model(100, 0, 0, 2)}),
            "line 4: it counts 108 fresh, 36 cached, 40 created and 19 output tokens, and its 3 calls in the log 8 "
            "fresh, 36 cached, 40 created and 17 output tokens; the log may lack calls",
        ),
    ],
)
def test_result_line_that_differs_from_its_calls_is_named(tmp_path: Path, line: dict[str, Any], note: str):
    log = read(tmp_path, [*RUN, line])
    assert sums(log) == (8, 36, 40, 17)
    assert "1 runs whose result line differs from the sum of their calls" in log.notes
    beginning = f"the first result line that differs from the sum of its calls is in session, {note}"
    assert any(each.startswith(beginning) for each in log.notes)


def test_events_of_a_stream_have_the_final_output(tmp_path: Path):
    event = {"type": "stream_event", "session_id": "s", "parent_tool_use_id": None}
    start = event | {"event": {"type": "message_start", "message": {"id": "m1", "usage": counts(1, 0, 30, 1)}}}
    end = event | {"event": {"type": "message_delta", "usage": {"output_tokens": 44, "input_tokens": None}}}
    rows = [start, RUN[0], end, event | {"event": {"type": "message_stop"}}, result_line(counts(1, 0, 30, 44))]
    log = read(tmp_path, rows)
    assert (log.requests, sums(log)) == (1, (1, 0, 30, 44))
    assert not any("result line" in note for note in log.notes)


def test_result_line_alone_has_no_calls(tmp_path: Path):
    with pytest.raises(ValueError, match=r"no requests; .*not counted: 1 lines of the type result \(success\)"):
        read(tmp_path, [result_line(counts(1, 2, 3, 4))])


def test_subagents_in_files_of_their_own_are_named(tmp_path: Path):
    (tmp_path / "session" / "subagents").mkdir(parents=True)
    path = write_lines(tmp_path / "session.jsonl", *claude_session())
    for log, is_alone in ((path, True), (tmp_path, False)):
        notes = read_log(log, LogSettings()).notes
        assert any(note.startswith("calls of subagents are in files") for note in notes) == is_alone


def test_empty_and_foreign_files_of_a_folder_add_nothing(tmp_path: Path):
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "empty.jsonl").write_text("")
    write_lines(folder / "history.jsonl", {"display": "x", "timestamp": 1_793_600_000_000, "project": "p"})
    write_lines(folder / "session.jsonl", *claude_session())
    log = read_log(folder, LogSettings())
    assert (log.format, sums(log)) == ("claude_code", (9, 900, 960, 75))
    assert "not counted: 1 lines of the type None" in log.notes


def test_folder_is_read_by_time_and_calls_once(tmp_path: Path):
    folder = tmp_path / "project"
    (folder / "s1" / "subagents").mkdir(parents=True)
    write_lines(folder / "b.jsonl", *claude_session())
    agent = ClaudeSession("s1", isSidechain=True, agentId="a1")
    agent.user("you are another", timestamp=clock(1.5))
    agent.model("a-m1", text("found"), counts(7, 8, 9, 10), timestamp=clock(2.5))
    write_lines(folder / "s1" / "subagents" / "agent-a1.jsonl", *agent.lines)
    later = [row | {"sessionId": "s2"} for row in claude_session()]  # a session that goes on under another name
    goes_on = ClaudeSession("s2")
    goes_on.last = later[-1]["uuid"]
    goes_on.user("go on", timestamp=clock(60))
    goes_on.model("m9", text("yes"), counts(1, 1000, 20, 3), timestamp=clock(61))
    write_lines(folder / "a.jsonl", *later, *goes_on.lines)
    (folder / "notes.txt").write_text("no session")
    log = read_log(folder, LogSettings())
    assert sums(log) == (9 + 7 + 1, 900 + 8 + 1000, 960 + 9 + 20, 75 + 10 + 3)
    assert (log.requests, log.lines.tolist()) == (4, [1, 2, 3, 4])
    assert log.usage[:, 1].tolist() == [0, 8, 900, 1000]
    assert "not counted: 2 calls that another file has too" in log.notes


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ('{"type": "user", "sessionId": "s1", "mess', "line: expected JSON"),
        ({"type": "user", "sessionId": "s1", "message": 7}, "message: expected an object with role and content, not 7"),
        (
            {"type": "user", "sessionId": "s1", "message": {"role": "user"}},
            "message.content: expected a text or a list",
        ),
        (
            {"type": "user", "sessionId": "s1", "message": {"content": "x"}, "timestamp": "soon"},
            "timestamp: expected a",
        ),
        ({"type": "user", "sessionId": [1], "message": {"content": "x"}}, "sessionId: expected a text or a number"),
    ],
)
def test_bad_line_is_named_or_skipped(tmp_path: Path, row: Any, problem: str):
    rows = [json.dumps(line) for line in claude_session()] + [row]
    with pytest.raises(ValueError, match=rf"session:6: {problem}"):
        read(tmp_path, rows)
    log = read(tmp_path, rows, bad_lines="skip")
    assert sums(log) == (9, 900, 960, 75)
    assert any(f"bad lines ({problem.partition(':')[0]}, first in line 6) (1 times" in note for note in log.notes)


def test_content_of_another_type_names_its_line(tmp_path: Path):
    session = ClaudeSession()
    session.user([7])
    session.model("m1", text("x"), counts(1, 2, 3, 4))
    with pytest.raises(ValueError, match=r"session:1: message.content: expected content as a text or a list"):
        read(tmp_path, session.lines)


def test_session_without_a_call_is_named(tmp_path: Path):
    with pytest.raises(ValueError, match="the file has no requests; expected JSONL with sessionId"):
        read(tmp_path, claude_session()[:1])


def any_session(draw: random.Random) -> list[dict[str, Any]]:
    """Return a session with everything that makes its counts hard to sum."""
    session, rows = ClaudeSession(), list[dict[str, Any]]()
    session.user("go")
    for number in range(draw.randrange(1, 12)):
        usage = counts(draw.randrange(9), draw.randrange(999), draw.randrange(99), draw.randrange(2, 50))
        if draw.random() < 0.3:
            del usage["cache_creation_input_tokens"]
        outputs = sorted(draw.randrange(1, usage["output_tokens"]) for _ in range(draw.randrange(3)))
        for output in [*outputs, usage["output_tokens"]]:
            given = (
                usage | {"output_tokens": output} if draw.random() < 0.8 or output == usage["output_tokens"] else None
            )
            block = draw.choice([text(f"{number}"), tool(f"t{number}-{output}"), {"type": "thinking", "thinking": ""}])
            session.model(f"m{number}", block, given, requestId=f"r{number}")
            if block["type"] == "tool_use":
                session.user([result(block["id"], "done")])
        choice = draw.randrange(5)
        if choice == 0:
            session.model("x", text("API Error"), counts(7, 7, 7, 7), message={"model": "<synthetic>"})
        elif choice == 1:
            session.line("system", subtype="compact_boundary", parentUuid=None)
            session.user("in short", isCompactSummary=True)
        elif choice == 2:
            session.user("a branch", parentUuid=draw.choice(session.lines)["uuid"])
        elif choice == 3:
            session.user("you are another", parentUuid=None, isSidechain=True)
            session.model(f"a{number}", text("found"), counts(1, 2, 3, 4), isSidechain=True)
    rows = list(session.lines)
    for row in draw.sample(rows, len(rows) // 4):
        rows.insert(draw.randrange(rows.index(row) + 1, len(rows) + 1), row)
    return rows


@pytest.mark.parametrize("seed", range(25))
def test_sums_are_those_of_the_messages_of_the_model(tmp_path: Path, seed: int):
    rows = any_session(random.Random(seed))
    last: dict[str, dict[str, Any]] = {}
    for row in rows:
        message = row.get("message", {})
        if message.get("usage") and message["model"] != "<synthetic>":
            known = last.get(message["id"], {"output_tokens": 0})
            last[message["id"]] = max(known, message["usage"], key=lambda usage: usage["output_tokens"])
    usages = last.values()
    created = sum(usage["cache_creation"]["ephemeral_5m_input_tokens"] for usage in usages)
    names = ("input_tokens", "cache_read_input_tokens", "output_tokens")
    fresh, cached, output = (sum(usage[name] for usage in usages) for name in names)
    log = read(tmp_path, rows)
    assert (log.requests, sums(log)) == (len(last), (fresh, cached, created, output))
