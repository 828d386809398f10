"""Breaks of a log: their groups, mends that are tried on the log, and the mended log that is read again."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from spanlab.analyses.breaks import AROUND
from spanlab.cli import compose
from spanlab.study.run import run_study
from spanlab.workloads.logs import bodies as bodies_of_logs
from spanlab.workloads.logs import mends, prompts, rendering
from spanlab.workloads.logs.mends import MENDS

from ..support.files import write_lines
from ..support.products import in_turn
from ..support.tokenizers import save_word_tokenizer
from .explained import chat, explained, explained_bodies, fixes_of, invented

RULES = [invented(30, number) for number in range(12)]
TOOLS = [{"type": "function", "function": {"name": f"t{k}", "description": invented(60, k)}} for k in range(6)]


def stamped(number: int) -> str:
    return "\n".join([*RULES[:2], f"It is now 2026-05-04 10:{number // 60:02}:{number % 60:02} UTC.", *RULES[2:]])


def session(number: int, turns: int) -> list[dict[str, Any]]:
    """Return the calls of a conversation."""
    history: list[dict[str, Any]] = []
    bodies = []
    for turn in range(turns):
        history.append({"role": "user", "content": invented(40, 1000 * number + 2 * turn)})
        bodies.append({"messages": [{"role": "system", "content": "\n".join(RULES)}, *history]})
        history.append({"role": "assistant", "content": invented(40, 1000 * number + 2 * turn + 1)})
    return bodies


def classes_of(summary: dict[str, Any]) -> dict[str | None, int]:
    counts: dict[str | None, int] = {}
    for row in summary["breaks"]:
        counts[row["class"]] = counts.get(row["class"], 0) + row["requests"]
    return counts


def test_breaks_are_grouped_by_class_and_line(tmp_path: Path):
    bodies = [chat(stamped(number), invented(30, number), tools=TOOLS) for number in range(30)]
    for number, body in enumerate(bodies[25:], 1):
        body["tools"] = random.Random(number).sample(TOOLS, len(TOOLS))
    summary = explained_bodies(tmp_path, *bodies)
    first, *others = summary["breaks"]
    assert (first["class"], first["role"], first["line"], first["requests"]) == ("time_stamp", "system", 3, 24)
    assert [(row["class"], row["requests"]) for row in others] == [("reordered_tools", 5)]
    assert summary["breaks_found"] == {"requests": 29, "with_class": 29, "notes": []}
    sentence = "24 of 29 prompts that part from earlier ones: a time stamp or date in line 3 of the system prompt"
    assert sentence in summary["measured"]
    page = (tmp_path / "explain" / "x" / "report.html").read_text()
    assert sentence in page
    assert "this report holds texts of 4 prompts" in page
    before, after = first["later"].split("|")
    assert "\\nIt is now 2026-05-04 10:00:" in before
    assert len(before.replace("\\n", "n")) <= AROUND
    assert len(after.replace("\\n", "n")) == AROUND


def test_conversation_is_compared_with_itself(tmp_path: Path):
    """Other conversations share the system prompt too; without sessions, its own messages tell which it is."""
    conversations = [session(number, 5) for number in range(4)]
    calls = [calls[turn] for turn in range(4) for calls in conversations]
    last = [calls[4] for calls in conversations]
    cut = {"messages": [last[0]["messages"][0], *last[0]["messages"][3:]]}
    edited = json.loads(json.dumps(last[1]))
    edited["messages"][1]["content"] = invented(40, 77)
    summary_text = f"This session is continued from a previous conversation. {invented(20, 5)}"
    compacted = {
        "messages": [last[2]["messages"][0], {"role": "user", "content": summary_text}, *last[2]["messages"][-3:]]
    }
    summary = explained_bodies(tmp_path, *calls, cut, edited, compacted, last[3])
    expected = {"new_text": 3, "truncation": 1, "edited_history": 1, "compaction": 1}
    assert classes_of(summary) == expected


def test_change_of_the_model_is_named(tmp_path: Path):
    calls = session(1, 4)
    bodies = [call | {"model": "ab"[turn // 2], "session_id": "s"} for turn, call in enumerate(calls)]
    row = explained_bodies(tmp_path, *bodies)["breaks"][0]
    assert (row["class"], row["requests"], row["position"]) == ("changed_parameter", 1, 0)
    assert row["reason"].endswith(": model")


def test_unrelated_prompt_of_another_model_has_another_class(tmp_path: Path):
    bodies = [chat(invented(99, n // 3), invented(20, n), model=f"m{n // 3}") for n in range(6)]
    assert classes_of(explained_bodies(tmp_path, *bodies)) == {"changed_system_prompt": 1, "new_text": 4}


TEMPLATE = (
    "{%- set last = messages | length - 1 %}{%- for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.reasoning_content and loop.index0 > last - 2 %}<think>{{ message.reasoning_content }}</think>"
    "{%- endif %}{{ message.content }}{{ '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)


def test_template_is_a_cause_of_its_own(tmp_path: Path):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    save_word_tokenizer(folder / "tokenizer.json", invented(200))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    bodies = session(1, 6)
    for body in bodies:
        for message in body["messages"]:
            if message["role"] == "assistant":
                message["reasoning_content"] = "dune " * 30
    settings = (f"workload.log.template={folder}",)
    row = explained_bodies(tmp_path / "kept", *bodies, settings=settings)["breaks"][0]
    assert (row["class"], row["requests"], row["role"]) == ("template_reasoning", 4, "rendered")
    assert "<think>" in row["earlier"]
    assert "<think>" not in row["later"].split("|")[1][:8]
    assert explained_bodies(tmp_path / "plain", *bodies)["breaks"] == []
    for turn, body in enumerate(bodies):
        body["messages"][0]["content"] = stamped(turn)
    row = explained_bodies(tmp_path / "stamped", *bodies, settings=settings)["breaks"][0]
    assert (row["class"], row["line"], row["role"], row["requests"]) == ("time_stamp", 3, "system", 5)


def picture(number: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"https://example.org/{number}.png"}, "width": 56, "height": 56}


def anthropic(number: int) -> dict[str, Any]:
    """A body as Anthropic has it, with thoughts, a call of a tool, its result, an image and a stamp."""
    call = {"type": "tool_use", "id": "u1", "name": "t1", "input": {"b": number % 3, "a": "x"}}
    return {
        "model": "m",
        "system": [{"type": "text", "text": stamped(number)}, {"type": "text", "text": RULES[3]}],
        "tools": [{"name": "t1", "description": RULES[4], "input_schema": {"type": "object"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": RULES[5]}, picture(number % 2)]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": RULES[6]}, call]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "u1", "content": RULES[7]}]},
            {"role": "user", "content": invented(20, number)},
        ],
    }


def responses(number: int) -> dict[str, Any]:
    items = [
        {"role": "user", "content": RULES[1]},
        {"type": "reasoning", "encrypted_content": "abc" * 9, "summary": []},
        {"type": "function_call", "call_id": "c", "name": "t1", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c", "output": RULES[2]},
        {"role": "user", "content": invented(20, number)},
    ]
    return {"model": "m", "instructions": stamped(number), "input": items, "tools": TOOLS[:2]}


def shuffled(number: int) -> dict[str, Any]:
    tools = random.Random(number).sample(TOOLS, len(TOOLS))
    documents = [{"title": f"d{k}", "text": RULES[k]} for k in random.Random(number).sample(range(6), 3)]
    return chat(stamped(number), invented(30, number), tools=tools, documents=documents) | {"user": f"u{number % 2}"}


def keyed(number: int) -> dict[str, Any]:
    function = {"name": "t", "description": RULES[1], "parameters": {"type": "object"}}
    keys = random.Random(number).sample(sorted(function), 3)
    tool = {"type": "function", "function": {key: function[key] for key in keys}}
    return chat("\n".join(RULES), invented(30, number), tools=[tool])


def forgetful(number: int) -> dict[str, Any]:
    """Turns of two conversations whose latest answer alone has its reasoning."""
    body = session(number % 2, number // 2 + 1)[-1]
    if len(body["messages"]) > 3:
        body["messages"][-2]["reasoning_content"] = invented(30, len(body["messages"]))
    return body


def late(number: int) -> dict[str, Any]:
    """The same turns, of which the second conversation has the reasoning of the answer before the latest one."""
    if number % 2 == 0:
        return forgetful(number)
    body = session(1, number // 2 + 1)[-1]
    if len(body["messages"]) > 5:
        body["messages"][-4]["reasoning_content"] = invented(30, len(body["messages"]))
    return body


def completion(number: int) -> dict[str, Any]:
    return {
        "prompt": f"{stamped(number)}\n{invented(20, number)}",
        "model": "ab"[number % 2],
        "cache_salt": f"{number % 3}",
    }


LOGS = {
    "anthropic": anthropic,
    "responses": responses,
    "shuffled": shuffled,
    "keyed": keyed,
    "forgetful": forgetful,
    "late": late,
    "completion": completion,
}
TRIED = {
    "anthropic": {"volatile_last", "volatile_at_end", "days_alone", "all_mends"},
    "responses": {"volatile_last", "volatile_at_end", "days_alone", "all_mends"},
    "shuffled": {"volatile_last", "volatile_at_end", "days_alone", "tools_sorted", "documents_sorted", "all_mends"},
    "keyed": {"keys_sorted"},
    "forgetful": {"reasoning_kept"},
    "late": {"reasoning_kept"},
    "completion": {"volatile_last"},
}


def computed_tokens(summary: dict[str, Any]) -> int:
    computed: int = summary["tokens"]["prompt"] - summary["presets"]["vllm_0_32"]["reused_tokens"]
    return computed


@pytest.mark.parametrize(("kind", "memory"), in_turn(LOGS, ["store.total_gib=64", "store.total_gib=0.4"]))
def test_mended_log_has_the_predicted_reuse(tmp_path: Path, kind: str, memory: str):
    bodies = [
        LOGS[kind](number) | {"output_length": 7 * number, "session_id": f"s{number % 5}"} for number in range(24)
    ]
    summary = explained_bodies(tmp_path, *bodies, settings=(memory,))
    fixes = fixes_of(summary)
    tried = (set(MENDS) | {"all_mends"}) & set(fixes)
    assert TRIED[kind] <= tried
    for name in tried:
        path = tmp_path / f"{name}.jsonl"
        settings = (memory, f"write_fixed={path}", f"analyses.explain.mend={name}")
        written = explained_bodies(tmp_path / name, *bodies, settings=settings)["written"]
        assert (written["mend"], written["requests"], written["left_out"]) == (name, 24, 0)
        again = explained(tmp_path / f"{name}_again", f"log={path}", memory)
        assert again["log"]["format"] == "openai"
        assert again["presets"]["vllm_0_32"]["token_hit_rate"] == written["token_hit_rate"] == fixes[name]
        assert again["tokens"]["output"] == summary["tokens"]["output"]
        saved = next(fix["saved_tokens"] for fix in summary["fixes"] if fix["name"] == name)
        assert computed_tokens(again) == computed_tokens(summary) - saved


@pytest.mark.parametrize(
    ("kind", "name", "least"),
    [
        ("anthropic", "days_alone", 0.5),
        ("shuffled", "all_mends", 0.5),
        ("keyed", "keys_sorted", 0.15),
        ("forgetful", "reasoning_kept", 0.05),
    ],
)
def test_mend_gains_what_its_break_loses(tmp_path: Path, kind: str, name: str, least: float):
    summary = explained_bodies(tmp_path, *map(LOGS[kind], range(24)))
    gain = next(fix["gain"] for fix in summary["fixes"] if fix["name"] == name)
    assert gain > least


def test_best_mend_is_written_and_named(tmp_path: Path):
    path = tmp_path / "mended" / "log.jsonl"
    bodies = [chat(stamped(number), invented(30, number)) for number in range(20)]
    summary = explained_bodies(tmp_path, *bodies, settings=(f"write_fixed={path}",))
    best = max((fix for fix in summary["fixes"] if fix["name"] in {*MENDS, "all_mends"}), key=lambda fix: fix["gain"])
    assert summary["written"]["token_hit_rate"] == best["token_hit_rate"]
    assert summary["prefill_s"] > best["prefill_s"] > 0
    page = (tmp_path / "explain" / "x" / "report.html").read_text()
    assert f"20 requests after {summary['written']['mend']}, of whose tokens" in page
    first = json.loads(path.read_text().splitlines()[0])
    assert first["body"]["messages"][0]["role"] == "system"
    with pytest.raises(ValueError, match=r"^write_fixed=.*log.jsonl: the file exists; expected a new name"):
        explained_bodies(tmp_path / "again", *bodies, settings=(f"write_fixed={path}",))
    settings = (f"write_fixed={path}x", "analyses.explain.mend=tools_sorted")
    with pytest.raises(ValueError, match=r"^analyses.explain.mend=tools_sorted: expected one of volatile_last, "):
        explained_bodies(tmp_path / "other", *bodies, settings=settings)


def test_nothing_is_written_without_a_mend(tmp_path: Path):
    path = tmp_path / "mended.jsonl"
    bodies = [chat("\n".join(RULES), invented(30, number)) for number in range(20)]
    summary = explained_bodies(tmp_path, *bodies, settings=(f"write_fixed={path}",))
    assert summary["written"]["path"] is None
    assert not path.exists()
    assert "no mended log is written" in (tmp_path / "explain" / "x" / "report.html").read_text()


def test_redacted_run_holds_no_text_of_the_log(tmp_path: Path):
    secrets = ["zqsystem", "zquser", "zqtool", "zqdescription", "zqtenant", "zqsession", "zqmodel", "zqsalt", "zqrole"]
    system, user, tool, description, tenant, session_id, model, salt, role = secrets

    def body(number: int) -> dict[str, Any]:
        tools = [
            {
                "type": "function",
                "function": {"name": f"{tool}{k}", "description": f"{description} {number} {invented(30, k)}"},
            }
            for k in range(3)
        ]
        more = {"session_id": f"{session_id}{number % 2}", "tenant": f"{tenant}{number % 3}", "cache_salt": salt}
        call = chat(f"{system} {stamped(number)}", f"{user} {invented(20, number)}", tools=tools, model=model)
        call["messages"].append({"role": role, "content": f"{user} {number}"})
        return call | more

    bodies = [body(number) for number in range(20)] + [{"messages": body(number)["messages"]} for number in range(9)]
    summary = explained_bodies(tmp_path, *bodies, settings=("redact=true",))
    assert classes_of(summary)["request_id"] == 19
    row = next(row for row in summary["breaks"] if row["class"] == "request_id")
    assert (row["role"], row["tool"], row["earlier"], row["later"]) == ("tools", None, None, None)
    assert row["says"] == "an id or a counter of requests or sessions from tool 1 on"
    names = [path for path in (tmp_path / "explain").rglob("*") if path.is_file()]
    assert any(path.name == "report.html" for path in names)
    for path in names:
        content = path.read_bytes()
        assert not [secret for secret in secrets if secret.encode() in content], path.name
    shown = explained_bodies(tmp_path / "shown", *bodies)
    assert f"({tool}0)" in shown["breaks"][0]["says"]
    assert tool.encode() in (tmp_path / "shown" / "explain" / "x" / "report.html").read_bytes()


def test_memory_for_prompts_changes_no_result(tmp_path: Path, monkeypatch):
    bodies = [chat(stamped(number), invented(30, number)) for number in range(12)]
    usual = explained_bodies(tmp_path / "usual", *bodies)
    for module, names in (
        (bodies_of_logs, ("_MEMO_BYTES", "_TOOLS_IN_MEMORY")),
        (rendering, ("_MEMO_SIZE", "_CONVERSATIONS")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, 1)
    monkeypatch.setattr(prompts, "_BYTES_IN_MEMORY", 1)
    monkeypatch.setattr(prompts, "_NAMES_IN_MEMORY", 1)
    monkeypatch.setattr(mends, "_UNITS_IN_MEMORY", 1)
    small = explained_bodies(tmp_path / "small", *bodies)
    assert {key: small[key] for key in ("breaks", "fixes")} == {key: usual[key] for key in ("breaks", "fixes")}


def test_breaks_of_unknown_prompts_are_counted(tmp_path: Path):
    rows = [
        {
            "startTime": number,
            "prompt_tokens": 900,
            "call_type": "completion",
            "messages": chat("a" * 400, "b")["messages"],
        }
        for number in range(9)
    ]
    rows[4]["messages"] = rows[7]["messages"] = "redacted-by-litellm"
    summary = explained_bodies(tmp_path, *rows)
    (note,) = summary["breaks_found"]["notes"]
    assert note.startswith("2 breaks have no class")
    assert note in (tmp_path / "explain" / "x" / "report.html").read_text()


def test_requests_sorted_by_time_are_compared_in_their_order(tmp_path: Path):
    rows = [chat(stamped(number), invented(30, number), timestamp=1000 + number) for number in range(12)]
    usual = explained(tmp_path, f"log={write_lines(tmp_path / 'log.jsonl', *rows)}")["breaks"]
    random.Random(1).shuffle(rows)
    again = write_lines(tmp_path / "shuffled.jsonl", *rows)
    settings = ("workload.log.backwards=sort",)
    assert explained(tmp_path / "shuffled", f"log={again}", *settings)["breaks"] == usual


def test_calls_of_a_session_show_why_tokens_were_lost(tmp_path: Path):
    kept, stamps = session(1, 6), session(2, 6)
    for turn, body in enumerate(stamps):
        body["messages"][0]["content"] = stamped(turn)
    usage = {"usage": {"prompt_tokens": 900, "prompt_tokens_details": {"cached_tokens": 450}}}
    bodies = [
        body | {"session_id": name}
        for pair in zip(kept, stamps, strict=True)
        for name, body in zip("ab", pair, strict=True)
    ]
    settings = ("output.figures=true",)
    summary = explained_bodies(tmp_path, *(body | usage for body in bodies), settings=settings)
    calls = summary["session"]["calls"]
    assert summary["session"]["session"] == 1
    assert [call["class"] for call in calls] == ["changed_system_prompt", *["time_stamp"] * 5]
    assert all(call["lost_by_cause"]["never_seen"] == 0 < call["lost_by_cause"]["break"] for call in calls)
    for call in calls:
        assert call["reused_tokens"] + sum(call["lost_by_cause"].values()) == call["prompt_tokens"]
        assert call["cached_tokens"] == 450
    points = summary["over_time"]
    total = summary["tokens"]["prompt"]
    rates = {"token_hit_rate": summary["presets"]["vllm_0_32"]["token_hit_rate"], "prefix": summary["bounds"]["prefix"]}
    for key, rate in rates.items():
        assert sum(point[key] * point["prompt_tokens"] for point in points) == pytest.approx(rate * total)
    assert {point["reported"] for point in points} == {0.5}
    figures = {path.stem for path in (tmp_path / "explain" / "x" / "figures").iterdir()}
    assert figures == {"capacity_curve", "session", "over_time"}


def test_excerpts_have_twelve_tokens_with_a_tokenizer(tmp_path: Path):
    save_word_tokenizer(tmp_path / "tokenizer.json", f"{invented(300)} {invented(300, 9)}")
    bodies = [chat(f"{invented(100)} {name} {invented(100, 9)}", "go") for name in ("amber", "jetty", "kelp")]
    settings = (f"workload.tokenizer={tmp_path / 'tokenizer.json'}",)
    row = explained_bodies(tmp_path / "words", *bodies, settings=settings)["breaks"][0]
    for side, word in ((row["earlier"], "amber"), (row["later"], "jetty")):
        head, tail = side.split("|")
        assert len(head.split()) == 12
        assert head.split() == invented(100).split()[-12:]
        assert tail.split() == [word, *invented(100, 9).split()[:11]]
    plain = explained_bodies(tmp_path / "characters", *bodies)["breaks"][0]
    assert [len(part) for part in plain["earlier"].split("|")] == [80, 80]


PRICES = ("price.input=3", "price.cached=0.3", "price.write=3.75", "price.output=15")


def counted(number: int) -> dict[str, Any]:
    """Return a call with shuffled tools and documents, whose provider loses what is older than 300 s."""
    at = 1000 + 100 * number + 400 * (number // 3)
    system = {"role": "system", "content": invented(1500)}
    body = shuffled(number) | {"timestamp": at, "messages": [system, *shuffled(number)["messages"]]}
    tokens = {"prompt_tokens": 6000, "completion_tokens": 9}
    usage = tokens | {"prompt_tokens_details": {"cached_tokens": 3000 if number % 3 else 0}}
    return body | ({"usage": usage} if number != 16 else {})


@pytest.mark.parametrize(("columns", "kind"), in_turn(["", "160"], [shuffled, counted]))
def test_terminal_shows_a_page_of_lines(kind, columns: str, tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    bodies = [kind(number) for number in range(32)]
    log = write_lines(tmp_path / "log.jsonl", *({"timestamp": n, **body} for n, body in enumerate(bodies)))
    fixed = f"write_fixed={tmp_path / 'mended.jsonl'}"
    overrides = (*PRICES, fixed, "workload.log.tools=after_system") if kind is counted else ()
    study = compose("explain", [f"log={log}", "output.figures=false", *overrides])
    run_study(study, "explain", tmp_path)
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 40
    assert ("the same tools in another order" if kind is shuffled else "a time stamp or date in line 3") in text
    parts = [
        "entries live between",
        "by price.*, the log cost",
        "are possible as",
        "times those of the log",
        "earlier: ",
    ]
    assert kind is shuffled or not [part for part in [*parts, "are reused"] if part not in text]
