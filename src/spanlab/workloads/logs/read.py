"""Reader of logs: detect the format, and read the requests in order of time, with notes."""

from __future__ import annotations

import lzma
import math
import zlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from spanlab.core.token_string import IdRun, TokenIds, Tokens
from spanlab.kinds import check_fields, field
from spanlab.model_files import installed_model
from spanlab.queries.render import ChatTokenizer, load_tokenizer
from spanlab.registry import at_most, one_of, positive
from spanlab.workloads.files import Content, Waits, content_of
from spanlab.workloads.load import WORKLOADS, Drawn, OfFile, OfText, Selected
from spanlab.workloads.logs import (  # noqa: F401 - register their formats
    agents,
    block_traces,
    clouds,
    command_lines,
    formats,
    gateways,
    openai,
    otel,
    results,
    trajectories,
    vllm_events,
)
from spanlab.workloads.logs.bodies import Prompt, Rewrite
from spanlab.workloads.logs.formats import CONTENT, entries
from spanlab.workloads.logs.log import (
    LONGEST_S,
    ChangedLog,
    Columns,
    Entry,
    Ids,
    Log,
    TokensOf,
    salt_keys,
)
from spanlab.workloads.logs.observed import (
    BYTES_PER_TOKEN,
    LONGEST_REQUEST_S,
    Moments,
    away_from_arrival,
)
from spanlab.workloads.logs.prompts import Prompts
from spanlab.workloads.logs.rendering import TOOLS, BodyOptions, BodyReader, Pieces
from spanlab.workloads.logs.rows import BadFieldError, actual
from spanlab.workloads.logs.source import LOG_FORMATS, LogFile, LogFormat, detect_format
from spanlab.workloads.selection import Selection, select
from spanlab.workloads.shape import committed
from spanlab.workloads.text import find_tokenizer
from spanlab.workloads.workload import Corpus, Provenance, ProvenanceKind, Row, Workload, workload

ROWS = ("auto", "whole", "increments")
STAND_IN = (
    f"no tokenizer is given: {BYTES_PER_TOKEN} bytes of text count as one token, so that lengths are estimates; "
    "workload.tokenizer=FILE counts real ones"
)


def format_names() -> tuple[str, ...]:
    """Return the valid values of `format`."""
    return ("auto", *LOG_FORMATS)


@dataclass
class LogSettings:
    """Options for reading a log."""

    format: str = field("auto", None, "the log's format; auto: recognised by its content")
    piece: int = field(
        16,
        positive,
        "tokens per piece, the unit in which token ids or text are compared; 1 finds every shared token and takes "
        "16 times the memory of the default",
    )
    requests: int | None = field(None, positive, "the first requests of the log; null: all")
    bad_lines: str = field(
        "refuse", ("refuse", "skip"), "refuse the log, or skip such lines and count them in a note"
    )
    backwards: str = field(
        "refuse", ("refuse", "sort"), "if time goes backwards: refuse the log, or sort its requests"
    )
    template: str | None = field(
        None,
        None,
        "folder of a tokenizer whose chat template renders the bodies of requests; null: messages alone count",
    )
    tools: str = field(
        "first",
        tuple(TOOLS),
        "place of tools without a template: first, or after_system, behind the system prompt",
    )
    image_tokens: int | None = field(
        None,
        positive,
        "tokens of an image; null: by its size where a body holds it, otherwise unknown",
    )
    not_rendered: list[str] = field(
        list, None, "further keys of bodies that the server does not render"
    )
    rows: str = field(
        "auto",
        ROWS,
        "of a session: whole prompts, or increments, the new tokens of each turn; auto: increments where a row has "
        "`delay` and no `timestamp`, unless its ids repeat those of the row before",
    )
    prompt_tokens: int = field(1 << 24, at_most(1 << 31), "longest prompt that is accepted")
    line_mib: float = field(
        128.0,
        at_most(1 << 20),
        "longest line that is accepted, or longest file that is a single JSON value",
    )
    wait_s: float = field(60.0, at_most(1e6), "seconds without data after which a pipe is given up")
    pipe_gib: float = field(64.0, at_most(1 << 20), "most data that is copied from a pipe")

    def __post_init__(self) -> None:
        one_of("workload.log.format", self.format, format_names())
        check_fields(self, "workload.log")


