"""Host-to-device transfer of one forward's inputs: arrays batched into one copy from pinned memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNED = 16  # bytes: Triton compiles a further kernel variant for pointers with less alignment
MIN_BYTES = 1 << 16  # bytes of a buffer: the rows and spans of about a hundred decoding requests


class TransferBatch:
    """Arrays get device addresses when they are added, and their contents when all are sent.

    Arrays of equal lengths in equal order get equal addresses in `buffer` (uint8 on the device, optional). A transfer
    that exceeds its buffer continues in a new one, with one more copy.
    """

    def __init__(self, device: torch.device, buffer: Tensor | None = None) -> None:
        self._device, self._buffer = device, buffer
        self._buffers: list[tuple[Tensor, Tensor]] = []  # on the host, on the device
        self._used = self._size = 0  # bytes of the last buffer
        self._callbacks: list[Callable[[], None]] = []

    def add(self, arrays: Sequence[NDArray[np.generic]], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """Return arrays as aligned device tensors of `dtype`; their contents are valid after `send`."""
        assert device == self._device, "a transfer has one target device"
        lengths, unit = [len(values) for values in arrays], _ALIGNED // dtype.itemsize
        gaps = [-length % unit for length in lengths]
        host, target = self._reserve((sum(lengths) + sum(gaps)) * dtype.itemsize)
        numbers, offset = host.view(dtype).numpy(), 0
        for values, length, gap in zip(arrays, lengths, gaps, strict=True):
            numbers[offset : offset + length] = values
            offset += length + gap
        return list(target.view(dtype).split(list(chain.from_iterable(zip(lengths, gaps, strict=True))))[::2])

    def after_send(self, callback: Callable[[], None]) -> None:
        """Register a callback for `send`, after the copies are launched."""
        self._callbacks.append(callback)

    def send(self) -> None:
        """Launch all copies and run the callbacks, without synchronization."""
        for index, (host, target) in enumerate(self._buffers):
            used = self._used if index == len(self._buffers) - 1 else len(host)
            if target is not host:
                target[:used].copy_(host[:used], non_blocking=True)
        for callback in self._callbacks:
            callback()
        self._buffers, self._callbacks, self._used = [], [], 0

    def _reserve(self, size: int) -> tuple[Tensor, Tensor]:
        """Reserve `size` bytes; return the host and device views."""
        if not self._buffers or self._used + size > self._size:
            self._add_buffer(size)
        host, target = self._buffers[-1]
        first, self._used = self._used, self._used + size
        return host[first : self._used], target[first : self._used]

    def _add_buffer(self, size: int) -> None:
        """Append a buffer of at least `size` bytes."""
        target, self._buffer = self._buffer, None
        if target is None or len(target) < size:
            target = torch.empty(max(MIN_BYTES, size), dtype=torch.uint8, device=self._device)
        on_host = target.device.type == "cpu"
        host = target if on_host else torch.empty(len(target), dtype=torch.uint8, pin_memory=True)
        self._buffers.append((host, target))
        self._used, self._size = 0, len(host)
