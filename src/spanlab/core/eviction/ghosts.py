"""What was evicted a while ago, known again by its name when it is stored a second time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class GhostList:
    """Names of evicted entries, the oldest first, with the bytes that each had."""

    def __init__(self) -> None:
        self._bytes_of = OrderedDict[bytes, int]()
        self.bytes = 0

    def __contains__(self, name: bytes) -> bool:
        return name in self._bytes_of

    def append(self, name: bytes, num_bytes: int) -> None:
        """Remember an entry that has just been evicted."""
        self.discard(name)
        self._bytes_of[name] = num_bytes
        self.bytes += num_bytes

    def discard(self, name: bytes) -> None:
        """Forget an entry, if it is there."""
        self.bytes -= self._bytes_of.pop(name, 0)

    def shrink(self, most: int) -> None:
        """Forget the oldest ones until no more than so many bytes are left."""
        while self._bytes_of and self.bytes > most:
            self.bytes -= self._bytes_of.popitem(last=False)[1]


class Names(Generic[T]):
    """Names of stored entries, taken while each is in the store."""

    def __init__(self, name: Callable[[T], bytes]) -> None:
        self._name = name
        self._names: dict[T, bytes] = {}

    def add(self, item: T) -> bytes:
        """Take the name of a new entry."""
        self._names[item] = name = self._name(item)
        return name

    def split(self, upper: T, lower: T) -> None:
        """The upper part of an entry starts where it did; the lower part has another name."""
        self._names[upper] = self._names[lower]
        self.add(lower)

    def pop(self, item: T) -> bytes:
        """The name of an entry that leaves."""
        return self._names.pop(item)
