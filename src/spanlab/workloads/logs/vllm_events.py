"""KV events of vLLM or SGLang: a captured stream of msgpack batches of stored and removed blocks.

A stored block names its parent, so a chain of blocks gives the full blocks of a prompt. Reused
blocks cause no event, unless the server reports all blocks (`kv_cache_report_mode=full`).
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from itertools import count, islice, zip_longest
from typing import IO, Any, NamedTuple

import numpy as np

from spanlab.workloads.logs.log import Entry, Identity, Ids, hash_name
from spanlab.workloads.logs.source import LOG_FORMATS, BadFieldError, LogFile, LogFormat, Row, actual, identity_of

STORED = "BlockStored"
_TYPES = (STORED, "BlockRemoved", "AllBlocksCleared")
#: Fields of a stored block, in their order where an event is a list; newer servers send maps.
_FIELDS = (
    "type",
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
)
_FULL_ATTENTION = ("full_attention", "sink_full_attention", "mla_attention")
_EVENTS_FOR_GROUP = 1000
_SEQUENCE_BYTES = 8
_PAYLOAD = re.compile(rb"(?=[\x92\x93](\xcb|\xca))")  # a list of two or three elements, of which the first is a number
_FIRST_ARRAY = 0x80  # bytes from here on begin no text
_LIMITS = {"max_array_len": 1 << 20, "max_map_len": 1 << 20}
PARTIAL = (
    "events tell of stored blocks: prompts that were reused whole left none, the ends of prompts behind the last full "
    "block are unknown, and what follows directly on the blocks before counts as the same prompt"
)


@LOG_FORMATS.register("vllm_events")
def vllm_events() -> LogFormat:
    """A prompt is a chain of blocks that consecutive events extend; ranks, adapters and salts are kept apart."""
    return LogFormat(
        looks_for="a msgpack stream of [time, [BlockStored, …], rank]",
        recognises=_recognises,
        read=_read_entries,
        ids=Ids.CHAINED,
        block=_block_size,
    )


def _recognises(file: LogFile) -> bool:
    return any(name.encode() in file.head for name in _TYPES) and _PAYLOAD.search(file.head) is not None


class _Batch(NamedTuple):
    """One message of the server; `sequence` is its number in the stream, if the capture has it."""

    number: int
    content: Any
    topic: bytes = b""
    sequence: int | None = None


class _Event(NamedTuple):
    """A stored or cleared event of the batch `number`; blocks are hashes with their extra keys."""

    number: int
    at: float
    fields: Row
    identity: Identity


class _Counting:
    """Reader that counts the bytes that were read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.total = file, 0

    def read(self, size: int) -> bytes:
        """Read up to `size` bytes."""
        data = self._file.read(size)
        self.total += len(data)
        return data


def _messages(file: LogFile) -> Iterator[_Batch]:
    """Yield the messages of a capture; ValueError, naming the position, where it is damaged or ends in a message.

    A capture has the payloads end to end, or ZeroMQ's three frames: topic, number of 8 bytes,
    payload. The frames are lists of msgpack, or end to end too.
    """
    import msgpack

    with file.open() as opened:
        reader, frame_bytes = _Counting(opened), _frame_bytes(file.head)
        unpacker = msgpack.Unpacker(reader, strict_map_key=False, max_buffer_size=file.line_bytes, **_LIMITS)
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
                if left := reader.total - position:
                    raise ValueError(
                        f"log={file.path}: expected complete messages, but it ends within message {number}, which "
                        f"begins at byte {position:,}: {left:,} bytes are left over"
                    )
                return
            if frame_bytes:
                yield _Batch(number, content, frame[:-_SEQUENCE_BYTES], int.from_bytes(frame[-_SEQUENCE_BYTES:], "big"))
            elif batch := _unframed(content, number, file):
                yield batch


def _frame_bytes(head: bytes) -> int:
    """Return the bytes of topic and number before each payload; 0 if the capture has no such frames."""
    import msgpack

    for start in (match.start() for match in _PAYLOAD.finditer(head)) if head[0] < _FIRST_ARRAY else ():
        unpacker = msgpack.Unpacker(strict_map_key=False, **_LIMITS)
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


def _unframed(content: Any, number: int, file: LogFile) -> _Batch | None:
    """Return a batch, also out of a list of its three frames; None if the frames are damaged and skipped."""
    import msgpack

    if not (isinstance(content, list) and len(content) == 3 and isinstance(content[2], bytes)):
        return _Batch(number, content)
    topic, sequence, payload = content
    try:
        sequence = int.from_bytes(sequence, "big") if isinstance(sequence, bytes) else int(sequence)
        content = msgpack.unpackb(payload, strict_map_key=False, **_LIMITS)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        file.refuse(number, f"batch: expected topic, number and a payload of msgpack ({error})")
        return None
    return _Batch(number, content, topic if isinstance(topic, bytes) else str(topic).encode(), sequence)


