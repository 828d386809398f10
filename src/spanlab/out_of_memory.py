"""The error of an exhausted pool, and recognition of out-of-memory errors of libraries."""

from __future__ import annotations


class OutOfMemoryError(ValueError):
    """A preallocated pool has fewer free pages or slots than a step needs."""


#: Exceptions to catch where memory may run out; `out_of_memory` tells them from other errors.
CAUGHT = (MemoryError, RuntimeError, ImportError, OutOfMemoryError)

# torch has an error class for GPU memory only, and the simulator's environment cannot import it.
_PHRASES = (
    "out of memory",
    "not enough memory",
    "can't allocate memory",
    "cannot allocate memory",
    "alloc_failed",
    "can't start new thread",  # its stack has no room
    "failed to map segment",  # of a shared library
)


def out_of_memory(error: BaseException) -> str | None:
    """Return the message of an out-of-memory error in one line; None for any other error."""
    text = " ".join(str(error).split())
    if not isinstance(error, (MemoryError, OutOfMemoryError)) and not any(
        phrase in text.lower() for phrase in _PHRASES
    ):
        return None
    # the first two sentences: allocators append advice about their settings
    return "; ".join(text.rstrip(".").split(". ")[:2]) or "no more memory"
