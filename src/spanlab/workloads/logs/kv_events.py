"""KV events of vLLM or SGLang: their fields as lists or maps, lost messages, and why blocks were
computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from spanlab.workloads.logs.log import Identity
from spanlab.workloads.logs.rows import BadFieldError, Row, actual, identity_of

# ------------------------------------------------------------------------------
# One batch of events, as lists or as maps, and the stored blocks of a prompt.
# ------------------------------------------------------------------------------

STORED, REMOVED, CLEARED = "BlockStored", "BlockRemoved", "AllBlocksCleared"
TYPES = (STORED, REMOVED, CLEARED)
#: Fields in their order where an event is a list; newer servers send maps.
_FIELDS = (
    *(
        "type",
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
    ),
    *(
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
        "kv_cache_spec_sliding_window",
        "locality",
        "ownership",
    ),
    "session_id",
)
_REMOVED_FIELDS = ("type", "block_hashes", "medium", "group_idx", "locality", "ownership")
FULL_ATTENTION = ("full_attention", "sink_full_attention", "mla_attention")
LIMITS = {"max_array_len": 1 << 20, "max_map_len": 1 << 20}
#: First record of a capture by `watch`: a map. The others are [topic, number, payload, time], or
#: {METRICS: …}.
MARK, METRICS = "spanlab_capture", "metrics"
QUERIES, HITS = "prefix_cache_queries", "prefix_cache_hits"


class Event(NamedTuple):
    """A checked event about blocks on the device, and what its server caches apart.

    `rank`      the data-parallel rank; each has its own cache
    `identity`  the rank with the adapter and salt of the blocks
    """

    kind: str
    fields: Row
    rank: Identity
    identity: Identity

    @property
    def group(self) -> int | None:
        """The cache group of the blocks; a hybrid model stores a prompt once in each of them."""
        group: int | None = self.fields.get("group_idx")
        return group


class Batch(NamedTuple):
    """The events of one message: `at` is the server's time in seconds."""

    at: float
    rank: Identity
    events: list[Event]


def unpacked(payload: bytes) -> Any:
    """Return the content of a payload; ValueError for anything but msgpack."""
    import msgpack

    try:
        return msgpack.unpackb(payload, strict_map_key=False, **LIMITS)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise ValueError(
            f"batch: expected topic, number and a payload of msgpack ({error})"
        ) from error


def read_batch(content: Any, leave: Callable[[str], object]) -> Batch:
    """Return the batch in a payload; BadFieldError names the field of another form.

    `leave`  is called with the plural name of each event that says nothing about blocks on the
             device
    """
    if not isinstance(content, list) or len(content) < 2 or not isinstance(content[1], list):
        raise BadFieldError("batch", f"[time, events, …]{actual(content)}")
    seconds = Row({"time": content[0]}).seconds("time")
    if seconds is None:
        raise BadFieldError("time", "seconds, not null")
    rank = identity_of(Row({"data_parallel_rank": content[2] if len(content) > 2 else None}))
    try:
        rows = [row for item in content[1] if (row := _fields_of(item, leave)) is not None]
        return Batch(
            seconds,
            rank,
            [Event(row.get("type"), row, rank, (*identity_of(row), *rank)) for row in rows],
        )
    except RecursionError as error:
        raise BadFieldError("event", "at most 250 levels") from error


def _fields_of(event: Any, leave: Callable[[str], object]) -> Row | None:
    """Return the fields of an event on the device, None for other events; BadFieldError for another
    form."""
    if isinstance(event, list):
        event = dict(
            zip(_REMOVED_FIELDS if event[:1] == [REMOVED] else _FIELDS, event, strict=False)
        )
    if not isinstance(event, dict) or not isinstance(event.get("type"), str):
        raise BadFieldError("event", f"a list or a map with the event's type{actual(event)}")
    row = Row(event)
    if event["type"] not in TYPES:
        leave(f"events of another type ({event['type'][:40]})")
        return None
    medium = row.label("medium")
    if medium is not None and str(medium).upper() != "GPU":
        leave(f"events about blocks in other media ({medium})")
        return None
    if event["type"] == CLEARED:
        return row
    hashes = row.get("block_hashes")
    if not isinstance(hashes, list) or not hashes or not all(map(_is_hash, hashes)):
        raise BadFieldError(
            "block_hashes", f"a list of whole numbers of 64 bits, or of bytes{actual(hashes)}"
        )
    if row.get("group_idx") is not None:
        row.count("group_idx")
    if event["type"] != STORED:
        return row
    parent, extra = row.get("parent_block_hash"), row.get("extra_keys")
    if parent is not None and (not _is_hash(parent) or parent in hashes):
        raise BadFieldError(
            "parent_block_hash", f"the hash of another block, or null{actual(parent)}"
        )
    if len(set(hashes)) < len(hashes):
        raise BadFieldError("block_hashes", f"different hashes{actual(hashes)}")
    if extra is not None and (not isinstance(extra, list) or len(extra) != len(hashes)):
        raise BadFieldError("extra_keys", f"one entry per block{actual(extra)}")
    row.count("block_size", least=1)
    row.label("session_id")
    if row.get("token_ids") is not None:
        row.counts("token_ids")
    return row


