"""RAGPulse trace: contents and arrival times; tests/study counts what can be reused."""

import re
from pathlib import Path

import numpy as np
import pytest

from spanlab.workloads import RagPulse, SourceUnavailable, make_shape
from spanlab.workloads.ragpulse import scatter
from spanlab.workloads.shape import SHAPES

from ..support.files import write_lines
from ..support.shared import TRACES
from .factories import check_equals_committed, load_workload

TRACE = TRACES / "ragpulse"
TABLES = {
    "sys_prompt": ("1_sys_prompt.jsonl", "sys_prompt_id"),
    "passages_ids": ("2_passages.jsonl", "passage_id"),
    "history": ("3_history.jsonl", "history_id"),
    "web_search": ("5_web_search.jsonl", "web_search_id"),
    "user_input": ("4_user_input.jsonl", "user_input_id"),
}
LENGTHS = {
    "sys_prompt": {0: 5, 1: 3},
    "passages_ids": {0: 4, 11: 7},
    "history": {20: 2},
    "web_search": {30: 6},
    "user_input": {40: 1, 41: 2},
}


def row(at: int, session: str, system: list[int], passages: list[int], **others) -> dict:
    ids = {"history": [20], "web_search": [], "user_input": [40]} | others
    listed = {"sys_prompt": system, "passages_ids": passages, **ids}
    return {
        "timestamp": str(at),
        "input_length": 99,
        "output_length": 8 + at,
        "hash_ids": listed,
        "session_id": session,
    }


