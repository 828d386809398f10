"""How stored keys are read: what rotation they carry, and where they count as standing."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from spanlab.core.cache_spans import CacheSpan
from spanlab.core.spans import SpanSettings

Indices = NDArray[np.int64]


def carried_rotation(key_layout: SpanSettings, cache_span: CacheSpan, base: int | Indices, rows: Indices) -> Indices:
    """What keys carry when they are computed and stored: those at `rows` of a cache span at position `base`.

    Ordered text is rotated to its position at once: nobody reads it at another one.
    """
    if key_layout.keys == "raw":
        return np.zeros_like(rows)
    return rows if key_layout.keys == "local" and cache_span.independent else base + rows


def bases(cache_spans: tuple[CacheSpan, ...], overlapping: bool) -> list[int]:
    """The position of each cache span's first token."""
    if not overlapping:
        return [cache_span.start for cache_span in cache_spans]
    head = next((cache_span.start for cache_span in cache_spans if cache_span.independent), 0)
    spans = [cache_span.stop - cache_span.start for cache_span in cache_spans if cache_span.independent]
    position, found = head + max(spans, default=0), []
    for cache_span in cache_spans:
        if cache_span.independent:
            found.append(head)
        elif cache_span.start < head or not spans:
            found.append(cache_span.start)
        else:
            found.append(position)
            position += cache_span.stop - cache_span.start
    return found
