"""Arrivals of a point: those of the study, compressed in time, moved a little, or far apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from spanlab import build
from spanlab.core.request import Request
from spanlab.settings import Study

APART_NS = 3_600 * 10**9  # between requests that wait for nothing


def arrivals_of(study: Study, requests: tuple[Request, ...], replication: int, load: float | None) -> list[Request]:
    """Requests in order of arrival at a multiple of the study's load; None: each long after the one before.

    `replication`  the seed of drawn arrivals; of recorded ones the number of the shake, of which 0 moves nothing
    """
    drawn = study.draws_arrivals()
    served = build.build_arrivals(study, requests, replication if drawn else study.seeds[0], study.arrivals.rate_rps)
    if load is None:
        return [replace(request, arrived_at=at * APART_NS) for at, request in enumerate(served)]
    times = np.array([request.arrived_at for request in served], dtype=np.int64)
    if replication and not drawn:
        times = shaken(times, np.array([request.group_id for request in served]), replication)
    return _at(served, np.rint(times / load).astype(np.int64))


def shaken(times: np.ndarray, groups: np.ndarray, seed: int) -> np.ndarray:
    """Times that are moved by up to half the mean gap, either way; a group's requests keep their order.

    Input shaking (Tsafrir, Ouaknine and Feitelson, MASCOTS 2007): what changes with it is chance, not a property.
    """
    reach = np.ptp(times) / max(1, len(times) - 1) / 2
    moved = np.maximum(0, np.rint(times + np.random.default_rng([seed, 2]).uniform(-reach, reach, len(times))))
    by_place = np.lexsort((np.arange(len(times)), groups))
    found = np.empty(len(times), dtype=np.int64)
    found[by_place] = moved[np.lexsort((moved, groups))].astype(np.int64)
    return found


def _at(served: Sequence[Request], times: np.ndarray) -> list[Request]:
    order, stamps = np.argsort(times, kind="stable").tolist(), times.tolist()
    return [replace(served[at], arrived_at=stamps[at]) for at in order]
