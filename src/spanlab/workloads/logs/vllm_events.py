"""KV events of vLLM: a captured stream of msgpack batches of stored and removed blocks.

A stored block names its parent, so a chain of blocks gives the full blocks of a prompt. Reused blocks cause no event,
unless the server reports all blocks (`kv_cache_report_mode=full`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np

from spanlab.workloads.logs.formats import LOG_FORMATS
from spanlab.workloads.logs.log import Entry, Ids
from spanlab.workloads.logs.pieces import hash_name
from spanlab.workloads.logs.source import BadFieldError, LogFile, LogFormat, Row

STORED, CLEARED = "BlockStored", "AllBlocksCleared"
PARTIAL = (
    "events tell of stored blocks: prompts that were reused whole left none, the ends of prompts behind the last full "
    "block are unknown, and what follows directly on the blocks before counts as the same prompt"
)


@LOG_FORMATS.register("vllm_events")
def vllm_events() -> LogFormat:
    """A prompt is a chain of blocks that consecutive events extend."""
    return LogFormat(
        looks_for="a msgpack stream of [time, [[BlockStored, …]], …]",
        recognises=_recognises,
        read=_read_entries,
        ids=Ids.CHAINED,
        block=lambda file: next((int(event[4]) for _, event in _stored(file)), None),
    )


def _recognises(file: LogFile) -> bool:
    return STORED.encode() in file.head() and file.head()[:1] not in (b"{", b"[")


def _batches(file: LogFile) -> Iterator[list[Any]]:
    import msgpack

    with file.open() as opened:
        unpacker = msgpack.Unpacker(opened, raw=False, strict_map_key=False)
        for number in count(1):
            try:
                batch = next(unpacker)
            except StopIteration:
                return
            except (ValueError, TypeError, msgpack.UnpackException) as error:
                raise ValueError(
                    f"log={file.path}: expected msgpack throughout, not in batch {number} ({error})"
                ) from error
            if not isinstance(batch, list) or len(batch) < 2 or not isinstance(batch[1], list):
                file.refuse(number, "batch: expected [time, events, …]")
                continue
            yield [number, *batch[:2]]


def _stored(file: LogFile) -> Iterator[tuple[tuple[int, float], list[Any]]]:
    for number, time, events in _batches(file):
        try:
            seconds = Row({"time": time}).seconds("time")
            if seconds is None:
                raise BadFieldError("time", "seconds, not null")
            chosen = [event for event in events if _is_stored_or_cleared(event)]
        except BadFieldError as error:
            file.refuse(number, str(error))
            continue
        for event in chosen:
            yield (number, seconds), event


def _is_stored_or_cleared(event: Any) -> bool:
    """Return whether an event is of these types; raise BadFieldError for an event of another form."""
    if not isinstance(event, list):
        raise BadFieldError("event", f"a list, not {str(event)[:40]!r}")
    if not event or event[0] not in (STORED, CLEARED):
        return False
    if event[0] == STORED:
        if len(event) < 5 or not isinstance(event[1], list) or not event[1]:
            raise BadFieldError(
                STORED, f"[{STORED}, hashes, parent, token ids, block size, …], not {str(event)[:40]!r}"
            )
        Row({"block_size": event[4]}).count("block_size", least=1)
    return True


class _Chains:
    """Parent of each block, from which the chain to the prompt's start follows."""

    def __init__(self) -> None:
        self._parent: dict[int, int | None] = {}

    def add(self, blocks: list[int], parent: int | None) -> None:
        """Add consecutive blocks after `parent`; known blocks keep their parent."""
        for block in blocks:
            self._parent.setdefault(block, parent)
            parent = block

    def chain_to(self, block: int) -> list[int]:
        """Return the chain that ends with a block."""
        chain: list[int] = []
        current: int | None = block
        while current is not None and len(chain) <= len(self._parent):
            chain.append(current)
            current = self._parent.get(current)
        return chain[::-1]


def _read_entries(file: LogFile) -> Iterator[Entry]:
    """Yield a prompt for each chain; a prompt ends if its last block is not the parent of the next event."""
    file.notes.append(PARTIAL)
    chains, last, began, size = _Chains(), None, (0, 0.0), 16
    for position, event in _stored(file):
        if event[0] == CLEARED:
            continue
        blocks = [_block(name) for name in event[1]]
        parent = None if event[2] is None else _block(event[2])
        if last is not None and parent != last:
            yield _entry(chains.chain_to(last), size, began)
        if parent is None or parent != last:
            began = position
        chains.add(blocks, parent)
        last, size = blocks[-1], int(event[4])
    if last is not None:
        yield _entry(chains.chain_to(last), size, began)


def _block(name: Any) -> int:
    """Return a block's hash as a number; vLLM writes integers or bytes."""
    return name if isinstance(name, int) and abs(name) < 1 << 62 else hash_name(name)


def _entry(chain: list[int], size: int, position: tuple[int, float]) -> Entry:
    line, time = position
    return Entry(np.array(chain, dtype=np.int64), np.full(len(chain), size, dtype=np.int64), line, time)