class _Sequences:
    """Sequence numbers of messages, by topic and rank: lost and repeated messages."""

    def __init__(self) -> None:
        self._next: dict[tuple[bytes, Any], int] = {}
        self.gaps = self.lost = 0

    def is_new(self, batch: _Batch, rank: Any) -> bool:
        """Count a gap before a message, and return whether it is no repeated one; number 0 is a new start."""
        if batch.sequence is None:
            return True
        expected = self._next.get((batch.topic, rank), batch.sequence)
        if 0 < batch.sequence < expected:
            return False
        if batch.sequence > expected:
            self.gaps, self.lost = self.gaps + 1, self.lost + batch.sequence - expected
        self._next[batch.topic, rank] = batch.sequence + 1
        return True


def _stored(file: LogFile) -> Iterator[_Event]:
    """Yield the valid events of stored blocks on the device."""
    sequences = _Sequences()
    for batch in _messages(file):
        content = batch.content
        if not isinstance(content, list) or len(content) < 2 or not isinstance(content[1], list):
            file.refuse(batch.number, f"batch: expected [time, events, …]{actual(content)}")
            continue
        try:
            seconds = Row({"time": content[0]}).seconds("time")
            rank = Row({"data_parallel_rank": content[2] if len(content) > 2 else None})
            if seconds is None:
                raise BadFieldError("time", "seconds, not null")
            identity = identity_of(rank)
            events = [event for item in content[1] if (event := _stored_fields(item, file)) is not None]
            identities = [(*identity_of(event), *identity) for event in events]
        except BadFieldError as error:
            file.refuse(batch.number, str(error))
            continue
        except RecursionError:
            file.refuse(batch.number, "event: expected at most 250 levels")
            continue
        if not sequences.is_new(batch, identity):
            file.set_aside("messages that came twice")
            continue
        for event, of_event in zip(events, identities, strict=True):
            yield _Event(batch.number, seconds, event, of_event)
    if sequences.lost:
        file.notes.append(
            f"the capture lost {sequences.lost:,} messages, in {sequences.gaps:,} gaps of the sequence numbers: their "
            "blocks are missing"
        )


def _stored_fields(event: Any, file: LogFile) -> Row | None:
    """Return the fields of a stored block on the device, None for other events; BadFieldError for another form."""
    if isinstance(event, list):
        event = dict(zip(_FIELDS, event, strict=False))
    if not isinstance(event, dict) or not isinstance(event.get("type"), str):
        raise BadFieldError("event", f"a list or a map with the event's type{actual(event)}")
    if event["type"] != STORED:
        return None
    row = Row(event)
    medium = row.label("medium")
    if medium is not None and str(medium).upper() != "GPU":
        file.set_aside(f"events about blocks in other media ({medium})")
        return None
    hashes, extra = row.get("block_hashes"), row.get("extra_keys")
    if not isinstance(hashes, list) or not hashes or not all(map(_is_hash, hashes)):
        raise BadFieldError("block_hashes", f"a list of whole numbers of 64 bits, or of bytes{actual(hashes)}")
    parent = row.get("parent_block_hash")
    if parent is not None and (not _is_hash(parent) or parent in hashes):
        raise BadFieldError("parent_block_hash", f"the hash of another block, or null{actual(parent)}")
    if len(set(hashes)) < len(hashes):
        raise BadFieldError("block_hashes", f"different hashes{actual(hashes)}")
    if extra is not None and (not isinstance(extra, list) or len(extra) != len(hashes)):
        raise BadFieldError("extra_keys", f"one entry per block{actual(extra)}")
    row.count("block_size", least=1)
    if row.get("group_idx") is not None:
        row.count("group_idx")
    return row


def _is_hash(value: Any) -> bool:
    if isinstance(value, int):
        return not isinstance(value, bool) and -(1 << 63) <= value < 1 << 64
    return isinstance(value, (bytes, str)) and bool(value)


def _group(file: LogFile) -> int | None:
    """Return the cache group whose blocks are prompts: the first of full attention, or else the first one."""
    events = list(islice(_stored(file), _EVENTS_FOR_GROUP))
    full = [event for event in events if event.fields.get("kv_cache_spec_kind") in _FULL_ATTENTION]
    return next((event.fields.get("group_idx") for event in full or events), None)


def _block_size(file: LogFile) -> int | None:
    group = _group(file)
    sizes = (event.fields.count("block_size") for event in _stored(file) if event.fields.get("group_idx") == group)
    return next(sizes, None)


