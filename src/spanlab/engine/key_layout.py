"""Key layout: rotation of stored keys, and positions of cache spans."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from spanlab.core.cache_spans import CacheSpan
from spanlab.core.spans import SpanSettings

Indices = NDArray[np.int64]


def carried_rotation(key_layout: SpanSettings, cache_span: CacheSpan, base: int | Indices, rows: Indices) -> Indices:
    """Rotation of stored keys, in positions, for tokens `rows` of a cache span at position `base`.

    Ordered text is stored at its position, because it is never read at another one.
    """
    if key_layout.keys == "raw":
        return np.zeros_like(rows)
    return rows if key_layout.keys == "local" and cache_span.independent else base + rows


def bases(cache_spans: tuple[CacheSpan, ...], overlapping: bool) -> list[int]:
    """Position of each cache span's first token."""
    if not overlapping:
        return [cache_span.start for cache_span in cache_spans]
    head = next((cache_span.start for cache_span in cache_spans if cache_span.independent), 0)
    spans = [cache_span.stop - cache_span.start for cache_span in cache_spans if cache_span.independent]
    position, positions = head + max(spans, default=0), []
    for cache_span in cache_spans:
        if cache_span.independent:
            positions.append(head)
        elif cache_span.start < head or not spans:
            positions.append(cache_span.start)
        else:
            positions.append(position)
            position += cache_span.stop - cache_span.start
    return positions
