"""Lines of sessions of coding agents, as Claude Code and Codex write them, with invented contents."""

from itertools import count
from typing import Any


def clock(second: float) -> str:
    """Return a time of one morning as agents write it."""
    minute, second = divmod(second, 60)
    return f"2026-11-02T09:{int(minute):02}:{second:06.3f}Z"


def counts(fresh: int, read: int, created: int, output: int) -> dict[str, Any]:
    """Return usage as Anthropic reports it."""
    return {
        "input_tokens": fresh,
        "cache_read_input_tokens": read,
        "cache_creation_input_tokens": created,
        "cache_creation": {"ephemeral_5m_input_tokens": created, "ephemeral_1h_input_tokens": 0},
        "output_tokens": output,
    }


class ClaudeSession:
    """Writer of a session: each line goes on from the one before it, unless `parent` names another."""

    def __init__(self, session: str = "s1", **keys: Any) -> None:
        self.session, self.keys, self.lines = session, keys, list[dict[str, Any]]()
        self._numbers, self._seconds = count(1), count(1)
        self.last: str | None = None

    def line(self, kind: str, **fields: Any) -> str:
        """Append a line, and return its uuid."""
        uuid = f"{self.session}-{next(self._numbers)}"
        row = {"parentUuid": self.last, "uuid": uuid, "sessionId": self.session, "type": kind, "isSidechain": False}
        row |= {"timestamp": clock(next(self._seconds))} | self.keys | fields
        self.lines.append(row)
        self.last = row["uuid"]
        return row["uuid"]

    def user(self, content: Any, **fields: Any) -> str:
        """Append a message of the user, or a list of blocks with results of tools."""
        return self.line("user", message={"role": "user", "content": content}, **fields)

    def model(self, name: str | None, block: dict[str, Any], usage: dict[str, Any] | None, **fields: Any) -> str:
        """Append a line with one block of the model's message `name`."""
        message = {"role": "assistant", "model": "claude-x", "content": [block]}
        message |= ({} if name is None else {"id": name}) | ({} if usage is None else {"usage": usage})
        return self.line("assistant", message=message | fields.pop("message", {}), **fields)


def text(content: str) -> dict[str, Any]:
    """Return a block of text."""
    return {"type": "text", "text": content}


def tool(name: str, **arguments: Any) -> dict[str, Any]:
    """Return a call of a tool with this id."""
    return {"type": "tool_use", "id": name, "name": "Read", "input": arguments}


def result(name: str, content: str) -> dict[str, Any]:
    """Return the result of a tool's call."""
    return {"type": "tool_result", "tool_use_id": name, "content": content}


def claude_session() -> list[dict[str, Any]]:
    """Return a session with two calls, of which the second repeats its usage."""
    session = ClaudeSession()
    session.user("please read the two files that hold the settings")
    session.model("m1", tool("t1", path="a"), counts(5, 0, 900, 30))
    session.user([result("t1", "the first file has a single line")])
    session.model("m2", {"type": "thinking", "thinking": "", "signature": "x"}, counts(4, 900, 60, 1))
    session.model("m2", text("both are short"), counts(4, 900, 60, 45))
    return session.lines


class CodexSession:
    """Writer of a rollout file; totals are summed as Codex does."""

    def __init__(self, session: str = "c1", instructions: str | None = "be brief and exact") -> None:
        self.lines: list[dict[str, Any]] = []
        self._seconds = count(1)
        self._totals = dict.fromkeys(("input_tokens", "cached_input_tokens", "output_tokens"), 0)
        base = {} if instructions is None else {"base_instructions": {"text": instructions}}
        self.line("session_meta", {"id": session, "cli_version": "0.90.0"} | base)
        self.line("turn_context", {"model": "gpt-x", "cwd": "/"})

    def line(self, kind: str, payload: dict[str, Any], **fields: Any) -> None:
        """Append a line of a type with its payload."""
        self.lines.append({"timestamp": clock(next(self._seconds)), "type": kind, "payload": payload} | fields)

    def item(self, kind: str, **fields: Any) -> None:
        """Append an item of the conversation."""
        self.line("response_item", {"type": kind} | fields)

    def message(self, role: str, content: str) -> None:
        """Append a message."""
        kind = "output_text" if role == "assistant" else "input_text"
        self.item("message", role=role, content=[{"type": kind, "text": content}])

    def count(self, prompt: int, cached: int, output: int, *, last: bool = True, totals: bool = True) -> None:
        """Append the count of a call, with `last` usage and `totals` of the session if they are wanted."""
        usage = {"input_tokens": prompt, "cached_input_tokens": cached, "output_tokens": output}
        self._totals = {name: self._totals[name] + usage[name] for name in usage}
        info = ({"last_token_usage": usage | {"reasoning_output_tokens": 0}} if last else {}) | (
            {"total_token_usage": dict(self._totals)} if totals else {}
        )
        self.line("event_msg", {"type": "token_count", "info": info, "rate_limits": {}})


def gemini_message(name: str, second: float, kind: str, content: Any, **fields: Any) -> dict[str, Any]:
    """Return a message of Gemini CLI."""
    return {"id": name, "timestamp": clock(second), "type": kind, "content": content, "model": "g"} | fields


def gemini_tokens(prompt: int, cached: int, output: int, thoughts: int = 0, tool: int = 0) -> dict[str, int]:
    """Return counts as Gemini CLI writes them."""
    total = prompt + output + thoughts + tool
    counted = {"input": prompt, "output": output, "cached": cached, "thoughts": thoughts}
    return counted | {"tool": tool, "total": total}


def gemini_session() -> list[dict[str, Any]]:
    """Return the lines of a session of Gemini CLI with two calls."""
    return [
        {"sessionId": "s1", "projectHash": "h", "startTime": clock(0), "lastUpdated": clock(0), "kind": "main"},
        gemini_message("u1", 1, "user", "which of the settings are read first?"),
        gemini_message("g1", 3, "gemini", "those of the project", tokens=gemini_tokens(900, 0, 6, 4)),
        gemini_message("u2", 9, "user", [{"text": "and then?"}]),
        gemini_message("g2", 11, "gemini", "those of the user", tokens=gemini_tokens(940, 880, 5)),
    ]


def codex_session() -> list[dict[str, Any]]:
    """Return a session with two calls, of which the first count is repeated."""
    session = CodexSession()
    session.message("user", "how many files are there in the folder of the project?")
    session.item("function_call", name="shell", arguments='{"command": "ls"}', call_id="k1")
    session.count(800, 0, 20)
    session.lines.append(dict(session.lines[-1]))
    session.item("function_call_output", call_id="k1", output="a b c")
    session.message("assistant", "three of them")
    session.count(840, 768, 5)
    return session.lines