@dataclass
class _Cache:
    """Blocks of one cache identity: parent of each block, and the prompt that is being extended.

    `began`    number and time of the batch with which that prompt began; `size` is the tokens of its blocks
    `known`    last block by its hash
    `awaited`  parents that were not stored yet; `marked`: blocks with extra keys among themselves and their ancestors
    """

    identity: Identity
    began: tuple[int, float] = (0, 0.0)
    last: int | None = None
    size: int = 16
    parents: dict[int, int | None] = field(default_factory=dict)
    known: dict[Hashable, int] = field(default_factory=dict)
    awaited: set[int] = field(default_factory=set)
    marked: set[int] = field(default_factory=set)

    def extend(self, event: _Event) -> Entry | None:
        """Add the blocks of an event; return the prompt before it, if the event begins another one.

        Raises BadFieldError for a block that is among its own ancestors.
        """
        hashes, extra = event.fields.get("block_hashes"), event.fields.get("extra_keys") or []
        parent_hash = event.fields.get("parent_block_hash")
        parent = None if parent_hash is None else self.known.get(parent_hash, _block(parent_hash))
        blocks = self._blocks(hashes, extra, parent)
        if parent is not None and parent not in self.parents:
            self.awaited.add(parent)
        if self.awaited.intersection(blocks) and set(blocks).intersection(self._chain_to(parent)):
            raise BadFieldError("parent_block_hash", f"no block that follows on these{actual(parent_hash)}")
        self.awaited.difference_update(blocks)
        ended = self.entry() if parent is None or parent != self.last else None
        if parent is None or parent != self.last:
            self.began = event.number, event.at
        before = parent
        for name, block in zip(hashes, blocks, strict=True):
            self.parents.setdefault(block, before)
            self.known[name], before = block, block
        self.last, self.size = before, event.fields.count("block_size")
        return ended

    def _blocks(self, hashes: list[Any], extra_keys: list[Any], parent: int | None) -> list[int]:
        """Return blocks as numbers; extra keys, as of images, change a block and all that follow."""
        blocks = []
        for name, extra_key in zip_longest(hashes, extra_keys):
            block = _block(name)
            if extra_key or parent in self.marked:
                block = hash_name((name, extra_key, parent))
                self.marked.add(block)
            blocks.append(block)
            parent = block
        return blocks

    def entry(self) -> Entry | None:
        """Return the prompt that ends with the last block; None if there is none."""
        if self.last is None:
            return None
        chain, (line, time) = self._chain_to(self.last)[::-1], self.began
        lengths = np.full(len(chain), self.size, dtype=np.int64)
        return Entry(np.array(chain, dtype=np.int64), lengths, line, time, identity=self.identity)

    def starts_before(self, entry: Entry) -> bool:
        """Return whether the first block of a prompt was stored before the capture began."""
        return int(entry.keys[0]) not in self.parents

    def _chain_to(self, block: int | None) -> list[int]:
        """Return a block and its ancestors, the first one last."""
        chain: list[int] = []
        while block is not None:
            chain.append(block)
            block = self.parents.get(block)
        return chain


def _read_entries(file: LogFile) -> Iterator[Entry]:
    """Yield a prompt for each chain; a prompt ends if its last block is not the parent of its cache's next event.

    Prompts of several caches overlap in time: they are held, and sorted by their beginnings.
    """
    group, caches, entries = _group(file), dict[Identity, _Cache](), list[Entry]()
    file.start_over()
    file.notes.append(PARTIAL)
    for event in _stored(file):
        if event.fields.get("group_idx") != group:
            file.set_aside("events about blocks of other cache groups, which hold the same tokens again")
            continue
        cache = caches.setdefault(event.identity, _Cache(event.identity))
        try:
            entry = cache.extend(event)
        except BadFieldError as error:
            file.refuse(event.number, str(error))
            continue
        if entry is not None and len(caches) == 1:
            yield _counted(entry, cache, file)
        elif entry is not None:
            entries.append(_counted(entry, cache, file))
    entries += [_counted(entry, cache, file) for cache in caches.values() if (entry := cache.entry()) is not None]
    yield from sorted(entries, key=lambda entry: (entry.at, entry.line))


def _counted(entry: Entry, cache: _Cache, file: LogFile) -> Entry:
    if cache.starts_before(entry):
        file.set_aside("beginnings of prompts that were stored before the capture began, but for one block each")
    return entry


def _block(name: Any) -> int:
    """Return a block's hash as a number."""
    return name if isinstance(name, int) and abs(name) < 1 << 62 else hash_name(name)
