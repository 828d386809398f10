"""Captured KV events of vLLM or SGLang as a log: chains of stored blocks are prompts.

A stored block names its parent, so a chain of blocks gives the full blocks of a prompt. Reused
blocks cause no event, unless the server reports all blocks (`kv_cache_report_mode=full`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from itertools import count, islice, zip_longest
from typing import IO, Any, NamedTuple

import numpy as np

from spanlab.workloads.logs.kv_events import (
    CLEARED,
    FULL_ATTENTION,
    HITS,
    LIMITS,
    MARK,
    METRICS,
    QUERIES,
    STORED,
    TYPES,
    Batch,
    BlockStream,
    Event,
    Sequences,
    causes_line,
    read_batch,
    unpacked,
)
from spanlab.workloads.logs.log import Entry, Identity, Ids, hash_name
from spanlab.workloads.logs.observed import NOT_REPORTED, Usage
from spanlab.workloads.logs.rows import BadFieldError, Row, actual
from spanlab.workloads.logs.source import LOG_FORMATS, LogFile, LogFormat

# ------------------------------------------------------------------------------
# Messages of a capture: payloads end to end, ZeroMQ's frames, or the records of `watch`.
# ------------------------------------------------------------------------------

_EVENTS_FOR_GROUP = 1000
_SEQUENCE_BYTES = 8
# a list of two or three elements, of which the first is a number
_PAYLOAD = re.compile(rb"(?=[\x92\x93](\xcb|\xca))")
_FIRST_ARRAY = 0x80  # bytes from here on begin no text


class _Message(NamedTuple):
    """One message of the server of `size` bytes; `sequence` is its number in the stream, if the
    capture has it."""

    number: int
    content: Any
    size: int
    topic: bytes = b""
    sequence: int | None = None


class _Counting:
    """Reader that counts the bytes that were read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.total = file, 0

    def read(self, size: int) -> bytes:
        """Read up to `size` bytes."""
        data = self._file.read(size)
        self.total += len(data)
        return data


def _recognises(file: LogFile) -> bool:
    has_event = (
        any(name.encode() in file.head for name in TYPES) and _PAYLOAD.search(file.head) is not None
    )
    return has_event or MARK.encode() in file.head[: len(MARK) + _SEQUENCE_BYTES]


def _messages(file: LogFile) -> Iterator[_Message]:
    """Yield the messages of a capture; ValueError, naming the position, where it is damaged or ends
    in a message."""
    import msgpack

    with file.open() as opened:
        reader, frame_bytes = _Counting(opened), _frame_bytes(file.head)
        unpacker = msgpack.Unpacker(
            reader, strict_map_key=False, max_buffer_size=file.line_bytes, **LIMITS
        )
        for number in count(1):
            position = unpacker.tell()
            try:
                frame = unpacker.read_bytes(frame_bytes)
                content = unpacker.unpack() if len(frame) == frame_bytes else None
            except msgpack.OutOfData:
                content = None
            except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
                raise ValueError(
                    f"log={file.path}: expected msgpack throughout, not in message {number} at byte {position:,} "
                    f"({type(error).__name__}: {error})"
                ) from error
            if content is None:
                left = reader.total - position
                if left and file.skips:
                    file.unread.leave(
                        f"the bytes of message {number}, within which the capture ends", left
                    )
                elif left:
                    raise ValueError(
                        f"log={file.path}: expected complete messages, but it ends within message {number}, which "
                        f"begins at byte {position:,}: {left:,} bytes are left over; workload.log.bad_lines=skip skips "
                        "them"
                    )
                return
            size = unpacker.tell() - position
            if frame_bytes:
                topic = frame[:-_SEQUENCE_BYTES]
                sequence = int.from_bytes(frame[-_SEQUENCE_BYTES:], "big")
                yield _Message(number, content, size, topic, sequence)
            elif message := _unframed(content, number, size, file):
                yield message


def _frame_bytes(head: bytes) -> int:
    """Return the bytes of topic and number before each payload; 0 if the capture has no such
    frames."""
    import msgpack

    for start in (
        (match.start() for match in _PAYLOAD.finditer(head)) if head[0] < _FIRST_ARRAY else ()
    ):
        unpacker = msgpack.Unpacker(strict_map_key=False, **LIMITS)
        unpacker.feed(head[start:])
        try:
            content = unpacker.unpack()
        except msgpack.OutOfData:  # longer than the head
            content = [0, []]
        except (ValueError, TypeError, msgpack.UnpackException):
            continue
        if start >= _SEQUENCE_BYTES and isinstance(content[1], list):
            return start
    return 0


