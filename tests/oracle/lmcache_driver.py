"""Replays prompts on LMCache's own store of chunks in host memory; its memory objects hold nothing.

usage: PYTHON_OF_THE_ORACLE lmcache_driver.py FIRST STOP OUT.json

Lookup, ages, storing and eviction are LMCache's: `LocalCPUBackend` with its LRU, called as its engine calls it.
"""

from __future__ import annotations

import json
import sys
from hashlib import sha256
from pathlib import Path

from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

sys.path.insert(0, str(Path(__file__).parent))
from chunk_prompts import SIZE, make_case, tokens_of


class Memory:
    """Room for one chunk, given back with its last reference."""

    def __init__(self, allocator: Allocator) -> None:
        self._allocator, self._references, self._pins = allocator, 1, 0

    @property
    def is_pinned(self) -> bool:
        return self._pins > 0

    @property
    def can_evict(self) -> bool:
        return not self._pins and self._references == 1

    def pin(self) -> None:
        self._pins += 1

    def unpin(self) -> None:
        self._pins -= 1

    def ref_count_up(self) -> None:
        self._references += 1

    def ref_count_down(self) -> None:
        self._references -= 1
        self._allocator.free += self._references == 0


class Allocator:
    """Room for so many chunks."""

    def __init__(self, capacity: int) -> None:
        self.free = capacity

    def allocate(self, *shape: object) -> Memory | None:
        if not self.free:
            return None
        self.free -= 1
        return Memory(self)


def replay(case: dict) -> dict:
    """Chunks found by each prompt, and what is stored at the end, the first to leave first.

    A chunk is named after the prompt and the place where it was first asked for.
    """
    config = LMCacheEngineConfig.from_defaults(chunk_size=SIZE, cache_policy="LRU")
    backend = LocalCPUBackend(config, memory_allocator=Allocator(case["capacity"]), dst_device="cpu")
    names: dict[str, list[int]] = {}
    hits = []
    for number, runs in enumerate(case["prompts"]):
        keys = keys_of(tokens_of(runs))
        for at, key in enumerate(keys):
            names.setdefault(key, [number, at])
        hits.append(serve(backend, keys))
    return {"hits": hits, "stored": [names[key] for key in backend.hot_cache]}


def keys_of(tokens: list[int]) -> list[str]:
    """One key per full chunk, of all tokens up to its end."""
    ends = range(SIZE, len(tokens) + 1, SIZE)
    return [sha256(json.dumps(tokens[:end]).encode()).hexdigest() for end in ends]


def serve(backend: LocalCPUBackend, keys: list[str]) -> int:
    """Look up and pin, touch, load and unpin, then store the missing chunks."""
    found = backend.batched_contains(keys, pin=True)
    backend.touch_cache()
    for key in keys[:found]:
        backend.unpin(key)
    objects = [backend.allocate([], [], busy_loop=False) for _ in keys[found:]]
    assert all(objects)
    backend.batched_submit_put_task(keys[found:], objects)
    for one in objects:
        one.ref_count_down()
    return found


if __name__ == "__main__":
    first, stop, out = sys.argv[1:]
    told = {str(seed): replay(make_case(seed)) for seed in range(int(first), int(stop))}
    Path(out).write_text(json.dumps(told))
