"""Replay of a workload against a real server, and the results of the run."""

import re
import socket
from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson
import pytest

from spanlab.cli import compose, main
from spanlab.engine.settings import remap_tokens
from spanlab.settings import Study
from spanlab.study import jobs
from spanlab.study.numbers import ArmFiles, RunCell
from spanlab.study.run import run_study

from .conftest import serving

FEW = (
    "workload.documents=2",
    "workload.questions_per_document=3",
    "workload.max_prompt_tokens=256",
    "workload.output_tokens=4",
    "arrivals.rate_rps=40",
    "output.figures=false",
)
ARM = "vllm_0_32"


def study(url: str, *overrides: str) -> Study:
    return compose("replay", [*FEW, f"base_url={url}", *overrides])


def files_of(folder: Path) -> ArmFiles:
    return ArmFiles.of_arm(folder, ARM)


def rows(path: Path) -> list[dict]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def summary_of(folder: Path) -> dict:
    return orjson.loads((folder / "summary.json").read_bytes())


def replay(settings: Study, root: Path) -> Path:
    settings.output.run = "replayed"
    return run_study(settings, "replay", root, show=False)


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run without faults."""
    with serving() as server:
        return replay(study(server.url, "output.trace=true"), tmp_path_factory.mktemp("run"))


def test_every_request_is_asked_once_in_order(serve, tmp_path: Path):
    server = serve()
    settings = study(server.url)
    folder = replay(settings, tmp_path)
    requests = _arrived(settings)
    bodies = [request["body"] for request in server.received()["requests"]]
    # requests of equal times may overtake each other on their way
    assert sorted(body["prompt"] for body in bodies) == sorted(request.tokens.tolist() for request in requests)
    assert {(body["max_tokens"], body["min_tokens"], body["ignore_eos"]) for body in bodies} == {(4, 4, True)}
    assert {body["model"] for body in bodies} == {"toy"}
    assert all(body["stream_options"] == {"include_usage": True} for body in bodies)
    records = {row["request_id"]: row for row in rows(files_of(folder).records)}
    for request in requests:
        record = records[request.id]
        assert record["arrived_s"] == request.arrived_at * 1e-9
        assert record["prompt_tokens"] == request.num_tokens
        assert record["output_tokens"] == 4
        assert record["arrived_s"] < record["first_token_s"] <= record["finished_s"]


def _arrived(settings: Study) -> list:
    from spanlab.build import build_workload

    workload = build_workload(settings.workload, "")
    arrived = jobs.build_arrivals(settings, workload.requests, settings.runs.seeds[0], settings.arrivals.rate_rps)
    return remap_tokens(arrived, settings.model.vocab_size)


def test_cached_tokens_are_reused_tokens(serve, tmp_path: Path):
    server = serve()
    folder = replay(study(server.url, "arrivals=closed_loop", "arrivals.rate_rps=null", "arrivals.clients=1"), tmp_path)
    records = rows(files_of(folder).records)
    earlier: list[list[int]] = []
    for record, request in zip(records, server.received()["requests"], strict=True):
        prompt = request["body"]["prompt"]
        shared = max((_common(prompt, other) for other in earlier), default=0)
        assert record["reused_tokens"] == min(shared // 16 * 16, len(prompt) - 1)
        earlier.append(prompt)
    metrics = summary_of(folder)["serving"][0]["metrics"]
    reused, prompt = (sum(row[name] for row in records) for name in ("reused_tokens", "prompt_tokens"))
    assert metrics["token_hit_rate"]["mean"] == pytest.approx(reused / prompt)


def _common(first: list[int], second: list[int]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))


def test_clients_wait_for_their_answers(serve, tmp_path: Path):
    server = serve()
    folder = replay(study(server.url, "arrivals=closed_loop", "arrivals.rate_rps=null", "arrivals.clients=2"), tmp_path)
    records = sorted(rows(files_of(folder).records), key=lambda row: row["arrived_s"])
    assert len(records) == 6
    for number, record in enumerate(records):
        before = records[:number]
        assert sum(row["finished_s"] > record["arrived_s"] for row in before) < 2


def test_turns_follow_their_answers(serve, tmp_path: Path, monkeypatch):
    drawn = jobs.build_arrivals

    def in_sessions(*arguments):
        requests = drawn(*arguments)
        turns = [replace(requests[index], after=(requests[index - 1].id,), wait_ns=20_000_000) for index in (1, 2)]
        return [requests[0], *turns, *requests[3:]]

    monkeypatch.setattr("spanlab.study.jobs.build_arrivals", in_sessions)
    folder = replay(study(serve().url, "arrivals.rate_rps=1000"), tmp_path)
    records = {row["request_id"]: row for row in rows(files_of(folder).records)}
    monkeypatch.undo()
    first, second, third = (
        records[request.id] for request in _arrived(study("http://x", "arrivals.rate_rps=1000"))[:3]
    )
    for before, turn in ((first, second), (second, third)):
        assert before["finished_s"] + 0.02 <= turn["arrived_s"] < turn["first_token_s"]


@pytest.mark.parametrize("fault", ["fails_at", "breaks_at"])
def test_failed_request_is_named_and_others_go_on(serve, tmp_path: Path, fault: str):
    server = serve(**{fault: [1, 3]})
    folder = replay(study(server.url), tmp_path)
    (run,) = files_of(folder).finished()
    assert run["requests"] == len(rows(files_of(folder).records)) == 4
    assert len(run["failures"]) == 2
    expected = {"fails_at": "HTTP 400: too long for me", "breaks_at": "no connection"}[fault]
    assert all(expected in reason for reason in run["failures"].values())
    caveats = summary_of(folder)["caveats"]
    assert any("2 of 6 requests failed and count nowhere, request " in caveat for caveat in caveats)


def test_page_says_where_times_were_measured(replayed: Path):
    page = (replayed / "report.html").read_text()
    assert "measured at http://127.0.0.1:" in page
    assert "roofline" not in page.partition("<table")[0]
    assert "requests were sent" in page


def test_server_that_fails_all_is_one_sentence(serve, tmp_path: Path):
    server = serve(usage=False)
    with pytest.raises(
        ValueError, match=r"^base_url=.*: expected answers, but all 6 requests failed; request .* has no usage"
    ):
        replay(study(server.url), tmp_path)


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        ("5", "the stream holds no JSON object: 5"),
        ("{broken", "the stream holds no JSON: {broken"),
        ('{"error": {"message": "out of memory"}}', "the server ended the stream: out of memory"),
    ],
)
def test_bad_stream_is_a_sentence(serve, tmp_path: Path, says: str, reason: str):
    with pytest.raises(ValueError, match=re.escape(reason)):
        replay(study(serve(says=says).url), tmp_path)


def prompts(cached: object) -> dict:
    return {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": cached}}


@pytest.mark.parametrize(
    ("counts", "reason"),
    [
        ({"prompt_tokens": -5}, "its usage has prompt_tokens -5, expected a whole number from 1 to 2147483648"),
        ({"prompt_tokens": 0}, "prompt_tokens 0, expected a whole number from 1 to"),
        ({"prompt_tokens": True}, "prompt_tokens True, expected a whole number"),
        ({"prompt_tokens": 1.5}, "prompt_tokens 1.5, expected a whole number"),
        ({"prompt_tokens": 10**15}, "prompt_tokens 1000000000000000, expected a whole number"),
        ({"prompt_tokens": None}, "prompt_tokens None, expected a whole number"),
        ({"completion_tokens": -7}, "completion_tokens -7, expected a whole number from 0 to 2147483648"),
        ({"completion_tokens": "4"}, "completion_tokens '4', expected a whole number"),
        (prompts(101), "cached_tokens 101, expected a whole number from 0 to 100"),
        (prompts(-1), "cached_tokens -1, expected a whole number from 0 to 100"),
        (prompts(False), "cached_tokens False, expected a whole number"),
        (prompts("12"), "cached_tokens '12', expected a whole number"),
    ],
)
def test_counts_that_cannot_be_fail_the_request(serve, tmp_path: Path, counts: dict, reason: str):
    with pytest.raises(ValueError, match=re.escape(reason)):
        replay(study(serve(counts=counts).url), tmp_path)


@pytest.mark.parametrize(("cached", "reused"), [(0, 0), (100, 100), (None, None)])
def test_counts_at_the_limits_are_recorded(serve, tmp_path: Path, cached: int | None, reused: int | None):
    folder = replay(study(serve(counts=prompts(cached)).url), tmp_path)
    assert {row["reused_tokens"] for row in rows(files_of(folder).records)} == {reused}


ENDLESS = {
    "chunks": ('data: {"choices": [{"text": "a"}]}\n\n', "the stream goes on after 21 chunks for 4 tokens"),
    "a line": ("a" * 100, "the stream has a line of more than 4,194,304 bytes"),
    "comments": (": " + "a" * 1000 + "\n", "the reply is longer than 268,435,456 bytes"),
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_stream_without_end_is_ended(serve, tmp_path: Path, kind: str):
    sends, reason = ENDLESS[kind]
    few = ("workload.documents=1", "workload.questions_per_document=1")
    with pytest.raises(ValueError, match=reason):
        replay(study(serve(sends=sends).url, *few), tmp_path)


def test_slow_stream_ends_with_its_time(serve, tmp_path: Path):
    server = serve(pause_s=0.05)
    with pytest.raises(ValueError, match=r"no end within 0\.1 s$"):
        replay(study(server.url, "server.request_timeout_s=0.1"), tmp_path)


def test_compressed_stream_is_refused(serve, tmp_path: Path):
    with pytest.raises(ValueError, match="the reply has Content-Encoding gzip, which was not asked for"):
        replay(study(serve(encoding="gzip").url), tmp_path)


KEYS = {
    "as sent": ("Incorrect API key provided: {key}", "sk-SECRET/123"),
    "in capitals": ("WRONG SK-SECRET/123", "sk-SECRET/123"),
    "in an address": ("see https://host/?key=sk-SECRET%2F123", "sk-SECRET%2F123"),
    "at the limit of the text": ("x" * 150 + " {key}", "sk-SECRET"),
}


@pytest.mark.parametrize("kind", KEYS)
def test_repeated_key_is_masked_everywhere(serve, tmp_path: Path, monkeypatch, capsys, kind: str):
    monkeypatch.setenv("TOY_KEY", "sk-SECRET/123")
    error, secret = KEYS[kind]
    server = serve(fails_at=[1], error=error)
    folder = replay(study(server.url, "server.api_key_variable=TOY_KEY"), tmp_path)
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert not any(secret.lower().encode() in path.read_bytes().lower() for path in files)
    (run,) = files_of(folder).finished()
    assert next(iter(run["failures"].values())).startswith("HTTP 400: ")
    assert secret.lower() not in "".join(capsys.readouterr()).lower()


def test_key_in_a_models_name_is_masked(serve, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("TOY_KEY", "sk-SECRET123")
    server = serve(models=["a-sk-SECRET123", "b"])
    with pytest.raises(ValueError, match=r"^server.served_model=null: expected one of a-\*\*\*, b$"):
        replay(study(server.url, "server.api_key_variable=TOY_KEY"), tmp_path)


def test_control_characters_of_a_server_are_escaped(serve, tmp_path: Path):
    folder = replay(study(serve(fails_at=[1], error="\x1b[31mred\x00\u202e\n<b>").url), tmp_path)
    (run,) = files_of(folder).finished()
    assert list(run["failures"].values()) == [r"HTTP 400: \x1b[31mred\x00\u202e <b>"]


def test_failed_requests_are_a_column(serve, tmp_path: Path):
    folder = replay(study(serve(fails_at=[1, 3]).url), tmp_path)
    (row,) = summary_of(folder)["serving"]
    assert (row["metrics"]["failed"]["mean"], row["metrics"]["completed"]["mean"]) == (2, 4)
    assert "failed" in (folder / "report.html").read_text()


def test_server_without_cache_report_has_no_hit_rate(serve, tmp_path: Path):
    folder = replay(study(serve(cached=False).url), tmp_path)
    assert {row["reused_tokens"] for row in rows(files_of(folder).records)} == {None}
    assert "token_hit_rate" not in summary_of(folder)["serving"][0]["metrics"]


def test_gaps_are_those_between_chunks(replayed: Path):
    with np.load(files_of(replayed).serving(ARM, RunCell(0, 40.0))) as gaps:
        assert gaps["gap_count"].sum() == 6 * 3
        total = float(gaps["gap_ns"] @ gaps["gap_count"]) * 1e-9
    records = rows(files_of(replayed).records)
    assert total == pytest.approx(sum(row["finished_s"] - row["first_token_s"] for row in records), abs=1e-6)


def test_finished_runs_are_not_sent_again(serve, tmp_path: Path):
    server = serve()
    settings = study(server.url, "output.if_exists=resume")
    replay(settings, tmp_path)
    more = study(server.url, "output.if_exists=resume", "seeds=[0,1]")
    folder = replay(more, tmp_path)
    assert len(server.received()["requests"]) == 12
    assert [run["seed"] for run in files_of(folder).finished()] == [0, 1]


@pytest.mark.parametrize(("reset", "resets"), [("null", 0), ("/reset", 2)])
def test_cache_is_emptied_or_said_to_be_warm(serve, tmp_path: Path, reset: str, resets: int):
    server = serve()
    folder = replay(study(server.url, "seeds=[0,1]", f"server.reset_path={reset}"), tmp_path)
    assert server.received()["resets"] == resets
    assert any("cache stayed warm" in caveat for caveat in summary_of(folder)["caveats"]) == (not resets)


def test_trace_shows_what_a_client_sees(replayed: Path):
    (path,) = (replayed / "traces").iterdir()
    events = orjson.loads(path.read_bytes())["traceEvents"]
    begun = {(event["id"], event["name"]): event["ts"] for event in events if event["ph"] == "b"}
    ended = {(event["id"], event["name"]): event["ts"] for event in events if event["ph"] == "e"}
    for record in rows(files_of(replayed).records):
        number, first = record["request_id"], pytest.approx(record["first_token_s"] * 1e6)
        assert ended[number, "first token"] == begun[number, "decode"] == first
        assert ended[number, f"request {number}"] == pytest.approx(record["finished_s"] * 1e6)
    assert {event["ph"] for event in events} == {"M", "b", "e", "C"}


def test_key_is_sent_and_written_nowhere(serve, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("TOY_KEY", "sk-secret-77")
    server = serve()
    folder = replay(study(server.url, "server.api_key_variable=TOY_KEY"), tmp_path)
    assert {request["authorization"] for request in server.received()["requests"]} == {"Bearer sk-secret-77"}
    assert not any(b"sk-secret-77" in path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_model_must_be_chosen_among_several(serve, tmp_path: Path):
    with pytest.raises(ValueError, match=r"^server.served_model=null: expected one of big, small$"):
        replay(study(serve(models=["big", "small"]).url), tmp_path)


def test_absent_server_is_one_sentence(tmp_path: Path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(
            ValueError, match=rf"^base_url={url}: expected an OpenAI-compatible server, .* no connection"
        ):
            replay(study(url), tmp_path)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ((), "base_url is not set with backend=server: expected the address of a server"),
        (("base_url=localhost",), "base_url=localhost: expected http://HOST"),
        (("base_url=http://x", "backend=sim"), "base_url=http://x with backend=sim: expected backend=server"),
        (("base_url=http://x", "only=[]"), "only=[] with backend=server: expected one arm"),
        (("base_url=http://x", "analyses=[summary]"), "analyses=summary with backend=server: expected serving"),
        (("base_url=http://x", "server.prompts=text"), "server.prompts=text: expected server.tokenizer too"),
        (("base_url=http://x", "server.reset_path=reset"), "server.reset_path=reset: expected a path"),
        (("base_url=http://x", "server.reset_path=//other/reset"), "server.reset_path=//other/reset: expected a path"),
        (("base_url=http://x", "server.reset_path='/a b'"), "server.reset_path=/a b: expected a path"),
        (("base_url=http://x", "server.request_timeout_s=0"), "server.request_timeout_s=0.0: expected a number above"),
    ],
)
def test_settings_without_meaning_are_refused(overrides: tuple[str, ...], problem: str):
    with pytest.raises(Exception, match="expected") as refused:
        compose("replay", [*FEW, *overrides])
    assert problem in str(refused.value)


def test_served_run_loads_as_frames(replayed: Path):
    import spanlab

    result = spanlab.load(replayed)
    assert result.records.columns[:2] == ["arm", "seed"]
    assert result.records["reused_tokens"].null_count() == 0
    assert result.runs["requests"].to_list() == [6]
    assert result.summary["arm"].to_list() == [ARM]
    assert result.summary["mean_ttft_ms"][0] > 0


def test_twin_and_server_stand_side_by_side(serve, tmp_path: Path, monkeypatch, capsys):
    common = (*FEW, f"output.root={tmp_path}")
    server = serve()
    folders = []
    for run, override in (("server", f"base_url={server.url}"), ("twin", "backend=sim")):
        settings = compose("replay", [*common, override])
        settings.output.run = run
        folders.append(str(run_study(settings, "replay", tmp_path, show=False)))
    arguments = ["spanlab", "-cn", "compare", f"runs=[{','.join(folders)}]", f"output.root={tmp_path}"]
    monkeypatch.setattr("sys.argv", arguments)
    main()
    output = capsys.readouterr().out
    assert "mean_ttft_ms" in output
    assert "token_hit_rate" in output
