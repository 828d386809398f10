"""Caches of providers in `explain`: the time to live that a log shows, and hit rates beside other caches."""

import random
from pathlib import Path
from typing import Any

import orjson
import pytest

from spanlab.cli import compose

from ..support.files import write_lines
from .explained import explained, invented

SYSTEM = invented(1200, seed=5)  # some 2,000 tokens by four bytes


def provider_log(folder: Path, ttl_s: float | None, *, sessions: int = 12, noise: float = 0.0) -> Path:
    """Return a log of sessions with the counts of a provider whose entries live `ttl_s`; None: it reports no counts."""
    draw = random.Random(3)
    calls = []
    for session in range(sessions):
        at, history = 7200.0 * session, [{"role": "system", "content": f"{session} {SYSTEM}"}]
        for turn in range(8):
            history = [*history, {"role": "user", "content": invented(500, seed=100 * session + turn)}]
            calls.append((at, session, turn, history))
            history = [*history, {"role": "assistant", "content": f"answer {turn}"}]
            at += draw.choice((20, 200, 280, 320, 400, 1500))
    calls.sort(key=lambda call: call[0])
    return write_lines(folder / "log.jsonl", *_with_usage(calls, ttl_s, noise, draw))


def _with_usage(calls: list[Any], ttl_s: float | None, noise: float, draw: random.Random) -> list[dict[str, Any]]:
    last: dict[int, tuple[float, int]] = {}
    rows = []
    for at, session, _, history in calls:
        tokens = sum(len(message["content"]) // 4 for message in history)
        before = last.get(session)
        is_found = before is not None and at - before[0] <= (ttl_s or 0)
        if draw.random() < noise:
            is_found = not is_found
        cached = before[1] if is_found and before is not None else 0
        last[session] = at, tokens
        row = {"timestamp": at, "session_id": str(session), "messages": history}
        if ttl_s is not None:
            row["usage"] = {"prompt_tokens": tokens, "prompt_tokens_details": {"cached_tokens": cached}}
        rows.append(row)
    return rows


@pytest.mark.parametrize(("ttl_s", "ends"), [(300.0, (280, 320)), (250.0, (200, 280)), (1000.0, (400, 1500))])
def test_time_to_live_is_fitted_from_counts(tmp_path: Path, ttl_s: float, ends: tuple[int, int]):
    summary = explained(tmp_path, f"log={provider_log(tmp_path, ttl_s)}")
    fitted = summary["expiry"]["fitted"]
    assert (round(fitted["shortest_s"]), round(fitted["longest_s"])) == ends  # the gaps of the log next to the time
    assert (fitted["contradictions"], fitted["hits"] + fitted["misses"]) == (0, 12 * 7)
    assert fitted["says"] in summary["measured"]
    assert ("anthropic_5m, openai_5m fit" in fitted["says"]) == (ttl_s == 300.0)
    caches = summary["expiry"]["caches"]
    shortest, longest = (caches[name]["token_hit_rate"] for name in ("fitted_shortest", "fitted_longest"))
    assert shortest - 0.01 < summary["reported"]["token_hit_rate"] < longest + 0.01


def test_contradictions_are_counted(tmp_path: Path):
    summary = explained(tmp_path, f"log={provider_log(tmp_path, 300.0, sessions=30, noise=0.05)}")
    fitted = summary["expiry"]["fitted"]
    assert 0 < fitted["contradictions"] <= 0.1 * (fitted["hits"] + fitted["misses"])
    assert fitted["shortest_s"] <= 300.0 < fitted["longest_s"]


@pytest.mark.parametrize(
    ("ttl_s", "noise", "says"),
    [(1e6, 0.0, "nothing was lost"), (1.0, 0.0, "nothing was found"), (300.0, 0.5, "the best time contradicts")],
)
def test_no_time_is_identified_where_none_shows(tmp_path: Path, ttl_s: float, noise: float, says: str):
    fitted = explained(tmp_path, f"log={provider_log(tmp_path, ttl_s, noise=noise)}")["expiry"]["fitted"]
    assert fitted["shortest_s"] is None
    assert says in fitted["says"]
    assert fitted["says"].startswith("no time to live is identified")


def test_log_without_counts_has_caches_and_no_fit(tmp_path: Path):
    summary = explained(tmp_path, f"log={provider_log(tmp_path, None)}", "analyses.explain.ttl_s=450")
    assert summary["expiry"]["fitted"] is None
    caches = summary["expiry"]["caches"]
    rates = {name: cache["token_hit_rate"] for name, cache in caches.items()}
    assert rates["anthropic_5m"] < rates["ttl"] < rates["anthropic_1h"] <= summary["bounds"]["prefix"]
    assert rates["openai_24h"] == rates["openai_1h"]
    assert caches["gemini_1h"]["refreshes"] is False
    assert rates["gemini_1h"] <= rates["anthropic_1h"]
    for cache in caches.values():
        assert cache["token_hit_rate"] + cache["expired"] + cache["too_short"] <= summary["bounds"]["prefix"] + 1e-9


def test_time_to_live_within_a_store(tmp_path: Path):
    rows = [orjson.loads(line) for line in provider_log(tmp_path, None).read_bytes().splitlines()]
    for row in rows:
        row["timestamp"] -= 7190 * int(row["session_id"])  # sessions side by side
    log = write_lines(tmp_path / "log.jsonl", *sorted(rows, key=lambda row: row["timestamp"]))
    small, large = (
        explained(tmp_path / gib, f"log={log}", "analyses.explain.ttl_s=450", f"store.total_gib={gib}")
        for gib in ("2", "64")
    )
    rates = [summary["expiry"]["caches"]["ttl"] for summary in (small, large)]
    assert rates[0]["token_hit_rate"] == rates[1]["token_hit_rate"]  # of a cache without a limit
    assert rates[0]["in_store"] < rates[1]["in_store"] <= rates[1]["token_hit_rate"]
    assert rates[0]["in_store"] <= small["presets"]["vllm_0_32"]["token_hit_rate"]
    assert small["expiry"]["caches"]["anthropic_5m"]["in_store"] is None


def test_chosen_providers_alone_are_shown(tmp_path: Path):
    log = provider_log(tmp_path, None, sessions=2)
    summary = explained(tmp_path, f"log={log}", "analyses.explain.providers=[anthropic_1h]")
    assert list(summary["expiry"]["caches"]) == ["anthropic_1h"]


def test_log_without_times_has_no_expiry(tmp_path: Path):
    log = write_lines(tmp_path / "log.jsonl", {"messages": [{"role": "user", "content": SYSTEM}]})
    assert explained(tmp_path, f"log={log}")["expiry"] is None


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("analyses.explain.providers=[azure]", "analyses.explain.providers=azure: expected one of"),
        ("analyses.explain.ttl_s=0", "analyses.explain.ttl_s=0"),
    ],
)
def test_unknown_caches_are_refused(setting: str, message: str):
    with pytest.raises(ValueError, match=message):
        compose("explain", [setting])


