"""Synthetic conversations, and think times from agent logs."""

from dataclasses import replace
from itertools import groupby, pairwise

import numpy as np
import pytest

from spanlab.workloads.chats import ChatSessions, modelled
from spanlab.workloads.load import load_workload
from spanlab.workloads.logs.read import LogWorkload, served

from ..support.files import write_lines

SMALL = ChatSessions(sessions=40, tenants=3, system_tokens=50, message_tokens=20, answer_tokens=10, think_s=4.0)


def conversations(options: ChatSessions = SMALL):
    requests = modelled(options).requests
    assert [request.id for request in requests] == list(range(len(requests)))
    return [list(group) for _, group in groupby(requests, key=lambda request: request.group_id)]


def test_each_prompt_is_the_history_and_a_message():
    for turns in conversations():
        for before, after in pairwise(turns):
            assert before.output is not None
            history = np.concatenate([before.tokens, before.output])
            assert np.array_equal(after.tokens[: len(history)], history)
            assert after.num_tokens > len(history)


def test_conversations_share_system_prompts_alone():
    sessions = conversations()
    systems = {tuple(turns[0].tokens[:50]) for turns in sessions}
    assert len(sessions) == 40
    assert len(systems) == 3
    later_tokens = np.concatenate([turns[-1].tokens[50:] for turns in sessions])
    assert len(np.unique(later_tokens)) == len(later_tokens)


def test_boundaries_are_what_a_later_turn_asks_for():
    for turns in conversations():
        ends = [50] + [request.num_tokens for request in turns[:-1]]
        assert list(turns[-1].boundaries) == ends


def test_first_turns_wait_for_nothing():
    sessions = conversations()
    assert {turns[0].wait_ns for turns in sessions} == {0}
    thought = [request.wait_ns for turns in sessions for request in turns[1:]]
    assert 3.0 < np.mean(thought) * 1e-9 < 5.5


def test_other_think_times_leave_prompts_as_they_are():
    slow, fast = (modelled(replace(SMALL, think_s=think)).requests for think in (4.0, 1.0))
    for slow_request, fast_request in zip(slow, fast, strict=True):
        assert np.array_equal(slow_request.tokens, fast_request.tokens)
        assert slow_request.wait_ns == pytest.approx(4 * fast_request.wait_ns, abs=4)


def test_popular_tenants_have_more_sessions():
    sessions = conversations(replace(SMALL, sessions=400, tenant_zipf=1.5))
    first = [turns[0].tokens[0] for turns in sessions]
    counts = np.unique(first, return_counts=True)[1]
    assert counts[0] > 2 * counts[-1]


@pytest.mark.parametrize(("key", "value"), [("turns", 0.5), ("sessions", 0), ("think_s", -1.0)])
def test_senseless_options_are_refused(key, value):
    with pytest.raises(ValueError, match=rf"workload\.chat_sessions\.{key}={value}"):
        replace(SMALL, **{key: value})


def test_think_times_of_agent_logs_are_read(tmp_path):
    turns = [
        {"hash_ids": [1, 2], "in": 128, "out": 4, "api_time": 1.0},
        {"hash_ids": [1, 2, 3], "in": 192, "out": 4, "think_time": 2.5},
        {"hash_ids": [1, 2, 3, 4], "in": 256, "out": 4, "tool_wait_ms": 500},
    ]
    rows = [{"id": name, "block_size": 64, "requests": turns} for name in ("a", "b")]
    path = write_lines(tmp_path / "sessions.jsonl", *rows)
    settings = LogWorkload(path=str(path))
    workload = served(load_workload(settings), settings.selection)
    for group in (0, 1):
        members = [request for request in workload.requests if request.group_id == group]
        assert [request.wait_ns for request in members] == [0, 2_500_000_000, 500_000_000]


def test_waits_for_tools_belong_to_the_next_round(tmp_path):
    header = "session_id,round_idx,prefix_len,input_len,output_len,arrival_time,tool_wait_after_ms"
    rounds = ("s,0,0,100,10,0,1500", "s,1,110,20,10,0,250", "s,2,140,20,10,0,0")
    path = write_lines(tmp_path / "rounds.csv", header, *rounds)
    settings = LogWorkload(path=str(path))
    workload = served(load_workload(settings), settings.selection)
    assert [request.wait_ns for request in workload.requests] == [0, 1_500_000_000, 250_000_000]
