"""Written workloads read back as the requests that they were written from."""

from pathlib import Path

import numpy as np
import orjson
import pytest

from spanlab.core.request import Request, Span
from spanlab.workloads.logs.log import Ids, Log
from spanlab.workloads.logs.read import LogSettings, read_log
from spanlab.workloads.writers import WRITERS, BlockIds

BLOCK = 16
#: Options of each writer, and the length of the pieces in which its file is read again.
FORMATS = {"mooncake": {"block_size": BLOCK}, "guidellm": {"block_size": BLOCK}, "openai": {}}


def made_requests(count: int = 40, seed: int = 3) -> list[Request]:
    """Prompts that share prefixes with earlier ones, with irregular lengths and times."""
    rng = np.random.default_rng(seed)
    requests: list[Request] = []
    for number, arrived in enumerate(np.cumsum(rng.integers(1, 10**10, count)).tolist()):
        earlier = requests[rng.integers(number)].tokens if number and rng.random() < 0.8 else np.empty(0, np.int32)
        shared = earlier[: rng.integers(len(earlier) + 1)]
        fresh = rng.integers(0, 50, rng.integers(1, 80)).astype(np.int32)
        spans = (Span(shared), Span(fresh)) if len(shared) else (Span(fresh),)
        length = int(rng.integers(1, 99))
        requests.append(Request(id=number, group_id=number % 7, spans=spans, output_len=length, arrived_at=arrived))
    return requests


def write_workload(folder: Path, name: str, requests: list[Request], **options: object) -> Path:
    path = folder / f"{name}.jsonl"
    lines = WRITERS.make(name, {}, FORMATS[name] | options)(requests)
    path.write_bytes(
        b"".join(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY) for line in lines)
    )
    return path


def equal_blocks(first: Request, second: Request) -> int:
    """Number of leading blocks, full or last, with equal tokens in two prompts."""
    ends = [min(at + BLOCK, request.num_tokens) for request in (first,) for at in range(0, request.num_tokens, BLOCK)]
    starts = range(0, first.num_tokens, BLOCK)
    blocks = 0
    for start, end in zip(starts, ends, strict=True):
        same_end = end == min(start + BLOCK, second.num_tokens)
        if not same_end or first.tokens[:end].tolist() != second.tokens[:end].tolist():
            break
        blocks += 1
    return blocks


def equal_pieces(log: Log, first: int, second: int) -> int:
    pieces = [log.pieces[log.starts[number] : log.starts[number + 1]].tolist() for number in (first, second)]
    return next((number for number, (a, b) in enumerate(zip(*pieces, strict=False)) if a != b), min(map(len, pieces)))


@pytest.mark.parametrize("name", FORMATS)
def test_written_workload_reads_as_it_was(tmp_path: Path, name: str):
    requests = made_requests()
    log = read_log(write_workload(tmp_path, name, requests), LogSettings(piece=BLOCK))
    arrived = np.array([request.arrived_at for request in requests])
    assert log.format == {"guidellm": "mooncake"}.get(name, name)
    assert log.prompt_tokens.tolist() == [request.num_tokens for request in requests]
    assert log.output_lens.tolist() == [request.output_len for request in requests]
    scale = 1000 if name == "guidellm" else 1  # its seconds are read as Mooncake's milliseconds
    assert np.abs(log.arrived_ns * scale - (arrived - arrived[0])).max() <= scale
    for first in range(len(requests)):
        for second in range(first):
            assert equal_pieces(log, first, second) == equal_blocks(requests[first], requests[second])


def test_block_ids_are_chained(tmp_path: Path):
    assert read_log(write_workload(tmp_path, "mooncake", made_requests()), LogSettings()).ids == Ids.CHAINED


def test_sessions_are_groups(tmp_path: Path):
    log = read_log(write_workload(tmp_path, "openai", made_requests()), LogSettings())
    assert log.sessions is not None
    assert log.sessions.tolist() == [number % 7 for number in range(40)]


def test_whole_milliseconds_stay_whole(tmp_path: Path):
    requests = [
        Request(0, 0, (Span(np.arange(5, dtype=np.int32)),), arrived_at=time) for time in (3_000_000, 3_500_000)
    ]
    stamps = [
        orjson.loads(line)["timestamp"] for line in write_workload(tmp_path, "mooncake", requests).read_bytes().split()
    ]
    assert stamps == [3, 3.5]
    assert [type(stamp) for stamp in stamps] == [int, float]


def test_salts_share_no_blocks():
    ids, tokens = BlockIds(BLOCK), (Span(np.arange(40, dtype=np.int32)),)
    ann, bob, again = (ids.of(Request(0, 0, tokens, cache_salt=salt)) for salt in ("ann", "bob", "ann"))
    assert set(ann).isdisjoint(bob)
    assert ann == again


def test_salts_are_kept_apart_in_requests(tmp_path: Path):
    tokens = (Span(np.arange(40, dtype=np.int32)),)
    requests = [Request(0, 0, tokens, cache_salt=salt, arrived_at=time) for time, salt in enumerate(("ann", "bob"), 1)]
    log = read_log(write_workload(tmp_path, "openai", requests), LogSettings())
    assert equal_pieces(log, 0, 1) == 0


def test_unknown_block_size_is_refused():
    with pytest.raises(
        ValueError, match=r"^writer.block_size=17: expected one of 16, 32, .* the sizes that log readers recognise"
    ):
        WRITERS.make("mooncake", {}, {"block_size": 17})


@pytest.mark.parametrize(("prompts", "call"), [("text", "completions"), ("messages", "chat/completions")])
def test_prompts_are_decoded(tmp_path: Path, make_tokenizer, prompts: str, call: str):
    from tokenizers import Tokenizer

    file = make_tokenizer("one two three four")
    ids = np.array(Tokenizer.from_file(str(file)).encode("one two three").ids, dtype=np.int32)
    request = Request(0, 0, (Span(ids),), output_len=7)
    path = write_workload(tmp_path, "openai", [request], prompts=prompts, tokenizer=str(file), served_model="m")
    line = orjson.loads(path.read_bytes())
    assert line["url"] == f"/v1/{call}"
    prompt = line["body"]["prompt"] if prompts == "text" else line["body"]["messages"][0]["content"]
    assert prompt == "one two three"
    assert (line["body"]["max_tokens"], line["body"]["min_tokens"], line["body"]["model"]) == (7, 7, "m")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"prompts": "text"}, "writer.prompts=text: expected writer.tokenizer too"),
        ({"tokenizer": "x.json"}, "writer.tokenizer=x.json with writer.prompts=tokens: expected null"),
        ({"prompts": "words"}, "writer.prompts=words: expected one of"),
    ],
)
def test_prompts_need_their_tokenizer(options: dict, problem: str):
    with pytest.raises(ValueError, match=f"^{problem}"):
        WRITERS.make("openai", {}, options)
