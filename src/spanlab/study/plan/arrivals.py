"""Arrivals of a point: the study's arrivals, compressed in time, shake, or far apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from spanlab import build
from spanlab.core.request import Request
from spanlab.settings import Study

APART_NS = 3_600 * 10**9  # between arrivals, so that no request waits for another


def arrivals_of(study: Study, requests: tuple[Request, ...], replication: int, load: float | None) -> list[Request]:
    """Return requests in order of arrival at a multiple of the study's load; None: no request waits for another.

    `replication`  the seed of drawn arrivals; for recorded arrivals the number of the shake, and 0 for no shake
    """
    drawn = study.draws_arrivals()
    served = build.build_arrivals(study, requests, replication if drawn else study.seeds[0], study.arrivals.rate_rps)
    if load is None:
        return [replace(request, arrived_at=index * APART_NS) for index, request in enumerate(served)]
    times = np.array([request.arrived_at for request in served], dtype=np.int64)
    if replication and not drawn:
        times = shake(times, np.array([request.group_id for request in served]), replication)
    return _with_arrivals(served, np.rint(times / load).astype(np.int64))


def shake(times: np.ndarray, groups: np.ndarray, seed: int) -> np.ndarray:
    """Return times that are moved at random by up to half the mean gap; a group's requests keep their order.

    Input shaking (Tsafrir, Ouaknine and Feitelson, MASCOTS 2007): results that change under it are chance.
    """
    reach = np.ptp(times) / max(1, len(times) - 1) / 2
    moved = np.maximum(0, np.rint(times + np.random.default_rng([seed, 2]).uniform(-reach, reach, len(times))))
    by_group = np.lexsort((np.arange(len(times)), groups))
    times_in_order = np.empty(len(times), dtype=np.int64)
    times_in_order[by_group] = moved[np.lexsort((moved, groups))].astype(np.int64)
    return times_in_order


def _with_arrivals(served: Sequence[Request], times: np.ndarray) -> list[Request]:
    order, stamps = np.argsort(times, kind="stable").tolist(), times.tolist()
    return [replace(served[index], arrived_at=stamps[index]) for index in order]
