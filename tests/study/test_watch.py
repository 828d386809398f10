"""The entry `watch`: events in both forms, lost and repeated messages, counters, and how a watch ends."""

import io
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgpack
import pytest
from rich.console import Console

from spanlab.study.server_stream import Metrics, Subscription, read_metrics
from spanlab.study.watch import CAPTURE, READINGS, Screen, Watch, WatchRun, caveats_of
from spanlab.workloads.logs.read import LogSettings, read_log

from .kv_server import METRICS, KvServer

COMMAND = [sys.executable, "-c", "from spanlab.cli import main; main()", "-cn", "watch"]


def tokens(*starts: int) -> list[int]:
    return [start + offset for start in starts for offset in range(16)]


def stored(blocks: list[int], parent: int | None, start: int) -> dict[str, Any]:
    fields = {"type": "BlockStored", "block_hashes": blocks, "parent_block_hash": parent}
    fields["token_ids"] = tokens(*(start + 100 * index for index in range(len(blocks))))
    return fields | {"block_size": 16, "lora_id": None, "medium": "GPU", "lora_name": None}


def removed(*blocks: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(blocks), "medium": "GPU"}


#: Four batches of one rank: two blocks, one of them evicted and computed again, then both behind another prefix.
MAPS = [
    [1.0, [stored([1, 2], None, 0)], 0],
    [2.0, [removed(2)], 0],
    [3.0, [stored([2], 1, 100)], 0],
    [4.0, [stored([7, 8], None, 5000), stored([9, 10], 8, 0)], 0],
]
LISTS = [[time, [list(event.values()) for event in events], rank] for time, events, rank in MAPS]
CAUSES = {"new": 4, "evicted": 1, "other_position": 2, "other_cache": 0, "cleared": 0, "present": 0}


@pytest.fixture
def started() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def serve(stack: ExitStack, *arguments: Any, **options: Any) -> KvServer:
    server = KvServer(*arguments, **options)
    stack.callback(server.stop)
    return server


def watched(stack: ExitStack, server: KvServer, folder: Path, messages: int, **settings: Any) -> WatchRun:
    """Watch a server until so many messages have come."""
    chosen = Watch(events=server.events, socket="connect", base_url=server.base_url, **settings)
    metrics = Metrics(server.base_url, 5.0)
    stack.callback(metrics.close)
    metrics.check()
    subscription = Subscription([server.events], False, "")
    stack.callback(subscription.close)
    with ExitStack() as files:
        capture, readings = (files.enter_context((folder / name).open("wb")) for name in (CAPTURE, READINGS))
        shown = files.enter_context((folder / "shown").open("w"))
        run = WatchRun(chosen, capture, readings, subscription, metrics)
        picture = run.picture
        problem = run.watch(Screen(Console(file=shown)), lambda: picture.messages + picture.left.total() >= messages)
        assert problem == ""
    return run


@pytest.mark.parametrize("batches", [MAPS, LISTS], ids=["maps", "lists"])
def test_numbers_of_a_stream(tmp_path: Path, started: ExitStack, batches: list):
    server = serve(started, batches, [0, 1, 2, 3], 200, 80)
    run = watched(started, server, tmp_path, 4)
    numbers = run.picture.numbers()
    assert numbers["blocks_by_cause"] == CAUSES
    assert (numbers["blocks_cached"], numbers["blocks_removed"], numbers["blocks"]) == (6, 1, 64)
    assert (numbers["prompt_tokens"], numbers["cached_tokens"]) == (200, 80)
    shares = numbers["hit_rate"], numbers["ceiling_prefix"], numbers["ceiling_any_position"]
    assert shares == (80 / 200, (80 + 16) / 200, (80 + 16 + 32) / 200)
    assert (numbers["in_use"], numbers["running"], numbers["waiting"]) == (0.25, 1, 2)
    (line,) = (tmp_path / "shown").read_text().splitlines()
    assert "hit rate 40.0 % (now 40.0 %) · ceiling 48.0 % prefix, 64.0 % any position" in line
    log = read_log(tmp_path / CAPTURE, LogSettings())
    assert (log.format, log.requests, log.counters.prompt, log.counters.cached) == ("vllm_events", 3, 200, 80)
    readings = [json.loads(line) for line in (tmp_path / READINGS).read_text().splitlines()]
    assert readings[-1]["blocks_by_cause"] == CAUSES


def test_blocks_of_answers_are_in_no_ceiling(tmp_path: Path, started: ExitStack):
    batches = [[1.0, [stored([1, 2], None, 0)], 0], [2.0, [stored([3], 2, 0)], 0]]  # an answer that repeats its prompt
    numbers = watched(started, serve(started, batches, [0, 1], 200, 80), tmp_path, 2).picture.numbers()
    assert numbers["answer_tokens_by_cause"]["other_position"] == 16
    assert numbers["ceiling_any_position"] == 80 / 200


