"""Server logs are recognised by content and read line by line."""

import errno
import json
import pickle
import re
from pathlib import Path

import numpy as np
import pytest

from spanlab.core.token_string import sums_before
from spanlab.offline.replay import Contents, build_paths
from spanlab.workloads.logs import prompts
from spanlab.workloads.logs.log import Columns, Entry, Ids, Log, arrival_times, hash_pieces, is_chained
from spanlab.workloads.logs.read import LogSettings, local, read_log, served
from spanlab.workloads.logs.source import LOG_FORMATS
from spanlab.workloads.selection import Selection
from spanlab.workloads.workload import Provenance, Workload

from ..support.shared import TRACES, needs
from .log_samples import FIRST, SECOND, lines, table, write_sample

#: Known facts of each sample: prompt lengths, tokens seen before, kind of ids.
CHAINED, CONTENT, NONE = Ids.CHAINED, Ids.CONTENT, Ids.NONE
KNOWN = {
    "mooncake": ([600, 700], 512, CHAINED),
    "sglang": ([40, 48], 32, CHAINED),
    "sglang text": ([40, 48], 32, CHAINED),
    "openai prompt": ([40, 48], 32, CHAINED),
    "lmcache": ([40, 48], 32, CHAINED),
    "tair": ([40, 48], 32, CHAINED),
    "vllm_vcr": ([40, 48], 32, CHAINED),
    "agent_sessions": ([40, 48], 32, CHAINED),
    "tracelab": ([40, 48], 32, CHAINED),
    "tracelab lines": ([40, 48], 32, CHAINED),
    "sagemaker": ([40, 48], 32, CHAINED),
    "guidellm": ([40, 48], 0, NONE),
    "aiperf": ([40, 48], 0, NONE),
    "openai_answers": ([40, 48], 0, NONE),
    "openrouter": ([40, 48], 0, NONE),
    "azure": ([40, 48], 0, NONE),
    "burstgpt": ([40, 48], 0, NONE),
    "vllm_bench": ([40, 48], 0, NONE),
    "vllm_bench requests": ([40, 48], 0, NONE),
    "spanlab_records": ([40, 48], 0, NONE),
    "parquet": ([40, 48], 32, CHAINED),
    "vllm_events": ([48, 48], 32, CHAINED),
}


def reused_tokens(log: Log) -> int:
    return int(build_paths(log.pieces, log.lengths, log.starts).seen_tokens.sum())


@pytest.mark.parametrize("name", KNOWN)
def test_log_is_recognised_and_read(tmp_path: Path, name: str):
    log = read_log(write_sample(tmp_path, name), LogSettings())
    lengths, shared, ids = KNOWN[name]
    assert log.format == name.partition(" ")[0]
    assert log.prompt_tokens.tolist() == lengths
    assert (reused_tokens(log), log.ids) == (shared, ids)


def test_equal_messages_share_text(tmp_path: Path):
    log = read_log(write_sample(tmp_path, "openai"), LogSettings())
    assert reused_tokens(log) == log.prompt_tokens[0]
    assert log.opens.sum() == 3
    assert log.tenant_names == ("ann", "bob")
    assert "no tokenizer is given" in log.notes[0]


def test_tokenizer_counts_real_tokens(tmp_path: Path, make_tokenizer):
    path = tmp_path / "text.jsonl"
    path.write_bytes(lines({"prompt": "one two three"}, {"prompt": "one two"}))
    log = read_log(path, LogSettings(piece=1), str(make_tokenizer("one two three")))
    assert (log.prompt_tokens.tolist(), reused_tokens(log), log.notes[0][:7]) == ([3, 2], 2, "the log")


def test_log_of_another_process_has_the_same_prompts(tmp_path: Path):
    log = read_log(write_sample(tmp_path, "openai"), LogSettings())
    copy = pickle.loads(pickle.dumps(log))
    assert len(copy.source.prompts) == log.requests
    for one, other in zip(copy.source.prompts, log.source.prompts, strict=True):
        assert [message.rendered for message in one.messages] == [message.rendered for message in other.messages]


