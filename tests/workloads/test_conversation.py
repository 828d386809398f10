"""Conversations of the Mooncake trace: shared prefixes and conversation numbers."""

from pathlib import Path

import numpy as np
import pytest

from spanlab.workloads.chats import BLOCK
from spanlab.workloads.make_shape import make_shape
from spanlab.workloads.shape import SHAPES
from spanlab.workloads.workload import shared_length

from ..support.files import write_lines
from ..support.shared import TRACES, needs
from .factories import check_equals_committed, load_workload

TRACE = TRACES / "mooncake-fast25" / "conversation_trace.jsonl"
#: Block 0 begins all; 0-1-2 is continued twice, 0-1-9 parts from it; the last is one block long.
PROMPTS = [[0, 1, 2, 3], [0, 5, 6], [0, 1, 2, 4, 7], [0, 1, 9], [0, 1, 2, 4, 8], [10]]
LENGTHS = [1600, 1300, 2100, 1100, 2500, 77]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    rows = [
        {"timestamp": 0, "input_length": length, "output_length": 3 + index, "hash_ids": ids}
        for index, (ids, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True))
    ]
    return write_lines(tmp_path / "conversation_trace.jsonl", *rows)


def test_prompts_share_the_blocks_that_the_trace_says(trace: Path):
    requests = load_workload("conversation", "local", path=trace).requests
    assert [request.num_tokens for request in requests] == LENGTHS
    for index, prompt in enumerate(PROMPTS):
        for other in range(index):
            shared_tokens = np.cumprod([a == b for a, b in zip(prompt, PROMPTS[other], strict=False)]).sum() * BLOCK
            shared = shared_length(requests[index].tokens, requests[other].tokens)
            assert shared == min(shared_tokens, LENGTHS[index], LENGTHS[other]), (index, other)


def test_a_prompt_that_continues_another_is_its_next_turn(trace: Path):
    requests = load_workload("conversation", "local", path=trace).requests
    assert [request.group_id for request in requests] == [0, 1, 0, 2, 0, 3]
    assert [request.output_len for request in requests] == [3, 4, 5, 6, 7, 8]
    assert {request.boundaries for request in requests[:5]} == {(BLOCK,)}


def test_the_committed_shape_is_small_and_says_what_it_is():
    assert (SHAPES / "conversation.npz").stat().st_size < 20 * 1024
    workload = load_workload("conversation", documents=50)
    assert workload.provenance.line().startswith("measured shape: Mooncake conversation trace, ")
    assert workload.provenance.line().endswith("requests of 50 sampled conversations")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"hash_ids": []}, r"hash_ids=\[\]; expected 1 whole numbers, one for each 512 of 9 tokens"),
        ({"hash_ids": [[1]]}, r"hash_ids=\[\[1\]\]; expected 1 whole numbers"),
        ({"input_length": 2**63}, "input_length=9223372036854775808; expected a whole number from 1 up"),
        ({"output_length": True}, "output_length=true, not a whole number"),
    ],
)
def test_a_bad_trace_gets_its_sentence(tmp_path: Path, change: dict, problem: str):
    row = {"input_length": 9, "output_length": 1, "hash_ids": [1]} | change
    path = write_lines(tmp_path / "trace.jsonl", row)
    with pytest.raises(ValueError, match=rf"^workload.path=.*trace.jsonl line 1 has {problem}"):
        load_workload("conversation", "local", path=path)


@needs(TRACE)
def test_the_committed_shape_equals_the_trace(tmp_path: Path):
    check_equals_committed(make_shape("conversation", TRACE, None, tmp_path), "conversation")


def test_a_limit_on_prompts_is_refused():
    with pytest.raises(ValueError, match=r"^workload.max_prompt_tokens=9 with workload.kind=conversation: expected"):
        load_workload("conversation", max_prompt_tokens=9)