def test_lost_messages_are_told(tmp_path: Path, started: ExitStack):
    run = watched(started, serve(started, MAPS, [0, 3], 200, 80), tmp_path, 2)
    numbers = run.picture.numbers()
    assert (numbers["messages"], numbers["messages_lost"], numbers["blocks_computed"]) == (2, 2, 6)
    expected = "2 messages are lost, in 1 gaps of their numbers: causes and ceilings stand on the 2 that came"
    assert expected in caveats_of(run.picture, numbers)
    assert any(
        "the capture lost 2 messages, in 1 gaps" in note for note in read_log(tmp_path / CAPTURE, LogSettings()).notes
    )


def test_missing_messages_are_asked_for_again(tmp_path: Path, started: ExitStack):
    server = serve(started, MAPS, [0, 3, 3], 200, 80)
    run = watched(started, server, tmp_path, 4, replay=server.replay)
    numbers = run.picture.numbers()
    assert (numbers["messages_lost"], numbers["messages_recovered"]) == (0, 2)
    assert numbers["blocks_by_cause"] == CAUSES
    assert read_log(tmp_path / CAPTURE, LogSettings()).requests == 3


def test_an_address_that_repeats_nothing_is_told(tmp_path: Path, started: ExitStack):
    server = serve(started, MAPS, [0, 3], 200, 80)
    run = watched(started, server, tmp_path, 2, replay=server.events)  # its publisher is no router
    numbers = run.picture.numbers()
    assert (numbers["messages_lost"], numbers["messages_recovered"]) == (2, 0)
    assert "1 requests for missing messages had no complete answer of replay=" in caveats_of(run.picture, numbers)


def test_a_terminal_gets_tables(tmp_path: Path, started: ExitStack):
    run = watched(started, serve(started, MAPS, [0, 1, 2, 3], 200, 80), tmp_path, 4)
    shown = io.StringIO()
    with Screen(Console(file=shown, force_terminal=True, width=200)) as screen:
        screen.show(5.0, run.picture.numbers() | {"hit_rate_now": None})
    assert "ceiling: blocks at any position" in shown.getvalue()
    assert "64.0 %" in shown.getvalue()
    assert "stored before and evicted" in shown.getvalue()


def test_earlier_messages_are_no_part_of_the_ceilings(tmp_path: Path, started: ExitStack):
    server = serve(started, MAPS, [3], 200, 80)
    run = watched(started, server, tmp_path, 4, replay=server.replay)
    numbers = run.picture.numbers()
    assert (numbers["messages_recovered"], numbers["messages_before"]) == (3, 0)
    assert numbers["blocks_by_cause"] == CAUSES
    assert (numbers["ceiling_prefix"], numbers["ceiling_any_position"]) == (80 / 200, (80 + 32) / 200)
    alone = tmp_path / "alone"
    alone.mkdir()
    without = watched(started, serve(started, MAPS, [3], 200, 80), alone, 1)
    assert without.picture.numbers()["messages_before"] == 3


def test_unreadable_messages_are_counted(tmp_path: Path, started: ExitStack):
    batches = [*MAPS[:1], b"\xc1", [2.0, [{"type": "BlockStored"}]], *MAPS[3:]]
    run = watched(started, serve(started, batches, [0, 1, 2, 3], 200, 80), tmp_path, 4)
    assert run.picture.messages == 2
    assert sorted(run.picture.left.values()) == [1, 1]
    with pytest.raises(ValueError, match="batch: expected topic, number and a payload of msgpack"):
        read_log(tmp_path / CAPTURE, LogSettings())
    assert read_log(tmp_path / CAPTURE, LogSettings(bad_lines="skip")).requests == 2


def test_hybrids_store_each_prompt_once_per_group(tmp_path: Path, started: ExitStack):
    def groups(event: dict[str, Any]) -> list[dict[str, Any]]:
        kinds = enumerate(("mamba", "full_attention"))
        return [event | {"group_idx": index, "kv_cache_spec_kind": kind} for index, kind in kinds]

    batches = [[1.0, groups(stored([1, 2], None, 0)), 0], [2.0, groups(stored([3], 2, 300)), 0]]
    numbers = watched(started, serve(started, batches, [0, 1], 200, 80), tmp_path, 2).picture.numbers()
    assert numbers["blocks_computed"] == 3