class FullFile:
    def write(self, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_full_folder_of_temporary_files_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write_sample(tmp_path, "openai")
    monkeypatch.setattr(prompts.tempfile, "TemporaryFile", FullFile)
    with pytest.raises(ValueError, match=r"TMPDIR=.*: expected room for the prompts of the log, but No space"):
        read_log(path, LogSettings())


def test_session_over_many_lines_reads_alike(tmp_path: Path):
    path = write_sample(tmp_path, "agent_sessions")
    spread = tmp_path / "session.json"
    session = json.loads(path.read_text())
    requests = ",\n".join(map(json.dumps, session.pop("requests")))
    spread.write_text(json.dumps(session, indent=2).removesuffix("\n}") + f',\n"requests": [\n{requests}\n]\n}}')
    assert read_log(spread, LogSettings()).fingerprint == read_log(path, LogSettings()).fingerprint


def test_time_that_goes_backwards_is_refused_or_sorted(tmp_path: Path):
    path = tmp_path / "late.jsonl"
    rows = [{"timestamp": time, "input_length": 5, "output_length": time, "hash_ids": [time]} for time in (9, 4, 6)]
    path.write_bytes(lines(*rows))
    with pytest.raises(ValueError, match=r"late.jsonl:2: timestamp: expected a time no earlier than that of line 1"):
        read_log(path, LogSettings())
    log = read_log(path, LogSettings(backwards="sort"))
    assert log.output_lens.tolist() == [4, 6, 9]
    assert "time goes backwards in the log: its requests are sorted by time" in log.notes


def test_coarse_time_stamps_are_spread():
    times, notes = arrival_times(np.array([0.0, 0.0, 0.0, 3.0, 3.0, 6.0]))
    assert times.tolist() == [0, 10**9, 2 * 10**9, 3 * 10**9, 4_500_000_000, 6 * 10**9]
    assert notes[0].startswith("2 time stamps are shared by up to 3 requests")


def test_served_requests_keep_the_caveats_of_their_log(tmp_path: Path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(lines(*({"timestamp": 7, "input_ids": [1]} for _ in range(2))))
    notes = served(local(path, LogSettings(), Selection()), Selection()).notes
    assert notes == ("1 time stamps are shared by up to 2 requests, which are spread up to the next stamp",)


def test_prompts_without_tokens_are_not_served(tmp_path: Path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(lines(*({"timestamp": time, "input_ids": [1] * (time % 2)} for time in range(4))))
    workload = served(local(path, LogSettings(), Selection()), Selection())
    assert [request.arrived_at for request in workload.requests] == [10**9, 3 * 10**9]
    assert workload.provenance.detail.endswith("; 2 without a prompt are left out")


def test_rounds_of_sessions_follow_their_waits(tmp_path: Path):
    path = tmp_path / "rounds.csv"
    path.write_bytes(
        table(
            ["id", "input_len", "output_len", "arrival_time", "round_idx", "tool_wait_after_ms", "prefix_len"],
            ["a", 16, 16, 1000, 0, 5000, 0],
            ["a", 16, 16, 1000, 1, 0, 32],
            ["b", 16, 16, 2000, 0, 0, 0],
        )
    )
    log = read_log(path, LogSettings())
    assert log.prompt_tokens.tolist() == [16, 16, 48]
    assert log.arrived_ns.tolist() == [0, 10**9, 5 * 10**9]
    assert reused_tokens(log) == 16


def test_subagents_stand_where_they_were_called(tmp_path: Path):
    inner = {"type": "subagent", "requests": [{"t": 1.0, "in": 16, "hash_ids": [7]}]}
    outer = [{"t": float(time), "in": 16, "hash_ids": [time]} for time in (0, 2)]
    path = tmp_path / "session.jsonl"
    path.write_bytes(lines({"id": "s", "block_size": 16, "requests": [outer[0], inner, outer[1]]}))
    log = read_log(path, LogSettings())
    assert log.pieces.tolist() == [0, 2, 1]


def test_contents_are_numbered_alike_in_any_batches(monkeypatch: pytest.MonkeyPatch):
    draw = np.random.default_rng(0)
    lengths = draw.integers(0, 9, 60)
    entries = [
        Entry(draw.integers(-40, 40, length) << 50, draw.integers(1, 17, length), line)
        for line, length in enumerate(lengths.tolist(), 1)
    ]
    keys = np.concatenate([entry.keys for entry in entries])
    for batch in (7, 64, 1 << 20):
        monkeypatch.setattr("spanlab.workloads.logs.log._BATCH", batch)
        columns = Columns()
        for entry in entries:
            columns.add(entry)
        log = columns.log("some", Ids.CONTENT, None, ())
        assert np.array_equal(log.pieces, np.unique(keys, return_inverse=True)[1])
        assert log.prompt_tokens.tolist() == [int(entry.lengths.sum()) for entry in entries]


def test_chained_ids_have_one_predecessor():
    assert is_chained(np.array([0, 1, 0, 2], np.int32), np.array([0, 2, 4]))
    assert not is_chained(np.array([0, 1, 2, 1], np.int32), np.array([0, 2, 4]))


@pytest.mark.parametrize("piece", [1, 3, 16])
def test_pieces_are_equal_where_prefixes_are(piece: int):
    (first, _), (second, lengths) = hash_pieces(np.array(FIRST), piece), hash_pieces(np.array(SECOND), piece)
    shared = 32 // piece
    assert (first[:shared] == second[:shared]).all()
    assert not set(first[shared:]) & set(second)
    assert lengths.sum() == len(SECOND)


def test_piece_is_known_by_what_stands_before():
    keys, _ = hash_pieces(np.array([7, 7, 7, 7]), 2)
    assert len(set(keys.tolist())) == 2


def test_served_log_shares_what_the_log_shares(tmp_path: Path):
    log = read_log(write_sample(tmp_path, "sglang"), LogSettings())
    first, second = served(Workload("log", (), Provenance("local trace", "two"), log=log), Selection()).requests
    assert (first.num_tokens, second.num_tokens) == (40, 48)
    assert (first.tokens[:32] == second.tokens[:32]).all()
    assert not set(first.tokens[32:].tolist()) & set(second.tokens.tolist())


def test_a_limit_that_cuts_nothing_changes_no_prompt(tmp_path: Path):
    rng, path = np.random.default_rng(5), tmp_path / "trace.jsonl"
    stems = [rng.integers(0, 1000, 6).tolist() for _ in range(4)]
    rows = []
    for second in range(60):
        hash_ids = [
            *stems[rng.integers(4)][: rng.integers(1, 7)],
            *rng.integers(1000, 1010, rng.integers(0, 4)).tolist(),
        ]
        length = 512 * len(hash_ids) - int(rng.integers(0, 512))
        rows.append({"timestamp": 1000 * second, "input_length": length, "output_length": 3, "hash_ids": hash_ids})
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    workload = local(path, LogSettings(), Selection())
    free, limited = (served(workload, Selection(max_prompt_tokens=most)).requests for most in (None, 1 << 20))
    assert len(free) == len(rows)
    for one, other in zip(free, limited, strict=True):
        assert [len(span.tokens) for span in one.spans] == [len(span.tokens) for span in other.spans]
        assert (one.tokens == other.tokens).all()
        assert (one.id, one.group_id, one.output_len) == (other.id, other.group_id, other.output_len)


@needs(TRACES)
@pytest.mark.parametrize(
    ("path", "name", "requests", "ids"),
    [
        ("mooncake-fast25/conversation_trace.jsonl", "mooncake", 12_031, CHAINED),
        ("ragpulse", "ragpulse", 7_106, CONTENT),
        ("azure-llm-2023/AzureLLMInferenceTrace_conv.csv", "azure", 19_366, NONE),
        ("llmservingsim-vllm-groundtruth/RTXPRO6000/Llama-3.1-8B/requests.jsonl", "vllm_bench", 300, NONE),
    ],
)
def test_recorded_trace_is_read(path: str, name: str, requests: int, ids: Ids):
    log = read_log(TRACES / path, LogSettings())
    assert (log.format, log.requests, log.ids) == (name, requests, ids)


def test_page_names_the_truth_test_of_every_format():
    root = Path(__file__).resolve().parents[2]
    section = (root / "docs" / "logs.md").read_text().partition("## Truth of formats")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \| .* \| `(test_\w+\.py)::(test_\w+)` \|$", section, re.MULTILINE)
    named = [name for names, _, _ in rows for name in re.findall(r"`(\w+)`", names)]
    assert sorted(named) == sorted(LOG_FORMATS)
    for _, file, test in rows:
        assert f"def {test}(" in (root / "tests" / "workloads" / file).read_text()


# -- A log is the same however its prompts repeat each other: columns store only where they differ. ---


def entries(seed: int, sessions: int) -> list[Entry]:
    """Return prompts that go on from, repeat, part from or change in the middle the last one of their session."""
    draw = np.random.default_rng(seed)
    last: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    made = []
    for line in range(1, 120):
        session = int(draw.integers(sessions))
        keys, lengths = last.get(session, (np.zeros(0, np.int64), np.zeros(0, np.int64)))
        cut = int(draw.integers(len(keys) + 1)) if draw.random() < 0.4 else len(keys)
        more = int(draw.integers(0, 12))
        keys = np.concatenate([keys[:cut], draw.integers(-50, 50, more)])
        lengths = np.concatenate([lengths[:cut], draw.integers(1, 20, more)])
        if draw.random() < 0.3 and len(keys):
            keys[draw.integers(len(keys))], lengths[draw.integers(len(keys))] = draw.integers(-50, 50), 30
        last[session] = keys, lengths
        opens = tuple(sorted({int(at) for at in draw.integers(0, max(len(keys), 1), 3)} - {0})) if len(keys) else ()
        made.append(Entry(keys, lengths, line, float(line), session=session if sessions > 1 else None, opens=opens))
    return made


@pytest.mark.parametrize("limit", ["_SESSIONS_HELD", "_PIECES_HELD"])
@pytest.mark.parametrize("sessions", [1, 4, 600])
@pytest.mark.parametrize("seed", range(4))
def test_columns_hold_every_piece(monkeypatch, seed: int, sessions: int, limit: str):
    monkeypatch.setattr(f"spanlab.workloads.logs.log.{limit}", 3)
    made, columns = entries(seed, sessions), Columns()
    for entry in made:
        columns.add(entry)
    log = columns.log("test", Ids.CONTENT, None, ())
    keys = np.concatenate([entry.keys for entry in made])
    assert log.pieces.tolist() == np.unique(keys, return_inverse=True)[1].tolist()
    assert log.lengths.tolist() == [length for entry in made for length in entry.lengths.tolist()]
    assert log.starts.tolist() == np.cumsum([0, *(len(entry.keys) for entry in made)]).tolist()
    assert log.prompt_tokens.tolist() == [int(entry.lengths.sum()) for entry in made]
    opened = np.flatnonzero(log.opens).tolist()
    starts = log.starts.tolist()
    expected = [
        start + at for start, entry in zip(starts, made, strict=False) if len(entry.keys) for at in (0, *entry.opens)
    ]
    assert opened == expected


def test_a_long_piece_follows_short_ones():
    columns, lengths = Columns(), [[16, 5], [16, 70_000], [16, 5]]
    for line, each in enumerate(lengths):
        columns.add(Entry(np.array([1, sum(each)]), np.array(each), line, float(line)))
    log = columns.log("test", Ids.CONTENT, None, ())
    assert (log.lengths.dtype, log.lengths.tolist()) == (np.int32, [length for each in lengths for length in each])


@pytest.mark.parametrize("count", [0, 1, 7, 70])
def test_sums_before_indexes_equal_all_sums(monkeypatch, count: int):
    monkeypatch.setattr("spanlab.core.token_string._CHUNK", 7)
    draw = np.random.default_rng(0)
    values = draw.integers(0, 1 << 30, count).astype(np.int32)
    indexes = draw.integers(0, count + 1, 200)
    assert (
        sums_before(values, indexes).tolist()
        == np.concatenate([[0], np.cumsum(values, dtype=np.int64)])[indexes].tolist()
    )


def test_tokens_seen_anywhere_are_counted_in_chunks(monkeypatch):
    pieces = np.random.default_rng(1).integers(0, 30, 100).astype(np.int32)
    lengths, flags = np.arange(1, 101, dtype=np.int32), np.zeros(100, dtype=np.bool_)
    contents = Contents(pieces, lengths, flags, flags, np.array([0, 40, 40, 100]))
    whole = contents.seen_anywhere().tolist()
    monkeypatch.setattr("spanlab.offline.replay._CHUNK", 9)
    assert contents.seen_anywhere().tolist() == whole
    first = {piece: place for place, piece in reversed(list(enumerate(pieces.tolist())))}
    again = [0 if first[piece] == place else place + 1 for place, piece in enumerate(pieces.tolist())]
    assert whole == [sum(again[:40]), 0, sum(again[40:])]
