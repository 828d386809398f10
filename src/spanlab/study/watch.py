"""The entry `watch`: the prefix cache of a running server, live; at the end, a page of `explain`
about its stream."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import orjson
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table as RichTable
from rich.text import Text

from spanlab.model_spec import GIB
from spanlab.provenance import PACKAGES_OF, run_facts
from spanlab.registry import REQUIRED, entry, one_of, positive
from spanlab.report.table import Column, Field, Table, count, percent, tabulate, word
from spanlab.settings.composition import as_settings, compose_entry
from spanlab.settings.server import OutputSettings, check_address
from spanlab.settings.study import Study
from spanlab.study.folder import RunFolder, entry_folder, print_line, publish, write_results
from spanlab.study.server_stream import (
    NUMBER_BYTES,
    Frames,
    Metrics,
    Repetition,
    Subscription,
    host_and_port,
    of_rank,
)
from spanlab.workloads.logs.kv_events import (
    BLOCK_CAUSES,
    CLEARED,
    EMPTIED,
    EVICTED,
    FULL_ATTENTION,
    HITS,
    MARK,
    METRICS,
    PRESENT,
    QUERIES,
    STORED,
    Batch,
    BlockStream,
    Sequences,
    read_batch,
    unpacked,
)
from spanlab.workloads.logs.observed import Counters

# ------------------------------------------------------------------------------
# Settings: addresses of the events and of the server, and when the watch ends.
# ------------------------------------------------------------------------------

_LOOPBACK = re.compile(r"127(\.\d+){3}|localhost|\[::1\]")
_LAST_PORT = 65535


@dataclass
class Watch:
    """Show hit rate, ceilings, occupancy and causes of computed blocks of a running server;
    docs/watch.md has details.

    `events`      ZeroMQ address of its KV events: tcp://HOST:PORT; port 0 binds a free one
    `socket`      bind: the server connects there, as vLLM does where it is given the same address;
                  connect: the server listens there, as vLLM does where it is given tcp://*:PORT
    `base_url`    its address, http://HOST:PORT, whose /metrics are read; null: hit rate and
                  ceilings are unknown
    `replay`      address where it repeats earlier events, tcp://HOST:PORT; null: none
    `topic`       topic of the events; empty: all
    `ranks`       data-parallel ranks; each has an address of its own, with the next port
    `duration_s`  seconds after which the watch ends; null: Ctrl-C ends it
    `interval_s`  seconds between two readings of the counters
    `silence_s`   seconds without an answer after which the server counts as gone
    `public`      whether an address that other machines reach may be bound: events contain all
                  prompts
    `page`        whether the stream is explained at the end
    `explain`     overrides of `explain` for that page, such as model=qwen3-8b
    `output`      where the run is written
    """

    events: str = REQUIRED
    socket: str = "bind"
    base_url: str | None = None
    replay: str | None = None
    topic: str = ""
    ranks: int = 1
    duration_s: float | None = None
    interval_s: float = 1.0
    silence_s: float = 30.0
    public: bool = False
    page: bool = True
    explain: list[str] = field(default_factory=list)
    output: OutputSettings = field(default_factory=OutputSettings)

    def __post_init__(self) -> None:
        one_of("socket", self.socket, ("bind", "connect"))
        for key in ("ranks", "duration_s", "interval_s", "silence_s"):
            positive(key, getattr(self, key))
        for key in ("events", "replay"):
            if (address := getattr(self, key)) is not None:
                port = (host_and_port(address) or ("", -1))[1]
                is_free = (
                    port == 0 and key == "events" and self.socket == "bind" and self.ranks == 1
                )
                if not (is_free or 1 <= port <= _LAST_PORT + 1 - self.ranks):
                    raise ValueError(f"{key}={address}: expected tcp://HOST:PORT")
        host = (host_and_port(self.events) or ("", 0))[0]
        if self.socket == "bind" and not self.public and not _LOOPBACK.fullmatch(host):
            raise ValueError(
                f"events={self.events} with socket=bind: expected an address of this machine alone, such as "
                "tcp://127.0.0.1:5557, or public=true, for events contain all prompts"
            )
        if self.base_url is not None:
            check_address("base_url", self.base_url)
        self.output.refuse_resuming()


# ------------------------------------------------------------------------------
# What is known of the cache at a moment.
# ------------------------------------------------------------------------------

_AGAIN = (EVICTED, EMPTIED, PRESENT)  # causes that a cache without limit does not have


@dataclass
class Picture:
    """State of a watch: the caches by their events, and the counters of the server.

    `streams`  by cache group; a hybrid model stores each prompt once in every group
    `recovered`, `unanswered`  messages that the server sent again, and requests for such without a
                               complete answer
    `earlier`  tokens by cause, and at other positions, of messages from before the first reading of
               the counters
    """

    streams: dict[int | None, BlockStream] = field(default_factory=dict)
    kinds: dict[int | None, str] = field(default_factory=dict)
    sequences: Sequences = field(default_factory=Sequences)
    counters: Counters = field(default_factory=Counters)
    readings: dict[str, float] = field(default_factory=dict)
    generated: float | None = None
    left: Counter[str] = field(default_factory=Counter)
    earlier: Counter[str] = field(default_factory=Counter)
    messages: int = 0
    repeated: int = 0
    recovered: int = 0
    unanswered: int = 0

    def take(self, batch: Batch, topic: bytes, number: int) -> None:
        """Count the events of a message, unless it came before."""
        if not self.sequences.is_new(topic, batch.rank, number):
            self.repeated += 1
            return
        self.messages += 1
        for event in batch.events:
            if event.kind != CLEARED and event.group not in self.streams:
                self.streams[event.group] = BlockStream()
            if event.kind == STORED:
                self.kinds.setdefault(event.group, str(event.fields.get("kv_cache_spec_kind")))
        for group, stream in self.streams.items():
            if self.sequences.restarted:
                stream.restart()
            stream.begin_batch()
            for event in batch.events:
                if event.kind == CLEARED or event.group == group:
                    stream.add(event)

    def take_readings(self, readings: dict[str, float]) -> None:
        """Take a reading of the server's counters."""
        self.readings = readings
        self.generated = (
            readings.get("generated", 0.0) if self.generated is None else self.generated
        )
        self.counters.add(readings.get(QUERIES), readings.get(HITS))

    @property
    def stream(self) -> BlockStream:
        """Return the blocks of the group whose blocks are prompts: the first of full attention, or
        the first one."""
        full = [group for group, kind in self.kinds.items() if kind in FULL_ATTENTION]
        return self.streams[(full or list(self.kinds))[0]] if self.kinds else BlockStream()

    def leave_out_earlier(self) -> None:
        """Exclude all messages so far from the ceilings, for the counters do not have their
        prompts."""
        self.earlier = self._of_prompts()

    def _of_prompts(self) -> Counter[str]:
        """Return the tokens of computed blocks of prompts by cause, and those at other
        positions."""
        stream = self.stream
        return stream.tokens - stream.answers + Counter({"elsewhere": stream.elsewhere})

    def numbers(self) -> dict[str, Any]:
        """Return the numbers that are shown: shares of the prompt tokens, blocks, and counts of
        messages."""
        stream, prompt, cached = self.stream, self.counters.prompt, self.counters.cached
        computed = self._of_prompts() - self.earlier
        again = cached + sum(computed[cause] for cause in _AGAIN)
        anywhere = again + computed["elsewhere"]
        rates = {"hit_rate": cached, "ceiling_prefix": again, "ceiling_any_position": anywhere}
        return {
            **{
                name: min(tokens / prompt, 1.0) if prompt else None
                for name, tokens in rates.items()
            },
            "prompt_tokens": prompt,
            "cached_tokens": cached,
            "in_use": self.readings.get("in_use"),
            "blocks_cached": stream.present,
            "blocks": self.readings.get("blocks"),
            "running": self.readings.get("running"),
            "waiting": self.readings.get("waiting"),
            "blocks_computed": stream.blocks.total(),
            "blocks_by_cause": {cause: stream.blocks[cause] for cause in BLOCK_CAUSES},
            "tokens_by_cause": {cause: stream.tokens[cause] for cause in BLOCK_CAUSES},
            "answer_tokens_by_cause": {cause: stream.answers[cause] for cause in BLOCK_CAUSES},
            "blocks_removed": stream.removed,
            "reported_reused_tokens": stream.reused,
            "messages": self.messages,
            "messages_lost": self.sequences.lost,
            "messages_before": self.sequences.before,
            "messages_repeated": self.repeated,
            "messages_recovered": self.recovered,
        }


