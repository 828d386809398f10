"""Trees of calls: which call waited for which, the waits between them, and their replay as sessions."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spanlab.cli import compose
from spanlab.study.jobs import build_arrivals
from spanlab.workloads.logs.call_graph import graph_of_times
from spanlab.workloads.logs.log import Log
from spanlab.workloads.logs.read import LogSettings, read_log

from ..support.files import write_lines
from .agent_samples import ClaudeSession, CodexSession, clock, counts, result, text, tool


def at(second: float) -> dict[str, Any]:
    return {"timestamp": clock(second)}


def write_tree(folder: Path) -> Path:
    """Write a session that starts two agents at once and goes on when both have ended."""
    main = ClaudeSession()
    main.user("compare both folders", **at(0))
    main.model("m1", tool("t1", task="a"), counts(9, 0, 900, 30), **at(4))
    main.model("m1", tool("t2", task="b"), counts(9, 0, 900, 30), **at(5))
    main.user([result("t1", "a is small")], **at(16))
    main.user([result("t2", "b is large")], **at(21))
    main.model("m2", text("b is larger"), counts(9, 900, 60, 45), **at(24))
    (folder / "s1" / "subagents").mkdir(parents=True)
    write_lines(folder / "s1.jsonl", *main.lines)
    for name, start, steps in (("a1", 6, 1), ("a2", 7, 2)):
        agent = ClaudeSession(agentId=name, isSidechain=True)
        agent.user(f"look into folder {name}", **at(start))
        for step in range(steps):
            agent.model(f"{name}-{step}", tool(f"{name}-{step}"), counts(5, 0, 300, 9), **at(start + 4 + 6 * step))
            agent.user([result(f"{name}-{step}", f"{step} files")], **at(start + 5 + 6 * step))
        agent.lines[0]["sessionId"] = "s1"
        rows = [row | {"sessionId": "s1", "uuid": f"{name}{row['uuid']}"} for row in agent.lines]
        for row in rows:
            row["parentUuid"] = row["parentUuid"] and f"{name}{row['parentUuid']}"
        write_lines(folder / "s1" / "subagents" / f"agent-{name}.jsonl", *rows)
    return folder


def edges(log: Log) -> list[tuple[int, ...]]:
    assert log.after is not None
    return list(log.after)


def test_agents_wait_for_their_caller_and_it_for_them(tmp_path: Path):
    log = read_log(write_tree(tmp_path), LogSettings())
    # by time: the first call, the one of agent a1, both of a2, and the last one
    assert (log.arrived_ns * 1e-9).tolist() == [0.0, 6.0, 7.0, 12.0, 21.0]
    assert edges(log) == [(), (0,), (0,), (2,), (0, 1, 3)]
    assert (log.waits_ns * 1e-9).round(3).tolist() == [0.0, 1.0, 2.0, 1.0, 4.0]
    assert log.families is not None
    assert log.families.tolist() == [0] * 5
    assert len(set(log.sessions.tolist())) == 3
    assert any(note.startswith("the calls form trees: 2 sessions are of agents") for note in log.notes)


def test_tree_is_replayed_as_one_session(tmp_path: Path):
    log = write_tree(tmp_path / "log")
    workload = [f"workload.path={log}", "workload=log", "workload.output_tokens=4"]
    study = compose("sessions_sim", [*workload, "arrivals.rate_rps=null", "arrivals.think_s=null", "load.rates_rps=[]"])
    from spanlab.build import build_workload

    requests = build_workload(study.workload, str(tmp_path)).requests
    assert [request.after for request in requests] == [(), (0,), (0,), (2,), (0, 1, 3)]
    assert {request.group_id for request in requests} == {0}
    arrived = build_arrivals(study, requests, 0, None)
    assert [request.wait_ns for request in arrived] == [0, 10**9, 2 * 10**9, 10**9, 4 * 10**9]
    at_times = compose("explain", [*workload, "arrivals=as_given"])
    assert {request.after for request in build_arrivals(at_times, requests, 0, None)} == {()}


def test_agent_of_codex_names_its_caller(tmp_path: Path):
    first, second = CodexSession("c1"), CodexSession("c2")
    second.lines[0]["payload"]["source"] = {"subagent": {"thread_spawn": {"parent_thread_id": "c1", "depth": 1}}}
    first.lines, begin = [], first.lines
    for session, start, ask in ((first, 0, "do it"), (second, 10, "do a part")):
        session.lines = begin if session is first else session.lines
        session.message("user", ask)
        session.message("assistant", "done")
        session.count(800, 0, 20)
        for number, row in enumerate(session.lines):
            row["timestamp"] = clock(start + number)
    for number, session in enumerate((first, second)):
        write_lines(tmp_path / f"{number}.jsonl", *session.lines)
    log = read_log(tmp_path, LogSettings())
    assert edges(log) == [(), (0,)]


def test_sessions_in_a_line_have_no_graph(tmp_path: Path):
    rows = [
        {"timestamp": 10 * n, "session_id": n % 2, "messages": [{"role": "user", "content": f"{n}"}]} for n in range(6)
    ]
    log = read_log(write_lines(tmp_path / "log.jsonl", *rows), LogSettings())
    assert (log.after, log.families) == (None, None)


def brute_force(sessions: list[int], starts: list[float], ends: list[float]) -> list[set[int]]:
    """Return the calls of a session that had ended, except those that ended before another one of them was sent."""
    after = []
    for call, start in enumerate(starts):
        ended = [other for other in range(call) if sessions[other] == sessions[call] and ends[other] <= start]
        after.append({one for one in ended if not any(ends[one] <= starts[other] for other in ended if other != one)})
    return after


@pytest.mark.parametrize("seed", range(8))
def test_graph_equals_the_definition(seed: int):
    draw = np.random.default_rng(seed)
    starts = np.cumsum(draw.exponential(1.0, 60))
    ends = starts + draw.exponential(2.0, 60) + 1e-3
    sessions = draw.integers(0, 3, 60).astype(np.int32)
    graph = graph_of_times(sessions, {}, starts, ends)
    assert graph is not None
    assert [set(waited) for waited in graph.after] == brute_force(sessions.tolist(), starts.tolist(), ends.tolist())
    for call, waited in enumerate(graph.after):
        if waited:
            assert graph.waits_ns[call] == pytest.approx((starts[call] - max(ends[list(waited)])) * 1e9, abs=1)
