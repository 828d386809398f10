"""How stored keys are read: which rotation they carry, where they count as standing, which form of the kernel reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from spanlab.core.cache_spans import CacheSpan

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class KeyLayout:
    """The engine's half of a reuse method; the policy's half is its layout and its repair.

    `keys`         what a span's stored keys are rotated by: raw nothing, local their place in the span, absolute their
                   position in the prompt that they were computed in
    `positions`    sequential: a span counts as standing where it stands; overlapping: all begin behind the opening
                   text, and what follows them begins behind the longest; original: where it was first computed
    `form`         of the attention kernel: rotate_keys, rotate_queries or pre_rotated (`spanlab_kernels.attention`)
    `copies`       a request reads its own copies of spans; pre-rotated they are rotated while they are copied
    `temperature`, `scale`  APE's T and S (arXiv 2502.05431): scores of spans are divided by T, and the spans' share of
                   the softmax is exp(S · T · lse); 1 and 1 change nothing
    """

    keys: Literal["raw", "local", "absolute"] = "absolute"
    positions: Literal["sequential", "overlapping", "original"] = "sequential"
    form: Literal["rotate_keys", "rotate_queries", "pre_rotated"] = "pre_rotated"
    copies: bool = False
    temperature: float = 1.0
    scale: float = 1.0

    @property
    def reweighs(self) -> bool:
        """Whether attention to spans is changed at all."""
        return (self.temperature, self.scale) != (1.0, 1.0)

    @property
    def rotates_copies(self) -> bool:
        """Whether copied keys are rotated to where they stand now."""
        return self.copies and self.form == "pre_rotated"

    def rotation(self, cache_span: CacheSpan, base: int, rows: Indices) -> Indices:
        """What keys carry when they are computed and stored: those at `rows` of a cache span at position `base`.

        Ordered text is rotated to its position at once: nobody reads it at another one.
        """
        if self.keys == "raw":
            return np.zeros_like(rows)
        return rows if self.keys == "local" and cache_span.independent else base + rows


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