def _unframed(content: Any, number: int, size: int, file: LogFile) -> _Message | None:
    """Return a batch, also out of a list of its frames; None for damaged frames, and for records
    without a batch."""
    if isinstance(content, dict) and (MARK in content or isinstance(content.get(METRICS), dict)):
        readings = Row(content.get(METRICS) or {})
        file.counters.add(readings.number(QUERIES, most=1e18), readings.number(HITS, most=1e18))
        return None
    if not (isinstance(content, list) and len(content) in (3, 4) and isinstance(content[2], bytes)):
        return _Message(number, content, size)
    topic, sequence, payload = content[:3]
    try:
        sequence = int.from_bytes(sequence, "big") if isinstance(sequence, bytes) else int(sequence)
        content = unpacked(payload)
    except (ValueError, TypeError) as error:
        problem = (
            str(error)
            if isinstance(error, ValueError)
            else f"batch: expected a number as second frame ({error})"
        )
        file.refuse(number, problem, size)
        return None
    return _Message(
        number, content, size, topic if isinstance(topic, bytes) else str(topic).encode(), sequence
    )


@dataclass
class _Step:
    """A batch in the order of its rank: `number` is that of its message, `position` counts the
    batches of the rank."""

    number: int
    position: int
    batch: Batch
    restarted: bool


def _steps(file: LogFile) -> Iterator[_Step]:
    """Yield the valid batches."""
    sequences, positions, payload_bytes = Sequences(), Counter[Identity](), 0
    for message in _messages(file):
        try:
            batch = read_batch(message.content, file.set_aside)
        except BadFieldError as error:
            file.refuse(message.number, str(error), message.size)
            continue
        if not sequences.is_new(message.topic, batch.rank, message.sequence):
            file.set_aside("messages that came twice")
            continue
        positions[batch.rank] += 1
        payload_bytes += message.size
        file.unread.take(message.size)
        yield _Step(message.number, positions[batch.rank], batch, sequences.restarted)
    if sequences.lost:
        arrived = positions.total()
        file.unread.leave(
            "lost messages, by the mean size", sequences.lost * payload_bytes // arrived
        )
        file.notes.append(
            f"the capture lost {sequences.lost:,} messages, in {sequences.gaps:,} gaps of the sequence numbers: their "
            f"blocks are missing, and all numbers stand on the {arrived:,} messages that came"
        )
    if sequences.before:
        file.notes.append(
            f"the server had sent {sequences.before:,} messages before the capture began"
        )


# ------------------------------------------------------------------------------
# The format: chains of stored blocks are prompts.
# ------------------------------------------------------------------------------

PARTIAL = (
    "events tell of stored blocks: prompts that were reused whole left none, the ends of prompts behind the last full "
    "block are unknown, and blocks of answers count as prompt"
)
JOINED = (
    "a prompt goes on where blocks follow on its last one: as a single block, as those of answers, or before that, at "
    "once or in the next step, as parts of a long prompt; a later prompt that begins so counts as the same one"
)
STORED_BEFORE = (
    "beginnings of prompts that were stored before the capture began, but for one block each"
)


@LOG_FORMATS.register("vllm_events")
def vllm_events() -> LogFormat:
    """A prompt is a chain of blocks that events extend; ranks, adapters and salts are kept
    apart."""
    return LogFormat(
        looks_for="a msgpack stream of [time, [BlockStored, …], rank]",
        recognises=_recognises,
        read=_read_entries,
        ids=Ids.CHAINED,
        block=_block_size,
    )


def _stored(file: LogFile) -> Iterator[Event]:
    return (event for step in _steps(file) for event in step.batch.events if event.kind == STORED)


def _group(file: LogFile) -> int | None:
    """Return the cache group whose blocks are prompts: the first of full attention, or else the
    first one."""
    events = list(islice(_stored(file), _EVENTS_FOR_GROUP))
    full = [event for event in events if event.fields.get("kv_cache_spec_kind") in FULL_ATTENTION]
    return next((event.group for event in full or events), None)


def _block_size(file: LogFile) -> int | None:
    group = _group(file)
    return next(
        (event.fields.count("block_size") for event in _stored(file) if event.group == group), None
    )


@dataclass(slots=True)
class _Prompt:
    """A chain of blocks: where and when it began, its last block, and its tokens that were stored.

    `position`  that of the latest batch; `answered`: whether the latest event had a single block,
                as those of answers
    """

    line: int
    at: float
    session: Hashable
    position: int
    last: int
    stored: int = 0
    answered: bool = False

    def goes_on(self, at_once: bool, position: int, blocks: int) -> bool:
        """Return whether the next blocks on the last one belong to this prompt, and not to a later
        turn."""
        return blocks == 1 or (not self.answered and (at_once or position <= self.position + 1))


