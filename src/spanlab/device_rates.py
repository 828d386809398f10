"""Measured peak rates of a device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """FLOPs per second of a matrix product, bytes per second that a copy reads and writes together."""

    flops_per_s: float
    bytes_per_s: float
