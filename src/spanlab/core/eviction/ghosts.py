"""Ghost lists: names of evicted entries, which are recognised when they are stored again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class GhostList:
    """Names of evicted entries, the oldest first, with the bytes of each."""

    def __init__(self) -> None:
        self._bytes_of = OrderedDict[bytes, int]()
        self.bytes = 0

    def __contains__(self, name: bytes) -> bool:
        return name in self._bytes_of

    def append(self, name: bytes, num_bytes: int) -> None:
        """Add an entry that has just been evicted."""
        self.discard(name)
        self._bytes_of[name] = num_bytes
        self.bytes += num_bytes

    def discard(self, name: bytes) -> None:
        """Remove an entry, if it is in the list."""
        self.bytes -= self._bytes_of.pop(name, 0)

    def shrink(self, max_bytes: int) -> None:
        """Remove the oldest entries until at most `max_bytes` remain."""
        while self._bytes_of and self.bytes > max_bytes:
            self.bytes -= self._bytes_of.popitem(last=False)[1]


class Names(Generic[T]):
    """Names of stored entries, computed while each is in the store."""

    def __init__(self, name: Callable[[T], bytes]) -> None:
        self._name = name
        self._names: dict[T, bytes] = {}

    def add(self, item: T) -> bytes:
        """Compute the name of a new entry."""
        self._names[item] = name = self._name(item)
        return name

    def split(self, upper: T, lower: T) -> None:
        """Give the upper node of a split edge the name of the edge, and the lower node a new one."""
        self._names[upper] = self._names[lower]
        self.add(lower)

    def pop(self, item: T) -> bytes:
        """Return and forget the name of a removed entry."""
        return self._names.pop(item)