@dataclass
class _Cache:
    """Blocks of one cache identity, and the prompts that they form.

    `parents`, `sizes`  parent and tokens of each block
    `ends`     prompts by their last block; `latest` is the last block of the latest event
    `known`    last block by its hash
    `awaited`  parents that were not stored yet; `marked`: blocks with extra keys among themselves
               and their ancestors
    """

    identity: Identity
    prompts: list[_Prompt] = field(default_factory=list)
    latest: int | None = None
    parents: dict[int, int | None] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    ends: dict[int, _Prompt] = field(default_factory=dict)
    known: dict[Hashable, int] = field(default_factory=dict)
    awaited: set[int] = field(default_factory=set)
    marked: set[int] = field(default_factory=set)

    def extend(self, event: Event, step: _Step, reused: bool) -> None:
        """Add the blocks of an event to the prompt that they go on, or to a new one; BadFieldError
        for a circle.

        `reused`  the server only reports these blocks
        """
        hashes, extra = event.fields.get("block_hashes"), event.fields.get("extra_keys") or []
        parent_hash, size = event.fields.get("parent_block_hash"), event.fields.count("block_size")
        parent = (
            None if parent_hash is None else self.known.get(parent_hash, _number_of(parent_hash))
        )
        blocks: list[int] = []
        above = parent
        for name, keys in zip_longest(hashes, extra):
            block = _number_of(name)
            # extra keys, as of images, change a block and all that follow
            if keys or above in self.marked:
                block = hash_name((name, keys, above))
                self.marked.add(block)
            blocks.append(block)
            above = block
        if parent is not None and parent not in self.parents:
            self.awaited.add(parent)
        if self.awaited.intersection(blocks) and set(blocks).intersection(self._chain_to(parent)):
            raise BadFieldError(
                "parent_block_hash", f"no block that follows on these{actual(parent_hash)}"
            )
        self.awaited.difference_update(blocks)
        before = parent
        for name, block in zip(hashes, blocks, strict=True):
            self.parents.setdefault(block, before)
            self.sizes[block] = size
            self.known[name], before = block, block
        prompt = None if parent is None else self.ends.get(parent)
        if prompt is None or not prompt.goes_on(parent == self.latest, step.position, len(blocks)):
            session = event.fields.label("session_id")
            prompt = _Prompt(step.number, step.batch.at, session, step.position, blocks[-1])
            self.prompts.append(prompt)
        else:
            del self.ends[prompt.last]
        prompt.last, prompt.position, prompt.answered = blocks[-1], step.position, len(blocks) == 1
        prompt.stored += 0 if reused else size * len(blocks)
        self.ends[prompt.last] = prompt
        self.latest = prompt.last

    def entries(self, file: LogFile) -> Iterator[Entry]:
        """Yield the prompts, with the tokens that the server found where all blocks are known."""
        for prompt in self.prompts:
            chain = self._chain_to(prompt.last)[::-1]
            keys, size = np.array(chain, dtype=np.int64), self.sizes[prompt.last]
            lengths = np.array([self.sizes.get(block, size) for block in chain], dtype=np.int64)
            tokens, usage = int(lengths.sum()), NOT_REPORTED
            if chain[0] in self.parents:
                usage = Usage(float(tokens), float(max(tokens - prompt.stored, 0)))
            else:
                file.set_aside(STORED_BEFORE)
            file.unread.finish(endless=usage is NOT_REPORTED)
            yield Entry(
                *(keys, lengths, prompt.line, prompt.at),
                session=prompt.session,
                usage=usage,
                identity=self.identity,
            )

    def _chain_to(self, block: int | None) -> list[int]:
        """Return a block and its ancestors, the first one last."""
        chain: list[int] = []
        while block is not None:
            chain.append(block)
            block = self.parents.get(block)
        return chain


def _read_entries(file: LogFile) -> Iterator[Entry]:
    """Yield the prompts in the order of their beginnings."""
    group, caches, stream = _group(file), dict[Identity, _Cache](), BlockStream()
    file.start_over()
    file.notes += [PARTIAL, JOINED]
    for step in _steps(file):
        stream.begin_batch()
        if step.restarted:
            stream.restart()
        for event in step.batch.events:
            if event.kind != CLEARED and event.group != group:
                if event.kind == STORED:
                    file.set_aside(
                        "events about blocks of other cache groups, which hold the same tokens again"
                    )
                continue
            reused = stream.add(event)
            if event.kind != STORED:
                continue
            cache = caches.setdefault(event.identity, _Cache(event.identity))
            try:
                cache.extend(event, step, reused)
            except BadFieldError as error:
                file.refuse(step.number, str(error))
    if stream.blocks:
        file.notes.append(f"stored blocks by why they were computed: {causes_line(stream.blocks)}")
    entries = [entry for cache in caches.values() for entry in cache.entries(file)]
    yield from sorted(entries, key=lambda entry: (entry.at, entry.line))


def _number_of(name: Any) -> int:
    """Return a block's hash as a number."""
    return name if isinstance(name, int) and abs(name) < 1 << 62 else hash_name(name)
