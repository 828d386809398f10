"""What one forward tells the device: numbers that leave the host together, in one copy from pinned memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNED = 16  # bytes: Triton compiles one kernel more for every pointer that is not so aligned
LEAST = 1 << 16  # bytes of a buffer: the rows and spans of some hundred requests that decode


class Shipment:
    """Arrays get their places on the device as they are added, and their numbers there when all are sent.

    Equal lengths in an equal order get equal places, beginning with `buffer`, uint8 on the device, where one is given.
    A shipment that outgrows its buffer goes on in another, in a copy more.
    """

    def __init__(self, device: torch.device, buffer: Tensor | None = None) -> None:
        self._device, self._given = device, buffer
        self._parts: list[tuple[Tensor, Tensor]] = []  # on the host, on the device
        self._used = 0
        self._later: list[Callable[[], None]] = []

    def add(self, arrays: Sequence[NDArray[np.generic]], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """Arrays as tensors of `dtype`, each aligned; to be read once they are sent."""
        assert device == self._device, "a shipment goes to one device"
        return [self._place(values, dtype) for values in arrays]

    def then(self, work: Callable[[], None]) -> None:
        """Do something with the numbers as soon as they are sent."""
        self._later.append(work)

    def send(self) -> None:
        """Copy everything, without waiting."""
        for at, (host, there) in enumerate(self._parts):
            used = self._used if at == len(self._parts) - 1 else len(host)
            if there is not host:
                there[:used].copy_(host[:used], non_blocking=True)
        for work in self._later:
            work()
        self._parts, self._later, self._used = [], [], 0

    def _place(self, values: NDArray[np.generic], dtype: torch.dtype) -> Tensor:
        size = len(values) * dtype.itemsize
        start = -(-self._used // _ALIGNED) * _ALIGNED
        if not self._parts or start + size > len(self._parts[-1][0]):
            self._begin(size)
            start = 0
        host, there = self._parts[-1]
        self._used = start + size
        host[start : self._used].view(dtype).numpy()[:] = values
        return there[start : self._used].view(dtype)

    def _begin(self, size: int) -> None:
        """Go on in a new buffer."""
        there, self._given = self._given, None
        if there is None or len(there) < size:
            there = torch.empty(max(LEAST, size), dtype=torch.uint8, device=self._device)
        on_host = there.device.type == "cpu"
        host = there if on_host else torch.empty(len(there), dtype=torch.uint8, pin_memory=True)
        self._parts.append((host, there))
