"""A stream with novel requests: known ones alone at first, then both in a random order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from spanlab.checks import positive
from spanlab.core.passages import novel_requests
from spanlab.core.request import Request
from spanlab_sim.arrivals import ARRIVALS, check_unique


@ARRIVALS.register("novel_stream")
def novel_stream(
    requests: Sequence[Request], rng: np.random.Generator, *, clients: int, known_first: int
) -> list[Request]:
    """All requests ready at time zero, `clients` of them in flight: `known_first` known ones, then all others mixed.

    A request is novel if it shares no passage with another request.
    """
    check_unique(requests)
    positive("arrivals.clients", clients)
    novel = novel_requests(requests)
    known_indices = [index for index, request in enumerate(requests) if request.id not in novel]
    if not novel or not 0 < known_first < len(known_indices):
        raise ValueError(
            f"arrivals.known_first={known_first} with {len(known_indices)} known and {len(novel)} novel requests: "
            "expected fewer than the known ones, and novel ones, as of workload.rag.novel"
        )
    drawn = rng.permutation(known_indices)
    novel_indices = [index for index, request in enumerate(requests) if request.id in novel]
    mixed = rng.permutation([*drawn[known_first:], *novel_indices])
    return [replace(requests[index], arrived_at=0) for index in [*drawn[:known_first], *mixed]]