def test_calls_of_a_session_are_those_of_the_provider(tmp_path: Path):
    summary = explained(tmp_path, f"log={provider_log(tmp_path, 300.0)}", "output.figures=true")
    session = summary["session"]
    assert session["counted"] is True
    gaps = [call["gap_s"] for call in session["calls"]]
    assert gaps[0] is None
    assert set(gaps[1:]) <= {20.0, 200.0, 280.0, 320.0, 400.0, 1500.0}
    names = set()
    for call, gap in zip(session["calls"], gaps, strict=True):
        names |= call["parts"].keys()
        assert call["parts"].get("cached", 0) == call["cached_tokens"]
        assert ("expired" in call["parts"]) == (gap is not None and gap > 300)
        assert sum(call["parts"].values()) == pytest.approx(call["prompt_tokens"], rel=0.02)
    assert {"cached", "expired", "fresh"} <= names
    points = summary["over_time"]
    total = sum(point["prompt_tokens"] for point in points)
    for name in ("anthropic_5m", "fitted_longest"):
        rate = sum(point[name] * point["prompt_tokens"] for point in points) / total
        assert rate == pytest.approx(summary["expiry"]["caches"][name]["token_hit_rate"])


def test_servers_that_keep_sessions_apart_show_a_time(tmp_path: Path):
    rows = [orjson.loads(line) for line in provider_log(tmp_path, 300.0).read_bytes().splitlines()]
    for row in rows:
        row["messages"][0]["content"] = SYSTEM  # the same in all sessions, of which the server finds nothing
        row["timestamp"] = row["timestamp"] - 7190 * int(row["session_id"])
    rows.sort(key=lambda row: row["timestamp"])
    summary = explained(tmp_path, f"log={write_lines(tmp_path / 'apart.jsonl', *rows)}")
    fitted = summary["expiry"]["fitted"]
    assert (fitted["within_sessions"], fitted["contradictions"]) == (True, 0)
    assert 280 <= fitted["shortest_s"] <= 300 < fitted["longest_s"] <= 320
