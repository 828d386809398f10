"""A doubly linked list of entries, oldest first, with the sum of their bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Chain(Generic[T]):
    """A linked list of entries, the oldest first; None is the sentinel before the oldest and after the newest.

    `bytes`  the sum of `num_bytes` of all entries; the two nodes of a split edge have the bytes of the edge
    """

    def __init__(self, num_bytes: Callable[[T], int]) -> None:
        self._num_bytes = num_bytes
        self._newer: dict[T | None, T | None] = {None: None}
        self._older: dict[T | None, T | None] = {None: None}
        self.bytes = 0

    def __contains__(self, item: T) -> bool:
        return item in self._newer

    def __iter__(self) -> Iterator[T]:
        item = self._newer[None]
        while item is not None:
            following = self._newer[item]  # the caller may move or remove `item`
            yield item
            item = following

    def newer(self, item: T | None) -> T | None:
        """The next younger entry; the oldest one for None."""
        return self._newer[item]

    def append(self, item: T) -> None:
        """Add an entry at the newest end."""
        self._link(item, None)
        self.bytes += self._num_bytes(item)

    def split(self, upper: T, lower: T) -> None:
        """Insert the upper node of a split edge right after the lower one, which is evicted first."""
        self._link(upper, self._newer[lower])

    def remove(self, item: T) -> None:
        """Remove an entry."""
        self._unlink(item)
        self.bytes -= self._num_bytes(item)

    def renew(self, item: T) -> None:
        """Move an entry to the newest end."""
        self._unlink(item)
        self._link(item, None)

    def first(self, condition: Callable[[T], bool]) -> T | None:
        """The oldest entry that meets a condition; None without one."""
        return next((item for item in self if condition(item)), None)

    def _link(self, item: T, newer: T | None) -> None:
        older = self._older[newer]
        self._newer[older], self._older[item] = item, older
        self._newer[item], self._older[newer] = newer, item

    def _unlink(self, item: T) -> None:
        older, newer = self._older.pop(item), self._newer.pop(item)
        self._newer[older], self._older[newer] = newer, older
