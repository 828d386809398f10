"""Warm-up of an engine study: every arm serves a few requests before the first measurement.

This loads code, starts thread pools, touches memory, and on a card compiles kernels and chooses algorithms. Without it,
the first arm, usually the baseline, would include this time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from spanlab.core.request import Request

_WAVE_NS = 3_600 * 10**9  # idle time between waves, which the clock of a warm-up skips

_ROWS = (2, 4, 8, 16, 32, 64)  # more rows fill the largest tile


def warm_requests(requests: Sequence[Request]) -> list[Request]:
    """Return waves of requests: the first, shortest and longest request together, the same again, and short suffixes.

    The second wave reuses the stored prompts of the first. The suffixes are the last 2, 4, … tokens of the longest
    request, one prompt per wave: kernels have tiles for the number of rows that a prefill computes, and each size is
    compiled separately.
    """
    by_length = sorted(requests, key=lambda request: request.num_tokens)
    selected = list({request.id: request for request in (requests[0], by_length[0], by_length[-1])}.values())
    waves = [selected, selected, *([suffix] for suffix in _short_suffixes(by_length[-1]))]
    numbered = [(wave, request) for wave, together in enumerate(waves) for request in together]
    return [replace(request, id=index, arrived_at=wave * _WAVE_NS) for index, (wave, request) in enumerate(numbered)]


def _short_suffixes(request: Request) -> list[Request]:
    """Replace the last span by its last 2, 4, … tokens, which do not match the start of the stored span."""
    *before, last = request.spans
    sizes = [size for size in _ROWS if size < len(last.tokens)]
    ends = [replace(last, tokens=last.tokens[-size:]) for size in sizes]
    return [replace(request, spans=(*before, end), output_len=1) for end in ends]
