"""The warm-up of an engine study: every arm serves a few requests before the first one is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from spanlab.core.request import Request

_LATER_NS = 3_600 * 10**9  # between the waves: idle time, which the clock of a warm-up skips

_ROWS = (2, 4, 8, 16, 32, 64)  # more fill the largest tile

Serve = Callable[[str, list[Request]], object]


def warm_up(arms: Iterable[str], requests: Sequence[Request], serve: Serve) -> None:
    """Let each arm serve a few requests from an empty cache, uncounted and unlogged.

    This loads code, starts thread pools, touches memory, and on a card compiles kernels and chooses algorithms: else
    the first arm, mostly the baseline, would pay for all. `serve` must leave no record and no cache.
    """
    asked = warm_requests(requests)
    for arm in arms:
        serve(arm, asked)


def warm_requests(requests: Sequence[Request]) -> list[Request]:
    """The first, the shortest and the longest request at once, all of them again when they are stored, and short ends.

    The ends are the last 2, 4, … tokens of the longest request, one prompt after the other: kernels have tiles for as
    many rows as a prefill leaves to compute, and each size is compiled by itself.
    """
    by_length = sorted(requests, key=lambda request: request.num_tokens)
    few = list({request.id: request for request in (requests[0], by_length[0], by_length[-1])}.values())
    waves = [few, few, *([end] for end in _short_ends(by_length[-1]))]
    asked = [(wave, request) for wave, together in enumerate(waves) for request in together]
    return [replace(request, id=at, arrived_at=wave * _LATER_NS) for at, (wave, request) in enumerate(asked)]


def _short_ends(request: Request) -> list[Request]:
    """A request with powers of two of its last tokens in place of the last span: what is stored begins otherwise."""
    *before, last = request.spans
    sizes = [size for size in _ROWS if size < len(last.tokens)]
    ends = [replace(last, tokens=last.tokens[-size:]) for size in sizes]
    return [replace(request, spans=(*before, end), output_len=1) for end in ends]
