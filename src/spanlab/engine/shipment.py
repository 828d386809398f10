"""What one forward tells the device: numbers that leave the host together, in one copy from pinned memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

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
        self._used = self._size = 0  # bytes of the last part
        self._later: list[Callable[[], None]] = []

    def add(self, arrays: Sequence[NDArray[np.generic]], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """Arrays as tensors of `dtype`, each aligned; to be read once they are sent."""
        assert device == self._device, "a shipment goes to one device"
        lengths, unit = [len(values) for values in arrays], _ALIGNED // dtype.itemsize
        gaps = [-length % unit for length in lengths]
        host, there = self._room((sum(lengths) + sum(gaps)) * dtype.itemsize)
        numbers, at = host.view(dtype).numpy(), 0
        for values, length, gap in zip(arrays, lengths, gaps, strict=True):
            numbers[at : at + length] = values
            at += length + gap
        return list(there.view(dtype).split(list(chain.from_iterable(zip(lengths, gaps, strict=True))))[::2])

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

    def _room(self, size: int) -> tuple[Tensor, Tensor]:
        """So many bytes on the host, and on the device."""
        if not self._parts or self._used + size > self._size:
            self._begin(size)
        host, there = self._parts[-1]
        first, self._used = self._used, self._used + size
        return host[first : self._used], there[first : self._used]

    def _begin(self, size: int) -> None:
        """Go on in a new buffer."""
        there, self._given = self._given, None
        if there is None or len(there) < size:
            there = torch.empty(max(LEAST, size), dtype=torch.uint8, device=self._device)
        on_host = there.device.type == "cpu"
        host = there if on_host else torch.empty(len(there), dtype=torch.uint8, pin_memory=True)
        self._parts.append((host, there))
        self._used, self._size = 0, len(host)
