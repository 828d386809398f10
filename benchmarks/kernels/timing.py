"""Medians with quartiles: CUDA events on a GPU, the clock on a CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

WARM_UP = 3
ROUNDS = {"cuda": 50, "cpu": 20}
FLUSHED = 1 << 29  # bytes written before each call: clears the cache, and keeps the GPU busy while the host launches


def time_together(calls: dict[str, Callable[[], Any]], device: str) -> dict[str, dict[str, Any]]:
    """Seconds of each call, as `spread` tells them.

    Calls take turns, so that whatever disturbs the machine disturbs all of them.
    """
    once = _by_events if device == "cuda" else _by_clock
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(WARM_UP + ROUNDS[device]):
        for name, call in calls.items():
            took = once(call)
            if turn >= WARM_UP:
                times[name].append(took)
    return {name: spread(taken) for name, taken in times.items()}


def spread(seconds: list[float]) -> dict[str, Any]:
    """Median, quartiles and the least."""
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return {"median_s": median, "quartiles_s": [low, high], "least_s": min(seconds), "rounds": len(seconds)}


def _by_clock(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _by_events(call: Callable[[], Any]) -> float:
    started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    _flush().zero_()
    started.record()
    call()
    ended.record()
    ended.synchronize()
    return started.elapsed_time(ended) / 1e3


def _flush(kept: list[torch.Tensor] = []) -> torch.Tensor:  # noqa: B006
    if not kept:
        kept.append(torch.empty(FLUSHED, dtype=torch.uint8, device="cuda"))
    return kept[0]
