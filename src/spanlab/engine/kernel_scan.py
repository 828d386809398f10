"""The gated delta rule by flash-linear-attention's kernels, where they are installed and there is a card.

They keep packed sequences apart and return each one's final state. So a scan is cut at stops: the next rows of every
sequence up to its stop are one call. Never run here, for want of a card; tests give it transformers' scans in their
place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib import import_module
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from spanlab.engine.chunk_scan import ChunkScan, Reached, ScanInputs, Segment
from spanlab_kernels.attention import Send, to_device

Kernel = Callable[..., tuple[Tensor, Tensor]]
"""A gated delta rule over sequences that `cu_seqlens` keeps apart; returns outputs and final states."""


class Kernels(NamedTuple):
    """A kernel for sequences of many rows, and one for single rows."""

    chunks: Kernel
    single: Kernel


class ScanPlan(Protocol):
    """A scan of segments, planned once and run for every layer."""

    def run(self, inputs: ScanInputs, states: Tensor, out: Tensor, reached: Reached) -> None:
        """As `ChunkScan.run`."""
        ...


def plan_scan(segments: Sequence[Segment], device: torch.device, send: Send = to_device) -> ScanPlan:
    """The fastest scan that is installed for a device; `send` may bring its numbers later, before it runs."""
    kernels = installed() if device.type == "cuda" else None
    return ChunkScan(segments, device, send) if kernels is None else KernelScan(segments, device, kernels, send)


@cache
def installed() -> Kernels | None:
    """The kernels of flash-linear-attention; None where it is not installed."""
    try:
        module = import_module("fla.ops.gated_delta_rule")
    except ImportError:
        return None
    return Kernels(module.chunk_gated_delta_rule, module.fused_recurrent_gated_delta_rule)


class _Call(NamedTuple):
    """Stop `number` of each of `segments`: their rows up to there, one segment behind the other."""

    kernel: Kernel
    number: int
    segments: list[int]
    rows: Tensor
    edges: Tensor
    order: Tensor


class KernelScan:
    """A scan of segments by kernels, planned once and run for every layer."""

    def __init__(
        self, segments: Sequence[Segment], device: torch.device, kernels: Kernels, send: Send = to_device
    ) -> None:
        self._calls = list(_calls(segments, device, kernels, send))

    def run(self, inputs: ScanInputs, states: Tensor, out: Tensor, reached: Reached) -> None:
        """As `ChunkScan.run`."""
        heads, width = inputs.value.shape[1:]
        for call in self._calls:
            query, key, value, g, beta = (each.index_select(0, call.rows)[None] for each in inputs)
            query, key = (each.repeat_interleave(heads // each.shape[2], dim=2) for each in (query, key))
            value = torch.nn.functional.pad(value, (0, states.shape[-1] - width))
            found, after = call.kernel(
                query,
                key,
                value,
                g=g,
                beta=beta,
                initial_state=states.index_select(0, call.order),
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
                cu_seqlens=call.edges,
            )
            out.index_copy_(0, call.rows, found[0, ..., :width].to(out.dtype))
            states.index_copy_(0, call.order, after.float())
            for segment, state in zip(call.segments, after, strict=True):
                reached(segment, call.number, state)


def _calls(segments: Sequence[Segment], device: torch.device, kernels: Kernels, send: Send) -> Iterator[_Call]:
    for number in range(max(len(segment.stops) for segment in segments)):
        found = {at: _rows(segment, number) for at, segment in enumerate(segments) if len(segment.stops) > number}
        for kernel, single in ((kernels.single, True), (kernels.chunks, False)):
            rows = {at: each for at, each in found.items() if (len(each) == 1) == single}
            if rows:
                edges = np.cumsum([0, *(len(each) for each in rows.values())])
                arrays = [np.concatenate([*rows.values()]), edges, np.array([*rows])]
                yield _Call(kernel, number, [*rows], *send(arrays, torch.int64, device))


def _rows(segment: Segment, number: int) -> np.ndarray:
    start, stop = list(pairwise((segment.start, *segment.stops)))[number]
    return np.arange(start, stop)