ROWS = [
    row(10, "b", [0, 1], [11, 0]),
    row(12, "a", [0, 1], [0, 11], web_search=[30]),
    row(16, "b", [0], [], user_input=[41]),
    row(4, "c", [0, 1], [11, 0]),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four requests of three sessions, the last of them in a second week."""
    trace = tmp_path / "trace"
    trace.mkdir()
    for kind, (name, id_field) in TABLES.items():
        write_lines(trace / name, *({id_field: i, "token_length": n} for i, n in LENGTHS[kind].items()))
    write_lines(trace / "0_trace.jsonl", *ROWS)
    return trace


@pytest.fixture
def recorded() -> Path:
    """The original files, which are not part of a checkout."""
    if not TRACE.is_dir():
        pytest.skip("needs the recorded trace")
    return TRACE


def test_the_committed_shape_equals_the_recorded_trace(recorded: Path, tmp_path: Path):
    check_equals_committed(make_shape("ragpulse", recorded, None, tmp_path), "ragpulse", "arrivals_s")
    real, modelled = (
        load_workload("ragpulse", source, path=path) for source, path in (("local", recorded), ("shape", None))
    )
    assert real.provenance.line() == modelled.provenance.line().replace("measured shape", "local trace")
    for first, second in zip(real.requests[::7], modelled.requests[::7], strict=True):
        assert first.tokens.tobytes() == second.tokens.tobytes()
        for key in ("arrived_at", "output_len", "group_id"):
            assert getattr(first, key) == getattr(second, key)


def test_the_shape_is_small_and_says_what_it_is():
    assert (SHAPES / "ragpulse.npz").stat().st_size < 300 * 1024
    workload = load_workload("ragpulse", ragpulse=RagPulse(requests=2000))
    assert workload.provenance.line() == (
        "measured shape: RAGPulse trace, 2000 requests of 1148 sessions, gaps as recorded, "
        "passages, history and web pages independent"
    )


def test_components_stand_in_order_with_their_lengths_and_promises(folder: Path):
    workload = load_workload("ragpulse", "local", path=folder)
    lengths = [[len(span.tokens) for span in request.spans] for request in workload.requests]
    assert lengths == [[5, 3, 7, 4, 2, 1], [5, 3, 4, 7, 2, 6, 1], [5, 2, 2], [5, 3, 7, 4, 2, 1]]
    second = workload.requests[1]
    assert [span.independent for span in second.spans] == [False, False, True, True, True, True, False]
    every = load_workload("ragpulse", "local", path=folder, ragpulse=RagPulse(independent="all")).requests
    assert all(span.independent for request in every for span in request.spans)
    assert {request.boundaries for request in workload.requests} == {(5,)}
    assert [request.group_id for request in workload.requests] == [0, 1, 0, 2]
    assert [request.output_len for request in workload.requests] == [18, 20, 24, 12]
    assert workload.provenance.line() == (
        "local trace: RAGPulse trace, 4 requests of 3 sessions, gaps as recorded, "
        "passages, history and web pages independent"
    )


def test_equal_ids_are_one_span_within_their_kind(folder: Path):
    """System prompt 0 and passage 0 have the same number but different content."""
    requests = load_workload("ragpulse", "local", path=folder).requests
    assert [id(span) for span in requests[0].spans] == [id(span) for span in requests[3].spans]
    assert requests[0].spans[2] is requests[1].spans[3]
    spans = {id(span): span for request in requests for span in request.spans}
    tokens = np.concatenate([span.tokens for span in spans.values()])
    assert len(tokens) == len(set(tokens.tolist())) == 5 + 3 + 4 + 7 + 2 + 6 + 1 + 2
    assert tokens.dtype == np.int32
    assert tokens.min() >= 0
    # Scattered, not counted: no token is its neighbour's successor.
    assert 1 not in np.diff(tokens)


def test_tokens_do_not_depend_on_how_much_is_served(folder: Path):
    complete, some = (
        load_workload("ragpulse", "local", path=folder, ragpulse=RagPulse(requests=n)).requests for n in (4, 2)
    )
    assert [r.tokens.tolist() for r in complete[:2]] == [r.tokens.tolist() for r in some]
    assert [r.arrived_at for r in complete[:2]] == [r.arrived_at for r in some]


def test_a_second_week_follows_the_first(folder: Path):
    arrivals = [request.arrived_at for request in load_workload("ragpulse", "local", path=folder).requests]
    assert arrivals == [0, 2 * 10**9, 6 * 10**9, (7 * 24 * 3600 - 6) * 10**9]


def test_the_recorded_weeks_make_one_clock():
    """Without the start of the second week, gaps would vary 84.5 times their mean; they vary 3.2 times."""
    seconds = np.array([request.arrived_at for request in load_workload("ragpulse").requests]) / 1e9
    gaps = np.diff(seconds)
    assert (gaps >= 0).all()
    assert seconds[-1] == 604_800 + 604_603 - 82
    assert gaps.std() / gaps.mean() == pytest.approx(3.22, abs=0.01)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"requests": 3, "speedup": 4.0}, [0, 500_000_000, 1_500_000_000]),
        ({"requests": 3, "rate_rps": 0.5}, [0, 4 * 10**9 // 3, 4 * 10**9]),
        ({"requests": 1, "rate_rps": 0.5}, [0]),
    ],
)
def test_gaps_are_all_stretched_alike(folder: Path, options: dict, expected: list[int]):
    workload = load_workload("ragpulse", "local", path=folder, ragpulse=RagPulse(**options))
    assert [request.arrived_at for request in workload.requests] == expected


def test_the_pace_is_named(folder: Path):
    def detail(**options) -> str:
        options = RagPulse(**options)
        return load_workload("ragpulse", "local", path=folder, ragpulse=options).provenance.detail

    assert "gaps stretched to 2.5 requests a second, every component" in detail(rate_rps=2.5, independent="all")
    assert "gaps 60 times shorter, passages" in detail(speedup=60.0)


def test_scattered_ids_are_distinct_in_a_small_vocabulary():
    ids = np.arange(2**20, dtype=np.int32)
    scattered = scatter(ids)
    assert scattered.dtype == np.int32
    assert scattered.min() >= 0
    assert len(np.unique(scattered)) == len(ids)
    last = np.arange(2**31 - 2**16, 2**31, dtype=np.int64).astype(np.int32)
    assert len(np.unique(scatter(last))) == len(last)
    # Contents of four tokens, folded into 32,000 words: drawn blindly, two would be equal once in 3e7 times.
    folded = (scattered % 32_000).reshape(-1, 4).astype(np.uint64)
    contents_as_numbers = folded @ np.array([1, 32_000, 32_000**2, 32_000**3], dtype=np.uint64)
    assert len(np.unique(contents_as_numbers)) == len(folded)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"requests": 0}, "workload.ragpulse.requests=0: expected a number above zero"),
        ({"requests": 5}, "workload.ragpulse.requests=5; expected at most 4, the requests of the trace"),
        ({"rate_rps": 0.0}, "workload.ragpulse.rate_rps=0.0: expected a number above zero"),
        ({"speedup": float("nan")}, "workload.ragpulse.speedup=nan: expected a number above zero"),
        (
            {"speedup": 2.0, "rate_rps": 1.0},
            "workload.ragpulse.speedup=2.0 with workload.ragpulse.rate_rps=1.0; expected one of them",
        ),
        ({"independent": "none"}, "workload.ragpulse.independent=none: expected one of passages, all"),
    ],
)
def test_a_senseless_option_is_refused(folder: Path, options: dict, sentence: str):
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        load_workload("ragpulse", "local", path=folder, ragpulse=RagPulse(**options))


def test_a_rate_needs_time(folder: Path):
    write_lines(folder / "0_trace.jsonl", ROWS[0], ROWS[0])
    with pytest.raises(ValueError, match=r"^workload.ragpulse.rate_rps=2.0 with 2 requests at the same second"):
        load_workload("ragpulse", "local", path=folder, ragpulse=RagPulse(rate_rps=2.0))


EXPECTED = "the RAGPulse folder with 0_trace.jsonl and the tables 1_sys_prompt.jsonl to 5_web_search.jsonl"


@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        (ROWS[0] | {"timestamp": "soon"}, 'timestamp="soon"; expected a whole number from 0'),
        (ROWS[0] | {"timestamp": "9" * 5000}, 'timestamp="9+…; expected a whole number from 0'),
        (ROWS[0] | {"session_id": [1]}, r"session_id=\[1\], not a string or a whole number"),
        (ROWS[0] | {"hash_ids": None}, "hash_ids=null, not an object"),
        (ROWS[0] | {"hash_ids": {"sys_prompt": 3}}, "sys_prompt=3, not a list"),
        (ROWS[0] | {"output_length": 0}, "output_length=0; expected a whole number from 1"),
        (row(1, "a", [7], []), "the sys_prompt_id 7, which 1_sys_prompt.jsonl lacks"),
        (row(1, "a", [[0]], []), r"the sys_prompt_id \[0\], which 1_sys_prompt.jsonl lacks"),
        (row(1, "a", [], [], history=[], user_input=[]), "a request without any component"),
        ({"timestamp": "1", "output_length": 1, "session_id": "a"}, "no field 'hash_ids'"),
        (ROWS[0] | {"hash_ids": {"sys_prompt": []}}, "no field 'passages_ids'"),
    ],
)
def test_a_bad_trace_gets_its_sentence(folder: Path, broken: dict, problem: str):
    write_lines(folder / "0_trace.jsonl", ROWS[0], broken)
    with pytest.raises(ValueError, match=rf"^workload.path=.*0_trace.jsonl line 2 has {problem}.* {EXPECTED}$"):
        load_workload("ragpulse", "local", path=folder)


def test_times_that_fall_within_a_week_are_refused(folder: Path):
    write_lines(folder / "0_trace.jsonl", ROWS[0] | {"timestamp": "800000"}, ROWS[0])
    with pytest.raises(ValueError, match=r"^workload.path=.*0_trace.jsonl has decreasing timestamps within a week"):
        load_workload("ragpulse", "local", path=folder)


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([{"passage_id": 1}], "line 1 has no field 'token_length'"),
        ([{"passage_id": [1], "token_length": 3}], r"line 1 has passage_id=\[1\], not a whole number"),
        ([{"passage_id": 1, "token_length": 0}], "line 1 has token_length=0; expected a whole number from 1"),
        ([{"passage_id": 1, "token_length": 3}] * 2, "lists a passage_id twice"),
        ([], "holds no rows"),
    ],
)
def test_a_bad_table_gets_its_sentence(folder: Path, rows: list[dict], problem: str):
    write_lines(folder / "2_passages.jsonl", *rows)
    with pytest.raises(ValueError, match=rf"^workload.path=.*2_passages.jsonl {problem}.* {EXPECTED}$"):
        load_workload("ragpulse", "local", path=folder)


def test_a_missing_file_names_the_ways_out(folder: Path):
    (folder / "3_history.jsonl").unlink()
    with pytest.raises(
        SourceUnavailable, match=rf"^workload.path=.*3_history.jsonl is not a file; expected {EXPECTED}"
    ):
        load_workload("ragpulse", "local", path=folder)
    with pytest.raises(SourceUnavailable, match=rf"^workload.path=no_such_place is not a folder; expected {EXPECTED}"):
        load_workload("ragpulse", "local", path="no_such_place")


def test_what_a_trace_cannot_use_is_refused(folder: Path, tmp_path: Path, make_tokenizer):
    with pytest.raises(ValueError, match=r"^workload.max_prompt_tokens=9 with workload.kind=ragpulse: expected"):
        load_workload("ragpulse", max_prompt_tokens=9)
    with pytest.raises(ValueError, match=r"^workload.tokenizer=.* is not read for ragpulse; expected none"):
        make_shape("ragpulse", folder, make_tokenizer(), tmp_path)