def caveats_of(picture: Picture, numbers: Mapping[str, Any]) -> list[str]:
    """Return what limits the numbers, one sentence each."""
    notes = []
    if lost := numbers["messages_lost"]:
        notes.append(
            f"{lost:,} messages are lost, in {picture.sequences.gaps:,} gaps of their numbers: causes and ceilings "
            f"stand on the {numbers['messages']:,} that came"
        )
    if picture.unanswered:
        notes.append(
            f"{picture.unanswered:,} requests for missing messages had no complete answer of replay="
        )
    if before := numbers["messages_before"]:
        notes.append(
            f"{before:,} messages were sent before: what they stored counts as never stored"
        )
    if numbers["hit_rate"] is None:
        reason = (
            "no prompt was served between two readings" if picture.readings else "base_url=null"
        )
        notes.append(f"hit rate and ceilings are unknown: {reason}")
    else:
        generated = picture.readings.get("generated", 0.0) - (picture.generated or 0.0)
        notes.append(
            "ceilings: cached tokens, and those of blocks that were computed again; events do not mark answers, so "
            f"single blocks at the end of a prompt count as theirs ({generated:,.0f} tokens were generated)"
        )
    return [*notes, *(f"not counted: {number:,} {what}" for what, number in picture.left.items())]


# ------------------------------------------------------------------------------
# The terminal: a table that is redrawn, or a line per reading where stderr is no terminal.
# ------------------------------------------------------------------------------