@dataclass(frozen=True)
class LogSource:
    """A log's file and the settings with which it is read, to read it again."""

    path: Path
    settings: LogSettings
    tokenizer: str | None = None

    @cached_property
    def _file(self) -> LogFile:
        return _file(self.path, self.settings, self.tokenizer)

    @cached_property
    def _reader(self) -> BodyReader:
        return BodyReader(self._file)

    @property
    def options(self) -> BodyOptions:
        """How the bodies of the log are rendered."""
        options: BodyOptions = self._file.bodies
        return options

    @cached_property
    def prompts(self) -> Prompts:
        """The prompt of each request, None where the log has none; another process reads the log
        again for them."""
        file = replace(self._file, prompts=Prompts())
        return _selected(
            file, _columns(file, _format(file, self.settings.format)[1], self.settings)
        )

    @property
    def has_prompts(self) -> bool:
        """Whether a request has a prompt."""
        return self.prompts.are_known

    def __getstate__(self) -> dict[str, Any]:
        """Return what other processes get: files of this one are not theirs."""
        return {name: getattr(self, name) for name in ("path", "settings", "tokenizer")}

    @property
    def tokens_of(self) -> TokensOf | None:
        """The tokens of a text by the template's tokenizer, or by that of the workload; None
        without one."""
        if self.settings.template is not None:
            backend = _template(self.settings.template).tokenizer
        elif self.tokenizer is not None:
            backend = find_tokenizer(self.tokenizer).tokenizer
        else:
            return None
        return lambda text: [
            (int(first), int(stop))
            for first, stop in backend.encode(text, add_special_tokens=False).offsets
        ]

    def rewritten(self, log: Log, rewrites: Mapping[str, Rewrite]) -> dict[str, ChangedLog]:
        """Return the log, as it was read from this source, by each change of prompts that changes
        some.

        All are made in one reading of the prompts. Requests without a prompt, and pieces before it,
        stay as they are.
        """
        assert log.fronts is not None, "the log was read from a file"
        changed, counts = dict[str, Columns](), Counter[str]()
        fronts = log.fronts.tolist()
        sessions, identities = (
            [None] * log.requests if column is None else column.tolist()
            for column in (log.sessions, log.identities)
        )

        def entry(request: int, prompt: Prompt | None, name: str = "") -> Entry:
            pieces = None if prompt is None else self._reader.pieces_of(prompt, name)
            front = fronts[request]
            if front or pieces is None:
                pieces = _behind(log, request, front, pieces)
            keys, lengths, opens, _ = pieces
            identity = (("number", identities[request]),)
            return Entry(
                keys, lengths, request, session=sessions[request], opens=opens, identity=identity
            )

        for request, prompt in enumerate(self.prompts):
            usual: Entry | None = None
            for name, rewrite in rewrites.items():
                other = None if prompt is None else rewrite(prompt)
                is_new = other is not prompt
                counts[name] += is_new
                if is_new and name not in changed:
                    changed[name] = Columns()
                    for earlier in range(request):
                        changed[name].add(entry(earlier, self.prompts[earlier]))
                if is_new:
                    changed[name].add(entry(request, other, name))
                elif name in changed:
                    usual = usual or entry(request, prompt)
                    changed[name].add(usual)
        self.prompts.release()

        def build(columns: Columns) -> Log:
            read = columns.log(log.format, log.ids, log.block, ())
            names = ("ids", "pieces", "lengths", "opens", "free", "starts")
            return replace(log, **{name: getattr(read, name) for name in names})

        return {
            name: ChangedLog(counts[name], partial(build, columns))
            for name, columns in changed.items()
        }


def _behind(log: Log, request: int, front: int, pieces: Pieces | None) -> Pieces:
    """Return the first `front` pieces of a request as they were, and others behind them; None: all
    as they were."""
    first, stop = log.starts[request : request + 2].tolist()
    stop = stop if pieces is None else first + front
    keys = salt_keys(log.pieces[first:stop].astype(np.int64), "as it was")
    lengths = log.lengths[first:stop].astype(np.int64)
    opens = np.flatnonzero(log.opens[first:stop])[1:].tolist()
    if pieces is None:
        return Pieces(keys, lengths, tuple(opens))
    opens += [front, *[front + index for index in pieces.opens]]
    return Pieces(
        np.concatenate([keys, pieces.keys]), np.concatenate([lengths, pieces.lengths]), tuple(opens)
    )


