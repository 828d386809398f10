"""The entry `export` writes a workload whose arrivals are those of a study."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from spanlab import build
from spanlab.cli import compose
from spanlab.study import jobs
from spanlab.study.export import run_export
from spanlab.workloads.logs.read import LogSettings, read_log
from spanlab.workloads.writers import SESSIONS

from ..workloads.log_samples import SAMPLES
from ..workloads.test_call_graph import write_tree

FEW = ("workload.documents=2", "workload.questions_per_document=3")


def test_export_writes_the_arrivals_of_a_study(spanlab, tmp_path: Path):
    path = tmp_path / "out" / "trace.jsonl"
    done = spanlab("-cn", "export", *FEW, "writer.format=mooncake", f"writer.path={path}", "seed=1")
    assert done.code == 0, done.err
    assert done.out.startswith(f"{path}: 6 requests, ")
    rows = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    study = compose("quality_sim", [*FEW, "arrivals.rate_rps=8"])
    arrived = jobs.build_arrivals(study, build.build_workload(study.workload, str(tmp_path)).requests, 1, 8.0)
    assert [row["timestamp"] for row in rows] == [request.arrived_at / 1e6 for request in arrived]
    assert [row["input_length"] for row in rows] == [request.num_tokens for request in arrived]


def test_anonymous_export_of_a_log_has_no_text(spanlab, tmp_path: Path):
    words = [f"zq{number}" for number in range(8)]
    bodies = [{"messages": [{"role": words[1], "content": " ".join(words)}], "user": words[0]}] * 3
    log, path = tmp_path / "log.jsonl", tmp_path / "trace.jsonl"
    log.write_bytes(b"".join(orjson.dumps({"timestamp": n, **body}) + b"\n" for n, body in enumerate(bodies)))
    settings = ("workload=log", f"workload.path={log}", "arrivals=as_given", "preamble=none", "anonymise=true")
    done = spanlab("-cn", "export", *settings, "writer.format=mooncake", f"writer.path={path}")
    assert done.code == 0, done.err
    rows = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    assert [row["hash_ids"] for row in rows] == [rows[0]["hash_ids"]] * 3
    assert b"zq" not in path.read_bytes()


@pytest.mark.parametrize("name", SESSIONS)
def test_log_of_agents_is_exported(spanlab, tmp_path: Path, name: str):
    log, path = write_tree(tmp_path / "log"), tmp_path / "trace.jsonl"
    settings = ("workload=log", f"workload.path={log}", "arrivals=sessions", "preamble=none", "anonymise=true")
    done = spanlab("-cn", "export", *settings, f"writer.format={name}", f"writer.path={path}", "writer.block_size=16")
    assert done.code == 0, done.err
    assert ("\nnot expressed: " in done.out) == (name != "dynamo")
    read = read_log(path, LogSettings())
    assert read.requests == 5
    assert sorted(read.prompt_tokens.tolist()) == sorted(read_log(log, LogSettings()).prompt_tokens.tolist())
    refused = spanlab("-cn", "export", *settings[:2], "arrivals=as_given", "preamble=none",
                      f"writer.format={name}", f"writer.path={path}2")  # fmt: skip
    assert "expected arrivals=sessions" in refused.err


TEXTS = re.compile(r"[rsp]\d+(\.\d+)*|n|local|model|completion|sequence|spawn|join|spanlab|[0-9a-f]{64}|dynamo\..+")


def texts_in(value: Any) -> Iterator[str]:
    """Yield the texts of JSON, without names of fields."""
    if isinstance(value, str):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from texts_in(inner)


@pytest.mark.parametrize("name", SAMPLES)
def test_anonymous_export_of_every_format_has_numbers_alone(tmp_path: Path, name: str):
    log = tmp_path / "log.bin"
    log.write_bytes(SAMPLES[name]())
    given = ("workload=log", f"workload.path={log}", "preamble=none", "anonymise=true", "writer.block_size=16")
    for writer, arrivals in (
        ("mooncake", "as_given"),
        ("guidellm", "as_given"),
        *((one, "sessions") for one in SESSIONS),
    ):
        path = tmp_path / writer
        settings = compose("export", [*given, f"arrivals={arrivals}", f"writer.format={writer}", f"writer.path={path}"])
        try:
            run_export(settings, "export", tmp_path)
        except ValueError as error:
            if "think_s=null" not in str(error):  # sessions without waits
                raise
            continue
        rows = [orjson.loads(line) for line in path.read_bytes().splitlines()]
        assert rows
        assert [text for text in texts_in(rows) if not TEXTS.fullmatch(text)] == []


def test_export_folds_ids_below_the_vocabulary(spanlab, tmp_path: Path):
    path = tmp_path / "requests.jsonl"
    given = ("writer.format=openai", f"writer.path={path}", "vocab_size=500")
    assert spanlab("-cn", "export", *FEW, *given).code == 0
    rows = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    assert max(max(row["body"]["prompt"]) for row in rows) < 500


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("writer.format=openai",), ("writer.path", "is not set")),
        (("writer.format=openia", "writer.path=x"), ("writer.format=openia: expected one of", "openai")),
        (
            ("writer.format=openai", "writer.path=x", "writer.block_size=16"),
            ("writer.block_size=16 with writer.format=openai: expected writer.block_size=null",),
        ),
        (
            ("writer.format=mooncake", "writer.path=x", "writer.block_size=0"),
            ("writer.block_size=0: expected a number above zero",),
        ),
        (
            ("writer.format=openai", "writer.path=x", "anonymise=true"),
            ("anonymise=true with writer.format=openai: expected aiperf, dynamo, guidellm, mooncake or weka",),
        ),
        (("writer.format=mooncake", "writer.path=x", "vocab_size=9"), ("vocab_size=9 with", "expected openai")),
        (
            ("writer.format=mooncake", "writer.path=x", "arrivals=closed_loop", "arrivals.clients=2"),
            ("arrivals.clients=2: expected arrivals with times",),
        ),
    ],
)
def test_bad_export_is_one_sentence(spanlab, one_sentence, given: tuple[str, ...], words: tuple[str, ...]):
    one_sentence(spanlab("-cn", "export", *given), *words)


def test_export_replaces_no_file(spanlab, one_sentence, tmp_path: Path):
    path = tmp_path / "kept"
    path.write_text("mine")
    one_sentence(spanlab("-cn", "export", "writer.format=mooncake", f"writer.path={path}"), "writer.path=", "exists")
    assert path.read_text() == "mine"


def test_turns_that_wait_are_not_exported(spanlab, one_sentence, tmp_path: Path, monkeypatch):
    drawn = jobs.build_arrivals

    def in_a_session(*given):
        first, second, *others = drawn(*given)
        return [first, replace(second, after=(first.id,)), *others]

    monkeypatch.setattr("spanlab.study.export.build_arrivals", in_a_session)
    path = tmp_path / "trace.jsonl"
    done = spanlab("-cn", "export", *FEW, "writer.format=mooncake", f"writer.path={path}")
    one_sentence(done, "arrivals: request ", "waits for request", "expected arrivals with times")
    assert not path.exists()
