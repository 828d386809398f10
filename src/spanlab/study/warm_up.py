"""The warm-up of an engine study: every arm serves a few requests before the first one is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from spanlab.core.request import Request

_LATER_NS = 3_600 * 10**9  # between the waves: idle time, which the clock of a warm-up skips

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
    """The first, the shortest and the longest request at once, and all of them again when they are stored."""
    by_length = sorted(requests, key=lambda request: request.num_tokens)
    few = list({request.id: request for request in (requests[0], by_length[0], by_length[-1])}.values())
    waves = [(wave, request) for wave in (0, 1) for request in few]
    return [replace(request, id=at, arrived_at=wave * _LATER_NS) for at, (wave, request) in enumerate(waves)]