def read_log(path: Path, settings: LogSettings, tokenizer: str | None = None) -> Log:
    """Read the log at `path`; ValueError names line and field of an entry that does not match the
    format."""
    try:
        log = _read_path(path, settings, tokenizer)
    except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        if isinstance(error, OSError) and error.errno:
            raise ValueError(
                f"log={path}: expected a readable file, not one with {error.strerror!r}"
            ) from error
        raise ValueError(
            f"log={path}: expected a complete compressed file, but it is damaged: {error}"
        ) from error
    if not log.lengths.any():
        raise ValueError(
            f"log={path}: expected prompts with tokens, but all {log.requests:,} requests are empty"
        )
    return log


def open_log(path: Path, settings: LogSettings) -> Content:
    """Return the file that holds a log's bytes; a pipe is copied at the first call."""
    return content_of(path, Waits(settings.wait_s, int(settings.pipe_gib * (1 << 30))))


def _file(path: Path, settings: LogSettings, tokenizer: str | None) -> LogFile:
    notes: list[str] = []
    template = None if settings.template is None else _template(settings.template)
    return LogFile(
        path,
        open_log(path, settings),
        settings.piece,
        _encoder(tokenizer, notes),
        settings.bad_lines == "skip",
        settings.rows,
        int(settings.line_mib * (1 << 20)),
        settings.prompt_tokens,
        notes,
        bodies=BodyOptions(
            settings.tools, settings.image_tokens, tuple(settings.not_rendered), template
        ),
    )


@lru_cache(maxsize=4)
def _template(folder: str) -> ChatTokenizer:
    try:
        tokenizer = load_tokenizer(Path(installed_model(folder)))
        assert tokenizer.template is not None, "a tokenizer without template is an error"
    except ValueError as error:
        raise ValueError(f"workload.log.template={folder}: {error}") from error
    return tokenizer


def _read_path(path: Path, settings: LogSettings, tokenizer: str | None) -> Log:
    file = replace(_file(path, settings, tokenizer), prompts=Prompts())
    if file.content.file.is_file() and not file.head.strip():
        raise ValueError(f"log={path}: the file is empty; expected requests")
    name, log_format = _format(file, settings.format)
    columns = _columns(file, log_format, settings)
    if not len(columns):
        instead = "".join(
            f"; {note}" for note in file.all_notes() if note.startswith(("not counted", "left out"))
        )
        raise ValueError(
            f"log={path}: the file has no requests; expected {log_format.looks_for}{instead}"
        )
    notes_of_reading, unread = file.all_notes(), deepcopy(file.unread)
    counters = deepcopy(file.counters) if file.counters.prompt else None
    try:
        block = log_format.block(file)
    except BadFieldError as error:
        raise ValueError(f"log={path}: {error}") from error
    source = LogSource(path, settings, tokenizer)
    source.__dict__["prompts"] = _selected(file, columns)  # the value of its cached property
    ids = Ids.NONE if file.holds_lengths_only else log_format.ids
    log = columns.log(name, ids, block, notes_of_reading, f"log={path}")
    return replace(log, unread=unread, counters=counters, source=source)


def _selected(file: LogFile, columns: Columns) -> Prompts:
    """Return the prompts of a file that was read, in the order of its requests."""
    prompts: Prompts = file.prompts
    prompts.select(columns.prompts)
    return prompts


def _format(file: LogFile, name: str) -> tuple[str, LogFormat]:
    return detect_format(file) if name == "auto" else (name, LOG_FORMATS.make(name, {}, {}))


def _columns(file: LogFile, log_format: LogFormat, settings: LogSettings) -> Columns:
    """Read the requests in order of time; only a log that needs sorting is held as entries."""
    columns, order = Columns(), _TimeOrder(file, settings.backwards == "sort")
    for entry in _accepted(file, log_format):
        if len(columns) + len(order.late_entries) == settings.requests:
            break
        if order.in_order(entry):
            columns.add(entry)
    if not order.late_entries:
        return columns
    # only the first reading shows that requests must be sorted by time
    file.start_over()
    columns, entries = Columns(), list(islice(_accepted(file, log_format), settings.requests))
    file.notes.append("time goes backwards in the log: its requests are sorted by time")
    for entry in sorted(entries, key=lambda entry: entry.at or 0.0):
        columns.add(entry)
    return columns


def _accepted(file: LogFile, log_format: LogFormat) -> Iterator[Entry]:
    """Yield the requests of a file; leave out copies, refuse prompts above the limit and times that
    no request has."""
    seen = set[Hashable]()
    for entry in log_format.read(file):
        if entry.record is not None:
            copy = entry.record, entry.at, int(entry.lengths.sum()), entry.output_len
            if copy in seen:
                file.set_aside("requests that repeat an earlier one")
                continue
            seen.add(copy)
        try:
            file.check_length(int(entry.lengths.sum()), "tokens")
            _check_times(entry)
        except BadFieldError as error:
            file.refuse(entry.line, str(error))
        else:
            yield entry