def _is_hash(value: Any) -> bool:
    if isinstance(value, int):
        return not isinstance(value, bool) and -(1 << 63) <= value < 1 << 64
    return isinstance(value, (bytes, str)) and bool(value)


# ------------------------------------------------------------------------------
# Why a server computed a block that it stored.
# ------------------------------------------------------------------------------

EVICTED, EMPTIED, PRESENT = "evicted", "cleared", "present"
#: Causes for which a block was computed, by what the stream has told before.
BLOCK_CAUSES = {
    "new": "never stored before",
    "other_position": "stored before behind another prefix",
    "other_cache": "stored before by another rank, adapter or salt",
    EVICTED: "stored before and evicted",
    EMPTIED: "stored before and lost when the cache was emptied",
    PRESENT: "in the cache already, such as for a request of the same step",
}
# what a cache keeps apart: identity, and salts among the extra keys
Owner = tuple[Identity, frozenset[str]]
_MULTIPLIERS = np.array(
    [0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB], dtype=np.uint64
)


@dataclass(slots=True)
class _Block:
    """What is known of a hash: copies in the cache, why the last one left, and its tokens with
    those before it."""

    chain: int
    owner: Owner
    copies: int = 0
    left: str = EVICTED
    step: int = 0


@dataclass
class BlockStream:
    """Stored blocks of one cache group by the cause for which they were computed; takes all events
    in order.

    `blocks`, `tokens`  of stored blocks, by cause
    `elsewhere`         tokens of new blocks of prompts that were stored before at another position;
                        windows of a block
    `answers`           tokens of blocks that are taken for those of answers, by cause: single
                        blocks at a prompt's end
    `reused`            tokens that the server reports as reused
    `present`           blocks that the cache has, of those whose events were seen
    """

    blocks: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    elsewhere: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    reused: int = 0
    removed: int = 0
    present: int = 0
    _caches: dict[Identity, dict[Hashable, _Block]] = field(default_factory=dict)
    # by the tokens from the first one on: who stored them
    _owners: dict[int, Owner] = field(default_factory=dict)
    _contents: dict[Owner, set[int]] = field(default_factory=dict)
    _ends: set[tuple[Identity, Hashable]] = field(default_factory=set)  # last blocks of prompts
    _step: int = 0

    def begin_batch(self) -> None:
        """Count a batch: blocks that were stored in the same one cannot have been found."""
        self._step += 1

    def add(self, event: Event) -> bool:
        """Count the blocks of an event; return whether they were only reported, for the cache had
        them before."""
        cache = self._caches.setdefault(event.rank, {})
        if event.kind == STORED:
            return self._add_stored(event, cache)
        if event.kind == CLEARED:
            self._empty(cache)
            return False
        for name in event.fields.get("block_hashes"):
            block = cache.setdefault(name, _Block(hash(name), (event.rank, frozenset())))
            self.removed += 1
            self.present -= block.copies == 1
            block.copies, block.left = max(block.copies - 1, 0), EVICTED
        return False

    def restart(self) -> None:
        """Forget what the caches have, since the server has started anew."""
        for cache in self._caches.values():
            self._empty(cache)

    def _empty(self, cache: dict[Hashable, _Block]) -> None:
        for block in cache.values():
            if block.copies:
                self.present -= 1
                block.copies, block.left = 0, EMPTIED

    def _add_stored(self, event: Event, cache: dict[Hashable, _Block]) -> bool:
        hashes, size = event.fields.get("block_hashes"), event.fields.count("block_size")
        blocks = [cache.get(name) for name in hashes]
        parent = event.fields.get("parent_block_hash")
        if parent is None and all(
            block and block.copies and block.step < self._step for block in blocks
        ):
            self.reused += size * len(hashes)
            return True
        is_answer = len(hashes) == 1 and (event.rank, parent) in self._ends
        self._ends.discard((event.rank, parent))
        self._ends.add((event.rank, hashes[-1]))
        for name, old, new, again in zip(
            hashes, blocks, *self._described(event, cache.get(parent)), strict=True
        ):
            if old is not None:
                cause = PRESENT if old.copies else old.left
                new.copies = old.copies
            elif self._owners.setdefault(new.chain, new.owner) != new.owner:
                cause = "other_cache"
            else:
                cause = "other_position" if 2 * again > size else "new"
                self.elsewhere += 0 if is_answer else again
            self.blocks[cause] += 1
            self.tokens[cause] += size
            self.answers[cause] += size * is_answer
            self.present += not new.copies
            new.copies, new.step = new.copies + 1, self._step
            cache[name] = new
        return False

    def _described(self, event: Event, parent: _Block | None) -> tuple[list[_Block], list[int]]:
        """Return the blocks of an event with their chains, and their tokens that were stored at
        another position."""
        hashes, size = event.fields.get("block_hashes"), event.fields.count("block_size")
        tokens = np.array(event.fields.get("token_ids") or (), dtype=np.int64)
        complete = len(tokens) == size * len(hashes)
        chain = parent.chain if parent else hash((event.fields.get("parent_block_hash"),))
        salts = parent.owner[1] if parent else frozenset()
        blocks, has_media = [], False
        for index, (name, keys) in enumerate(
            zip_longest(hashes, event.fields.get("extra_keys") or ())
        ):
            keys = keys if isinstance(keys, (list, tuple)) else [] if keys is None else [keys]
            # adapters and salts are texts, and others stand for media
            media = [key for key in keys if not isinstance(key, str)]
            salts |= {key for key in keys if isinstance(key, str)}
            has_media |= bool(media)
            content = tokens[index * size : (index + 1) * size].tobytes() if complete else name
            chain = hash((chain, content, repr(media) if media else ""))
            blocks.append(_Block(chain, (event.identity, salts)))
        if not complete or has_media:
            return blocks, [0] * len(blocks)
        # the tokens of each block that are in stored blocks, at any position
        contents = self._contents.setdefault(blocks[-1].owner, set())
        windows = _window_hashes(tokens, size).tolist()
        repeated, position = np.zeros(len(tokens), dtype=bool), 0
        while position < len(windows):
            if windows[position] in contents:
                repeated[position : position + size] = True
                position += size
            else:
                position += 1
        contents.update(windows[::size])
        return blocks, [int(each) for each in repeated.reshape(-1, size).sum(axis=1)]


