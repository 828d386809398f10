"""The gated delta rule by flash-linear-attention's kernels, used on CUDA devices if they are installed.

The kernels separate packed sequences and return their final states. So a scan is cut at stops: one call computes the
next rows of every sequence up to its stop. Never run on a GPU here; tests use transformers' scans in place of
the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib import import_module
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from spanlab.engine.chunk_scan import ChunkScan, OnStop, ScanInputs, Segment
from spanlab_kernels.attention import Send, to_device

Kernel = Callable[..., tuple[Tensor, Tensor]]
"""A gated delta rule over the sequences in `cu_seqlens`; returns outputs and final states."""


class Kernels(NamedTuple):
    """Kernels for sequences of many rows (`chunks`) and of one row (`single`)."""

    chunks: Kernel
    single: Kernel


@cache
def installed_kernels() -> Kernels | None:
    """The kernels of flash-linear-attention; None if it is not installed."""
    try:
        module = import_module("fla.ops.gated_delta_rule")
    except ImportError:
        return None
    return Kernels(module.chunk_gated_delta_rule, module.fused_recurrent_gated_delta_rule)


def run_kernel(kernel: Kernel, inputs: ScanInputs, states: Tensor, **options: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and final states of a kernel; each input has one more axis in front."""
    query, key, value, g, beta = inputs
    query, key = (tensor.repeat_interleave(value.shape[2] // tensor.shape[2], dim=2) for tensor in (query, key))
    return kernel(
        query,
        key,
        value,
        g=g,
        beta=beta,
        initial_state=states,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        **options,
    )


class _Call(NamedTuple):
    """One kernel call: the concatenated rows of `segments` up to their stop `number`."""

    kernel: Kernel
    number: int
    segments: list[int]
    rows: Tensor
    edges: Tensor
    order: Tensor


class KernelScan:
    """A scan of segments by kernels, planned once per forward and run for every layer."""

    def __init__(
        self, segments: Sequence[Segment], device: torch.device, kernels: Kernels, send: Send = to_device
    ) -> None:
        self._calls = list(_calls(segments, device, kernels, send))

    def run(self, inputs: ScanInputs, states: Tensor, out: Tensor, on_stop: OnStop) -> None:
        """As `ChunkScan.run`."""
        width = inputs.value.shape[-1]
        for call in self._calls:
            selected = ScanInputs(*(tensor.index_select(0, call.rows)[None] for tensor in inputs))
            value = torch.nn.functional.pad(selected.value, (0, states.shape[-1] - width))
            before = states.index_select(0, call.order)
            outputs, after = run_kernel(call.kernel, selected._replace(value=value), before, cu_seqlens=call.edges)
            out.index_copy_(0, call.rows, outputs[0, ..., :width].to(out.dtype))
            states.index_copy_(0, call.order, after.float())
            for segment, state in zip(call.segments, after, strict=True):
                on_stop(segment, call.number, state)


ScanPlan = ChunkScan | KernelScan
"""A scan of segments, planned once per forward and run for every layer."""


def plan_scan(segments: Sequence[Segment], device: torch.device, send: Send = to_device) -> ScanPlan:
    """The fastest scan installed for a device; `send` may copy its indexes later, before the scan runs."""
    kernels = installed_kernels() if device.type == "cuda" else None
    return ChunkScan(segments, device, send) if kernels is None else KernelScan(segments, device, kernels, send)


def _calls(segments: Sequence[Segment], device: torch.device, kernels: Kernels, send: Send) -> Iterator[_Call]:
    for number in range(max(len(segment.stops) for segment in segments)):
        rows_of = {
            index: _rows(segment, number) for index, segment in enumerate(segments) if len(segment.stops) > number
        }
        for kernel, single in ((kernels.single, True), (kernels.chunks, False)):
            rows = {index: indexes for index, indexes in rows_of.items() if (len(indexes) == 1) == single}
            if rows:
                edges = np.cumsum([0, *(len(indexes) for indexes in rows.values())])
                arrays = [np.concatenate([*rows.values()]), edges, np.array([*rows])]
                yield _Call(kernel, number, [*rows], *send(arrays, torch.int64, device))


def _rows(segment: Segment, number: int) -> np.ndarray:
    start, stop = list(pairwise((segment.start, *segment.stops)))[number]
    return np.arange(start, stop)