def _check_times(entry: Entry) -> None:
    """Raise BadFieldError for a time that no clock has, or that is days away from the request's
    arrival.

    A server's own clock, which times of queueing show, is compared when all requests are known.
    """
    if entry.at is None:
        return
    if not abs(entry.at) <= LONGEST_S:
        raise BadFieldError(
            "timestamp", f"a time within {LONGEST_S:.0e} s of 1970{actual(entry.at)}"
        )
    if not math.isnan(entry.moments.queued):
        return
    for name, moment in zip(Moments._fields, entry.moments, strict=True):
        if abs(moment - entry.at) > LONGEST_REQUEST_S:
            raise BadFieldError(f"{name}_ts", away_from_arrival(moment))


class _TimeOrder:
    """Check of time order: the latest time so far, and the entries with an earlier time."""

    def __init__(self, file: LogFile, sorts: bool) -> None:
        self.file = file
        self.sorts = sorts
        self.at = -np.inf
        self.line = 0
        self.late_entries = list[Entry]()

    def in_order(self, entry: Entry) -> bool:
        if entry.at is None or entry.at >= self.at:
            self.at, self.line = (self.at if entry.at is None else entry.at), entry.line
            return True
        if not self.sorts:
            raise ValueError(
                f"{self.file.path}:{entry.line}: timestamp: expected a time no earlier than that of line {self.line}; "
                "workload.log.backwards=sort sorts the requests"
            )
        self.late_entries.append(entry)
        return False


def _encoder(tokenizer: str | None, notes: list[str]) -> Callable[[str], Tokens]:
    if tokenizer is None:

        def count_bytes(text: str) -> Tokens:
            if STAND_IN not in notes:
                notes.insert(0, STAND_IN)
            return bytes_as_tokens(text)

        return count_bytes
    backend = find_tokenizer(tokenizer).tokenizer
    return lambda text: np.array(backend.encode(text, add_special_tokens=False).ids, dtype=np.int32)


def bytes_as_tokens(text: str) -> Tokens:
    """Return runs of four bytes of a text as token ids, int32; the last run is padded."""
    data = text.encode()
    padded = data + bytes(-len(data) % BYTES_PER_TOKEN)
    return np.frombuffer(padded, dtype=np.int32)


# ------------------------------------------------------------------------------
# The workload `log`: requests of a server's log, or of the recorded trace that is part of
# this package.
#
# A log format reads the requests into columns. Selected requests get token ids when a study
# serves them.
# ------------------------------------------------------------------------------


@dataclass
@WORKLOADS.register("log")
class LogWorkload(Drawn, Selected, OfText, OfFile):
    """A server's own log, in a detected format; without a path, the RAGPulse trace that is part of
    the code."""

    log: LogSettings = field(LogSettings, None, "how the log is read")


@workload("log", "shape")
def measured(log: LogSettings, selection: Selection) -> Workload:
    """Return the committed shape of the RAGPulse trace as a log."""
    columns, shape = Columns(), committed("ragpulse", None)
    for entry in islice(entries(shape), log.requests):
        columns.add(entry)
    return _workload(
        columns.log("ragpulse", Ids.CONTENT, None, (CONTENT,)), "RAGPulse trace", "measured shape"
    )


@workload("log", "local")
def local(
    path: Path, log: LogSettings, selection: Selection, tokenizer: str | None = None
) -> Workload:
    """Read a log in one of the formats of `logs`."""
    read = read_log(path, log, tokenizer)
    digest = open_log(path, log).sha256
    name = path.name if digest is None else f"{path} (a pipe, SHA-256 {digest[:16]}…)"
    return _workload(read, name, "local trace")


def _workload(log: Log, name: str, kind: ProvenanceKind) -> Workload:
    meaning_of_ids = {
        Ids.CHAINED: "chained ids",
        Ids.CONTENT: "content ids",
        Ids.NONE: "lengths only",
    }[log.ids]
    return Workload(
        "log",
        (),
        Provenance(kind, f"{name}, {log.requests:,} requests as {log.format}, {meaning_of_ids}"),
        log=log,
    )


