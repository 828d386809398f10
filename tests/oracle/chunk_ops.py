"""Random operations on any cache policy of vLLM's interface; imports neither vLLM nor spanlab."""

from __future__ import annotations

import random
from typing import Any


class Chunk:
    """As vLLM's record: -1 while it is written."""

    def __init__(self) -> None:
        self.ref_cnt = -1


class Request:
    """Chunks of a prompt, in order."""

    def __init__(self, keys: list[bytes]) -> None:
        self._ends = {key: 16 * (at + 1) for at, key in enumerate(keys)}

    def get_offload_key_position(self, key: bytes) -> int | None:
        return self._ends.get(key)


def key_of(number: int) -> bytes:
    """36 bytes, as vLLM's SHA-256 of a chain and the number of a group of layers."""
    return number.to_bytes(32, "big") + bytes(4)


class Replay:
    """Requests that read and write chunks of one policy, under its capacity."""

    def __init__(self, policy: Any, capacity: int, seed: int) -> None:
        self.policy, self.capacity, self.draw = policy, capacity, random.Random(seed)
        self.stored: dict[bytes, Chunk] = {}
        self.readers: list[list[bytes]] = []
        self.writers: list[list[bytes]] = []
        self.log: list[list[int] | None] = []

    def run(self, steps: int) -> list[list[int] | None]:
        """Numbers of the chunks that each eviction took; None where it was refused."""
        for _ in range(steps):
            kind = self.draw.choice(("prompt", "prompt", "read", "write", "fail"))
            getattr(self, kind)()
            assert len(self.stored) <= self.capacity
            assert all(self.policy.get(key) is chunk for key, chunk in self.stored.items())
        return self.log

    def prompt(self) -> None:
        """Read the stored beginning of a prompt, evict for the rest, store it, and end."""
        document, count = self.draw.randrange(12), self.draw.randint(1, max(1, self.capacity // 2))
        keys = [key_of(100 * document + at) for at in range(count)]
        known = [key for key in keys if key in self.stored and self.stored[key].ref_cnt >= 0]
        missing = [key for key in keys if key not in self.stored]
        if self.draw.random() < 0.5:
            self._pin(known)
        if not self._room(len(missing), set(keys)):
            return
        for key in missing:
            self.stored[key] = Chunk()
            self.policy.insert(key, self.stored[key])
        self.writers.append(missing)
        self.policy.on_request_finished([keys], set(missing), set(known), Request(keys))

    def _room(self, count: int, protected: set[bytes]) -> bool:
        more = count - (self.capacity - len(self.stored))
        if more <= 0:
            return True
        gone = self.policy.evict(more, protected)
        self.log.append(None if gone is None else [int.from_bytes(key[:32], "big") for key, _ in gone])
        for key, chunk in gone or ():
            assert chunk is self.stored.pop(key)
            assert chunk.ref_cnt == 0
            assert key not in protected
        return gone is not None

    def _pin(self, keys: list[bytes]) -> None:
        for key in keys:
            if self.stored[key].ref_cnt == 0:
                self.policy.mark_non_evictable(key)
            self.stored[key].ref_cnt += 1
        self.readers.append(keys)

    def read(self) -> None:
        """The oldest reader has finished."""
        for key in self.readers.pop(0) if self.readers else ():
            self.stored[key].ref_cnt -= 1
            if self.stored[key].ref_cnt == 0:
                self.policy.mark_evictable(key)

    def write(self) -> None:
        """The oldest writer has finished."""
        for key in self.writers.pop(0) if self.writers else ():
            self.stored[key].ref_cnt = 0
            self.policy.mark_evictable(key)

    def fail(self) -> None:
        """The newest writer could not write."""
        if self.draw.random() < 0.2 and self.writers:
            for key in self.writers.pop():
                self.policy.remove(key)
                del self.stored[key]
