"""Medians with quartiles: CUDA events on a GPU, the clock on a CPU; and the rates of the machine beside them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

WARM_UP = 3
ROUNDS = {"cuda": 50, "cpu": 20}
FLUSHED = 1 << 29  # bytes written before each call: clears the cache, and keeps the GPU busy while the host launches
COPIED = {"cuda": 1 << 31, "cpu": 1 << 28}  # bytes, far beyond any cache
MATMUL = {"cuda": 8192, "cpu": 1024}


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


def copy_rate(device: str) -> float:
    """Bytes per second that a copy between two large tensors reads and writes together."""
    source = torch.ones(COPIED[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPIED[device] / _fastest(lambda: target.copy_(source), device)


def matmul_rate(dtype: torch.dtype, device: str) -> float:
    """Floating-point operations per second of a large square product."""
    size = MATMUL[device]
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / _fastest(lambda: left @ right, device)


def _fastest(call: Callable[[], Any], device: str) -> float:
    # a rate is a limit, and what disturbed the machine while it was taken does not lower it
    return float(time_together({"": call}, device)[""]["least_s"])


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
