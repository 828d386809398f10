"""Measurement of a device's peak rates by large matrix products and a large copy."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch

from spanlab.device_rates import DeviceRates

_PRODUCT = {"cpu": (512, 1024, 2048), "cuda": (8192,)}  # rows of square matrices; the highest rate counts
_COPIED = {"cpu": 1 << 28, "cuda": 1 << 31}  # bytes, far larger than any cache
_ROUNDS = 3

Clock = Callable[[], float]


@cache
def measure(dtype: torch.dtype, device: torch.device, clock: Clock = time.perf_counter) -> DeviceRates:
    """Measure FLOP and memory rates as the best of several rounds, once per process; `clock` returns seconds.

    The best round is used because a rate is an upper limit: other load on the machine must not lower it.
    """
    flops = max(_product_rate(size, dtype, device, clock) for size in _PRODUCT[device.type])
    source = torch.ones(_COPIED[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return DeviceRates(flops, 2 * len(source) / _fastest(lambda: target.copy_(source), device, clock))


def _product_rate(size: int, dtype: torch.dtype, device: torch.device, clock: Clock) -> float:
    left, right, out = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(3))
    return 2 * size**3 / _fastest(lambda: torch.mm(left, right, out=out), device, clock)


def _fastest(call: Callable[[], object], device: torch.device, clock: Clock) -> float:
    return min(_once(call, device, clock) for _ in range(_ROUNDS))


def _once(call: Callable[[], object], device: torch.device, clock: Clock) -> float:
    _wait(device)
    began = clock()
    call()
    _wait(device)
    return clock() - began


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