def served(workload: Workload, selection: Selection) -> Workload:
    """Return the selected requests of a log with token ids; its sessions count as documents."""
    log = workload.log
    assert log is not None, "the workload was read from a log"
    selected = select(_corpus(log, workload.provenance), selection)
    groups = np.array([request.group_id for request in selected.requests])
    origin = sha256(log.fingerprint.encode() + groups.tobytes()).hexdigest()
    return replace(selected, notes=log.notes, origin=origin)


Ints = NDArray[np.int64]

_AT_ONCE = 1 << 14  # requests whose pieces are looked at together: those of all take gigabytes


class _Rows(Sequence[Row]):
    """Rows of the requests `numbers` of a log, made on access; as objects, the pieces of a long log
    take gigabytes."""

    def __init__(self, log: Log, numbers: NDArray[np.int64]) -> None:
        self._log, self._numbers = log, numbers
        groups = log.sessions if log.families is None else log.families
        self.groups = (np.arange(log.requests) if groups is None else groups)[numbers].tolist()

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        log, number = self._log, int(self._numbers[index])
        pieces = log.pieces[log.starts[number] : log.starts[number + 1]]
        return Row(self.groups[index], tuple(pieces.tolist()), int(log.output_lens[number]))


def _corpus(log: Log, provenance: Provenance) -> Corpus:
    """Return a corpus with one span per content and token ids from a counter; empty prompts are
    left out."""
    longest = np.zeros(int(log.pieces.max()) + 1, dtype=np.int64)
    np.maximum.at(longest, log.pieces, log.lengths)
    if longest.sum() > np.iinfo(np.int32).max:
        raise ValueError(
            f"log: {longest.sum():,} different tokens; expected fewer than 2^31 to serve them"
        )
    first = np.cumsum(longest) - longest
    with_tokens = np.flatnonzero(log.prompt_tokens)
    rows = _Rows(log, with_tokens)
    empty = log.requests - len(with_tokens)
    detail = (
        f"{provenance.detail}; {empty:,} without a prompt are left out"
        if empty
        else provenance.detail
    )
    independent = np.full(len(longest), log.ids == Ids.CONTENT)

    def expand(counts: Mapping[int, int]) -> dict[int, TokenIds]:
        contents = list(counts)
        return dict(
            zip(contents, map(IdRun, first[contents].tolist(), counts.values()), strict=True)
        )

    not_reusable = np.zeros(len(longest), dtype=bool)
    waits = None if log.waits_ns is None else log.waits_ns[with_tokens].tolist()
    after: list[tuple[int, ...]] | None = None
    if log.after is not None:  # requests without a prompt are no rows
        row_of = {request: row for row, request in enumerate(with_tokens.tolist())}
        after = [
            tuple(row_of[other] for other in log.after[request] if other in row_of)
            for request in row_of
        ]
    more: dict[str, Any] = {
        "arrived_at": log.arrived_ns[with_tokens].tolist(),
        "waits_ns": waits,
        "after": after,
    }
    if log.ids != Ids.CONTENT:
        more["runs_of"] = lambda selected: _runs_of(log, with_tokens[selected], first, longest)
    more["groups"] = rows.groups
    return Corpus(
        "log", provenance.kind, detail, longest, independent, not_reusable, rows, expand, **more
    )


def _runs_of(
    log: Log, requests: Ints, first: Ints, lengths: Ints
) -> Iterator[list[tuple[int, int]]]:
    """Yield first id and length of each run of consecutive ids in the prompts of requests.

    `first`, `lengths`  first id and number of ids of each content
    """
    for start in range(0, len(requests), _AT_ONCE):
        some = requests[start : start + _AT_ONCE]
        sizes = log.starts[some + 1] - log.starts[some]
        behind = np.cumsum(sizes)
        pieces = log.pieces[
            np.arange(behind[-1]) + np.repeat(log.starts[some] - behind + sizes, sizes)
        ]
        some_ids = lengths[pieces] > 0
        behind = np.cumsum(some_ids)[behind - 1]
        ids, counts = first[pieces[some_ids]], lengths[pieces[some_ids]]
        begins = np.ones(len(ids), dtype=bool)
        begins[1:] = ids[1:] != ids[:-1] + counts[:-1]
        begins[behind[:-1]] = True
        runs = np.flatnonzero(begins)
        pairs = list(zip(ids[runs].tolist(), np.add.reduceat(counts, runs).tolist(), strict=True))
        ends = np.searchsorted(runs, behind).tolist()
        for begin, end in zip([0, *ends], ends, strict=False):
            yield pairs[begin:end]
