"""Memory limits of a store."""

from __future__ import annotations

from dataclasses import dataclass

UNLIMITED = 1 << 62


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of a store, running requests included: bytes of KV, of states, of both together, and entries.

    An entry is a stored sequence that no other stored sequence extends, that is, a leaf.
    """

    kv_bytes: int = UNLIMITED
    state_bytes: int = UNLIMITED
    total_bytes: int = UNLIMITED
    entries: int = UNLIMITED

    def times(self, count: int) -> Budget:
        """Return the budget of `count` such stores together."""
        limits = (self.kv_bytes, self.state_bytes, self.total_bytes, self.entries)
        return Budget(*(limit if limit >= UNLIMITED else count * limit for limit in limits))