def test_metrics_are_summed_over_engines():
    text = METRICS.format(queries=10, hits=4)
    both = read_metrics(text + text.replace('engine="0"', 'engine="1"') + "vllm:broken{ nonsense\n")
    alone = read_metrics(text)
    assert alone == {
        "prefix_cache_queries": 10,
        "prefix_cache_hits": 4,
        "generated": 12,
        "running": 1,
        "waiting": 2,
        "in_use": 0.25,
        "blocks": 64,
        "block_size": 16,
    }
    assert both == {name: value * (1 if name in ("in_use", "block_size") else 2) for name, value in alone.items()}
    assert read_metrics("<html>\n") == {}


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"events": "127.0.0.1:5557"}, "events=127.0.0.1:5557: expected tcp://HOST:PORT"),
        ({"events": "tcp://127.0.0.1:65536"}, "expected tcp://HOST:PORT"),
        ({"events": "tcp://127.0.0.1:65535", "ranks": 2}, "expected tcp://HOST:PORT"),
        ({"events": "tcp://0.0.0.0:5557"}, "expected an address of this machine alone"),
        ({"events": "tcp://127.0.0.1:5557", "socket": "both"}, "socket=both: expected"),
        ({"events": "tcp://127.0.0.1:5557", "base_url": "server:8000"}, "base_url=server:8000: expected http://HOST"),
        ({"events": "tcp://127.0.0.1:5557", "replay": "5558"}, "replay=5558: expected tcp://HOST:PORT"),
        ({"events": "tcp://127.0.0.1:5557", "duration_s": 0}, "duration_s=0: expected"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], problem: str):
    with pytest.raises(ValueError, match=problem):
        Watch(**settings)


def test_addresses_that_cannot_be_used_are_refused(started: ExitStack):
    bound = Subscription(["tcp://127.0.0.1:0"], True, "")
    with pytest.raises(ValueError, match=f"events={bound.address}: .*Address already in use; .* socket=connect"):
        Subscription([bound.address], True, "")
    bound.close()
    with pytest.raises(ValueError, match=f"events={bound.address}: .*Connection refused; .* socket=bind"):
        Subscription([bound.address], False, "")
    server = serve(started, [], [])
    with pytest.raises(ValueError, match=f"base_url={server.base_url}/other: .*no vllm:prefix_cache_queries_total"):
        Metrics(f"{server.base_url}/other", 1.0).check()


def start(folder: Path, *overrides: str) -> subprocess.Popen[str]:
    fixed = f"output.root={folder}", "output.run=w", "interval_s=0.1", 'explain=["output.figures=false"]'
    pipe = subprocess.PIPE
    return subprocess.Popen([*COMMAND, *fixed, *overrides], stdout=pipe, stderr=pipe, text=True)


def lines_until(process: subprocess.Popen[str], text: str) -> list[str]:
    """Read lines of stderr up to one that has the text."""
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError("".join(lines))


def test_ctrl_c_ends_a_watch_with_a_page(tmp_path: Path, started: ExitStack):
    server = serve(started, MAPS, [0, 1, 2, 3], 200, 80)
    process = start(tmp_path, f"events={server.events}", "socket=connect", f"base_url={server.base_url}")
    started.callback(process.kill)
    lines_until(process, "7 blocks computed")
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate()
    assert process.returncode == 0, errors
    assert "by the server's own counters, 80 of 200 prompt tokens were cached (40.0 %)" in out
    summary = json.loads((tmp_path / "watch" / "w" / "summary.json").read_bytes())
    assert (summary["hit_rate"], summary["ended"], summary["blocks_by_cause"]) == (0.4, "as wanted", CAUSES)
    page = json.loads((tmp_path / "explain" / "w" / "summary.json").read_bytes())
    assert (page["requests"], page["counters"], page["log"]["block"]) == (3, {"prompt": 200, "cached": 80}, 16)
    assert page["store"] == "128 MiB for KV"  # the blocks of the server, in the bytes of the page's model


def test_a_server_that_answers_no_more_ends_a_watch(tmp_path: Path, started: ExitStack):
    server = serve(started, MAPS, [0, 1, 2, 3], 200, 80)
    run = watched(started, server, tmp_path, 4, silence_s=0.01)
    server.stop()
    assert run.metrics.read() is None
    run.capture = run.readings = io.BytesIO()
    problem = run.watch(Screen(Console(file=io.StringIO())), lambda: False)
    assert problem.startswith(f"base_url={server.base_url}: no answer for 0.01 s (")
    assert "Connection refused" in problem


def test_a_server_that_dies_leaves_all_that_came(tmp_path: Path, started: ExitStack):
    process = start(tmp_path, "events=tcp://127.0.0.1:0", "silence_s=0.5", "page=false")
    started.callback(process.kill)
    (*_, waiting) = lines_until(process, "waits for events at")
    server = KvServer(MAPS, [0, 1, 2, 3], address=waiting.split("at ")[1].split(";")[0])
    started.callback(server.stop)
    lines_until(process, "7 blocks computed")
    server.stop()
    out, errors = process.communicate()
    assert process.returncode == 1
    assert "no publisher for 0.5 s; expected a server until the end" in errors
    assert "hit rate and ceilings are unknown: base_url=null" in out
    assert read_log(tmp_path / "watch" / "w" / CAPTURE, LogSettings()).requests == 3


def test_a_watch_without_messages_says_so(tmp_path: Path):
    process = start(tmp_path, "events=tcp://127.0.0.1:0", "page=false")
    lines_until(process, "waits for events at")
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate()
    assert process.returncode == 1
    assert "expected KV events, but no message came: no publisher of ZeroMQ connected" in errors
    assert msgpack.Unpacker((tmp_path / "watch" / "w" / CAPTURE).open("rb")).unpack()["spanlab_capture"] == 1