_SHOWN = {
    "hit_rate": "hit rate",
    "hit_rate_now": "hit rate since the last reading",
    "ceiling_prefix": "ceiling: prefixes, no limit of memory",
    "ceiling_any_position": "ceiling: blocks at any position",
    "in_use": "memory in use by requests",
    "cached_share": "blocks of known events, of the cache",
}


class Screen:
    """Shows the numbers on a console."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._computed, self._line_before = 0, ""

    def __enter__(self) -> Screen:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def show(self, seconds: float, numbers: Mapping[str, Any]) -> None:
        """Show the numbers of a moment; a line only where something has changed."""
        line, self._computed = self._line(numbers), numbers["blocks_computed"]
        if not self._console.is_terminal:
            if line != self._line_before:
                print_line(self._console, f"{seconds:.0f} s · {line}")
            self._line_before = line
            return
        shares = RichTable(box=None)
        for name, text in _SHOWN.items():
            shares.add_row(text, Text(percent(numbers.get(name)).text, justify="right"))
        causes = RichTable(box=None)
        for row in _cause_rows(numbers):
            causes.add_row(row["meaning"], f"{row['blocks']:,}", percent(row["share"]).text)
        self._live.update(
            Group(Text(f"{seconds:.0f} s · {line}"), shares, Text("computed blocks"), causes),
            refresh=True,
        )

    def _line(self, numbers: Mapping[str, Any]) -> str:
        causes = {cause: blocks for cause, blocks in numbers["blocks_by_cause"].items() if blocks}
        parts = [
            f"hit rate {percent(numbers['hit_rate']).text} (now {percent(numbers['hit_rate_now']).text})",
            f"ceiling {percent(numbers['ceiling_prefix']).text} prefix, "
            f"{percent(numbers['ceiling_any_position']).text} any position",
            f"in use {percent(numbers['in_use']).text}, {numbers['blocks_cached']:,} blocks cached"
            + ("" if numbers["blocks"] is None else f" of {numbers['blocks']:,.0f}"),
            *(
                f"{numbers[name]:.0f} {name}"
                for name in ("running", "waiting")
                if numbers[name] is not None
            ),
            f"{numbers['blocks_computed']:,} blocks computed (+{numbers['blocks_computed'] - self._computed:,})"
            + "".join(f", {blocks:,} {cause}" for cause, blocks in causes.items()),
        ]
        if numbers["messages_lost"]:
            parts.append(f"{numbers['messages_lost']:,} messages lost")
        return " · ".join(parts)


def _cause_rows(numbers: Mapping[str, Any]) -> list[dict[str, Any]]:
    total = max(numbers["blocks_computed"], 1)
    return [
        {"cause": cause, "blocks": blocks, "share": blocks / total, "meaning": BLOCK_CAUSES[cause]}
        for cause, blocks in numbers["blocks_by_cause"].items()
    ]


def tables_of(numbers: Mapping[str, Any], title: str, notes: list[str]) -> list[Table]:
    """Return the tables of a finished watch: shares, and computed blocks by cause."""
    rows = tuple(
        (word(text), percent(numbers.get(name)))
        for name, text in _SHOWN.items()
        if name != "hit_rate_now"
    )
    columns = Column("quantity", "quantity", left=True), Column("share", "share")
    fields = (
        Field("cause", "cause", word, left=True),
        Field("blocks", "blocks", count),
        Field("share", "share", percent),
        Field("meaning", "what came before", word, left=True),
    )
    shares = Table("watch", title, columns, rows, tuple(notes))
    return [shares, tabulate("causes", "Computed blocks", fields, _cause_rows(numbers))]


# ------------------------------------------------------------------------------
# The run: messages and readings, written as they come, until the watch ends.
# ------------------------------------------------------------------------------

CAPTURE, READINGS = "events.msgpack", "readings.jsonl"
_POLL_S = 0.2  # after which a signal is noticed


@dataclass
class WatchRun:
    """A watch in progress; `capture` gets every message as it came, in the form that explain
    reads."""

    settings: Watch
    capture: IO[bytes]
    readings: IO[bytes]
    subscription: Subscription
    metrics: Metrics | None
    picture: Picture = field(default_factory=Picture)
    started: float = field(default_factory=time.monotonic)
    _alone_since: float = 0.0

    def __post_init__(self) -> None:
        self._write({MARK: 1, "began": time.time()})
        if self.metrics is not None:  # the check of the address has read it
            self._take_readings(self.metrics.last)

    def watch(self, screen: Screen, is_ended: Callable[[], bool]) -> str:
        """Receive until the end, and return why it ended; empty if it was wanted."""
        shown = time.monotonic()
        while not is_ended():
            now = time.monotonic()
            if (
                self.settings.duration_s is not None
                and now - self.started >= self.settings.duration_s
            ):
                break
            if now - shown >= self.settings.interval_s:
                shown = now
                self._reading(screen)
            if problem := self._gone(now):
                return problem
            if frames := self.subscription.receive(min(_POLL_S, self.settings.interval_s)):
                self.receive(frames)
        self._reading(screen)
        return ""

    def _reading(self, screen: Screen) -> None:
        """Read the counters, show and write the numbers."""
        counters = self.picture.counters
        prompt, cached = counters.prompt, counters.cached
        if self.metrics is not None and (readings := self.metrics.read()) is not None:
            self._take_readings(readings)
        prompt, cached = counters.prompt - prompt, counters.cached - cached
        numbers = self.picture.numbers() | {"hit_rate_now": cached / prompt if prompt else None}
        if numbers["blocks"]:
            numbers["cached_share"] = min(numbers["blocks_cached"] / numbers["blocks"], 1.0)
        seconds = time.monotonic() - self.started
        self.readings.write(
            orjson.dumps({"seconds": seconds} | numbers, option=orjson.OPT_APPEND_NEWLINE)
        )
        for file in (self.readings, self.capture):
            file.flush()
        screen.show(seconds, numbers)

    def _take_readings(self, readings: dict[str, float]) -> None:
        self.picture.take_readings(readings)
        self._write({METRICS: readings, "at": time.time()})

    def _gone(self, now: float) -> str:
        """Return the sentence that the server is gone; empty while it answers, or a publisher is
        connected."""
        silence = self.settings.silence_s
        if self.metrics is not None:
            if self.metrics.silent_s < silence:
                return ""
            return f"base_url={self.metrics.base_url}: no answer for {silence:g} s ({self.metrics.problem})"
        if self.subscription.publishers or not self.subscription.ever:
            self._alone_since = 0.0
            return ""
        self._alone_since = self._alone_since or now
        return (
            f"events={self.settings.events}: no publisher for {silence:g} s"
            if now - self._alone_since >= silence
            else ""
        )

    def receive(self, frames: Frames) -> None:
        """Take a message, after those that are missing before it and that the server sends
        again."""
        if (batch := self._batch(frames)) is None:
            return
        topic, number = frames[0], int.from_bytes(frames[1], "big")
        first = self.picture.sequences.expected(topic, batch.rank)
        if self.settings.replay is not None and number > (first or 0):
            rank = dict(batch.rank).get("rank", 0)
            repetition = Repetition(str(self.settings.replay))
            for missing in repetition.messages(rank if isinstance(rank, int) else 0, first or 0):
                again = self._batch([topic, *missing[1:]])
                at = int.from_bytes(missing[1], "big")
                if again is not None and (first or 0) <= at < number:
                    self.picture.recovered += 1
                    self._take([topic, *missing[1:]], again)
            self.picture.unanswered += not repetition.complete
            if first is None:
                self.picture.leave_out_earlier()
        self._take(frames, batch)

    def _batch(self, frames: Frames) -> Batch | None:
        """Return the events of a message; None, counted, for one of another form."""
        if len(frames) != 3 or len(frames[1]) != NUMBER_BYTES:
            self.picture.left["messages that are not topic, number of 8 bytes and payload"] += 1
            return None
        try:
            return read_batch(unpacked(frames[2]), lambda what: self.picture.left.update([what]))
        except ValueError as error:
            self.picture.left[f"messages that cannot be read ({error})"] += 1
            self._write([*frames, time.time()])
            return None

    def _take(self, frames: Frames, batch: Batch) -> None:
        self._write([*frames, time.time()])
        self.picture.take(batch, frames[0], int.from_bytes(frames[1], "big"))

    def _write(self, record: object) -> None:
        import msgpack

        self.capture.write(msgpack.packb(record))


@contextmanager
def _signals() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C or SIGTERM came; a second signal afterwards acts
    as usual."""
    came = threading.Event()
    # only the main thread gets signals
    if threading.current_thread() is not threading.main_thread():
        yield came.is_set
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, lambda *_: came.set())
    try:
        yield came.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@entry("watch", Watch)