def _window_hashes(tokens: Any, size: int) -> Any:
    """Hash every run of `size` tokens to 64 bits, which wrap around."""
    spread, first, second = _MULTIPLIERS
    mixed = (tokens.astype(np.uint64) + spread) * first
    mixed = (mixed ^ (mixed >> np.uint64(29))) * second
    powers = np.cumprod(np.full(size, spread, dtype=np.uint64))
    return sliding_window_view(mixed, size) @ powers


def causes_line(blocks: Mapping[str, int]) -> str:
    """Return the stored blocks by cause in one clause."""
    return ", ".join(
        f"{blocks[cause]:,} {text}" for cause, text in BLOCK_CAUSES.items() if blocks[cause]
    )


# ------------------------------------------------------------------------------
# Numbers of messages: which are missing, and which came twice.
# ------------------------------------------------------------------------------


class Sequences:
    """Sequence numbers of messages, by topic and rank: lost and repeated messages.

    `gaps`, `lost`  gaps between messages, and messages that are missing in them
    `before`        messages of the server before the first one
    """

    def __init__(self) -> None:
        self._next: dict[tuple[bytes, Any], int] = {}
        self.gaps = self.lost = self.before = 0
        self.restarted = False

    def expected(self, topic: bytes, rank: Any) -> int | None:
        """Return the number of the next message; None before the first one."""
        return self._next.get((topic, rank))

    def gap(self, topic: bytes, rank: Any, sequence: int) -> int:
        """Return how many messages are missing before this one."""
        return max(sequence - self._next.get((topic, rank), sequence), 0)

    def is_new(self, topic: bytes, rank: Any, sequence: int | None) -> bool:
        """Count a gap before a message, and return whether it is no repeated one; number 0 is a new
        start."""
        if sequence is None:
            return True
        key = topic, rank
        self.restarted = sequence == 0 and self._next.get(key, 0) > 0
        if 0 < sequence < self._next.get(key, 0):
            return False
        if missing := self.gap(topic, rank, sequence):
            self.gaps, self.lost = self.gaps + 1, self.lost + missing
        if key not in self._next:
            self.before += sequence
        self._next[key] = sequence + 1
        return True
