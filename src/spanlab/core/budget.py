"""What a store may hold."""

from __future__ import annotations

from dataclasses import dataclass

UNLIMITED = 1 << 62


@dataclass(frozen=True, slots=True)
class Budget:
    """What the store may hold, running requests included: bytes of KV, of states, of both together, and entries.

    An entry is a stored sequence that no other stored sequence extends, that is, a leaf.
    """

    kv_bytes: int = UNLIMITED
    state_bytes: int = UNLIMITED
    total_bytes: int = UNLIMITED
    entries: int = UNLIMITED

    def times(self, count: int) -> Budget:
        """The budget of so many stores together."""
        limits = (self.kv_bytes, self.state_bytes, self.total_bytes, self.entries)
        return Budget(*(limit if limit >= UNLIMITED else count * limit for limit in limits))