def run_watch(settings: Watch, run: str, root: Path) -> None:
    """Watch a server, write the stream and the numbers, and explain the stream; ValueError where
    the server is gone."""
    started, console = time.perf_counter(), Console(stderr=True)
    page = _page_of(settings, run) if settings.page else None
    with entry_folder(settings, "watch", run, root) as folder:
        picture, problem = _watched(settings, folder, console)
        numbers = picture.numbers()
        if numbers["blocks"]:
            numbers["cached_share"] = min(numbers["blocks_cached"] / numbers["blocks"], 1.0)
        notes = caveats_of(picture, numbers)
        tables = tables_of(numbers, f"watch · {settings.base_url or settings.events}", notes)
        summary = {"study": "watch", "caveats": notes, "ended": problem or "as wanted", **numbers}
        summary |= run_facts(time.perf_counter() - started, PACKAGES_OF["server"])
        write_results(summary, tables, folder.work)
        publish(folder, tables)
    if page is not None and picture.stream.blocks:
        from spanlab.study.run import run_study

        # the server's block size and memory, unless the command chooses them
        quoted = str(folder.path / CAPTURE).replace("\\", "\\\\").replace("'", "\\'")
        readings, overrides = picture.readings, [f"log='{quoted}'"]
        if {"blocks", "block_size"} <= readings.keys():
            tokens = readings["blocks"] * readings["block_size"]
            memory, size = tokens * page.model.kv_bytes_per_token / GIB, readings["block_size"]
            overrides.append(f"arms.vllm_0_32.pool.block_size={size:.0f}")
            overrides.append(f"store.total_gib={memory}")
        run_study(_page_of(settings, page.output.run, *overrides), "explain", root)
    if not picture.messages:
        connected = "the server is connected, and stored no block" if problem == "" else problem
        raise ValueError(
            f"events={settings.events}: expected KV events, but no message came: {connected}"
        )
    if problem:
        raise ValueError(
            f"{problem}; expected a server until the end, and {folder.path} has what came before"
        )


