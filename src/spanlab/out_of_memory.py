"""Running out of memory: our own error for it, and which errors of others mean the same."""

from __future__ import annotations


class OutOfMemoryError(ValueError):
    """A pool that was made before a run has less left than a step asks of it."""


#: What to catch where memory may run out; `out_of_memory` says whether it did.
CAUGHT = (MemoryError, RuntimeError, OutOfMemoryError)

# torch has a class of its own for a card alone, and the simulator's environment has no torch to name it.
_WORDS = (
    "out of memory",
    "not enough memory",
    "can't allocate memory",
    "cannot allocate memory",
    "alloc_failed",
    "can't start new thread",  # its stack has no room
)


def out_of_memory(error: BaseException) -> str | None:
    """What an error says, in one line, if it means that memory ran out; None if it means anything else."""
    said = " ".join(str(error).split())
    meant = isinstance(error, (MemoryError, OutOfMemoryError)) or any(word in said.lower() for word in _WORDS)
    # allocators go on with advice about their settings
    return "; ".join(said.rstrip(".").split(". ")[:2]) or "no more memory" if meant else None