def _watched(settings: Watch, folder: RunFolder, console: Console) -> tuple[Picture, str]:
    """Watch until the end; return the picture, and why it ended early, or why no message can have
    come."""
    with ExitStack() as stack:
        metrics = None
        if settings.base_url is not None:
            metrics = Metrics(settings.base_url, settings.silence_s)
            stack.callback(metrics.close)
            metrics.check()
        addresses = [of_rank(settings.events, rank) for rank in range(settings.ranks)]
        subscription = Subscription(addresses, settings.socket == "bind", settings.topic)
        stack.callback(subscription.close)
        capture, readings = (
            stack.enter_context((folder.work / name).open("wb")) for name in (CAPTURE, READINGS)
        )
        is_ended = stack.enter_context(_signals())
        verb = "waits for events at" if settings.socket == "bind" else "reads events from"
        print_line(console, f"watch {verb} {subscription.address}; Ctrl-C ends it")
        progress = WatchRun(settings, capture, readings, subscription, metrics)
        with Screen(console) as screen:
            problem = progress.watch(screen, is_ended)
        if not problem and not progress.picture.messages and not subscription.ever:
            problem = f"no publisher of ZeroMQ connected with {subscription.address}"
    return progress.picture, problem


# ------------------------------------------------------------------------------
# The page at the end.
# ------------------------------------------------------------------------------


def _page_of(settings: Watch, run: str, *overrides: str) -> Study:
    """Return the settings of the page; ValueError for overrides that `explain` refuses."""
    fixed = "workload.log.bad_lines=skip", f"output.if_exists={settings.output.if_exists}"
    study = as_settings(compose_entry("explain", [*fixed, *overrides, *settings.explain]))
    assert isinstance(study, Study), "the entry explain is a study"
    study.output.run = study.output.run or run
    return study
