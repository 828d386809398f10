"""Launch modes of decode-only forwards: unpadded, or padded to a few sizes and for_replay as CUDA graphs.

A replay needs equal launches and addresses. So rows and spans are padded to powers of two, all inputs of a step are in
one buffer, and other values that affect launches are part of a key. One graph is captured per key.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from time import perf_counter
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from spanlab.core.step import ScheduledChunk, is_repair, of_span
from spanlab.engine.pages import MIN_BYTES, PageList, PagePool, PageTable, TransferBatch
from spanlab.engine.rows import TailRows
from spanlab.engine.settings import GRAPHS, PLAIN
from spanlab_kernels.attention.batch import GroupArrays, Spans, joined

_SPARE_PAGES = 1

Work = Callable[[], Tensor]
"""work() -> logits of all rows from the transferred inputs; may be called again after new inputs replace them."""


class Prepare(Protocol):
    """Adds the inputs of a forward to a transfer; returns a graph key and the work.

    With `for_replay` the launches of the work may depend only on input addresses and the key, not on input values.
    """

    def __call__(
        self, tails: TailRows | None, transfer: TransferBatch, *, for_replay: bool
    ) -> tuple[Hashable, Work]: ...


class Plain:
    """Launches every forward unpadded."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def run(self, tails: TailRows | None, prepare: Prepare) -> Tensor:
        """Run the forward; return logits of the rows."""
        transfer = TransferBatch(self._device)
        _, work = prepare(tails, transfer, for_replay=False)
        transfer.send()
        return work()


Replay = Callable[[Hashable, Work], Tensor]
"""replay(key, work) -> the work's logits; work of equal keys differs only in input values."""


def run_eager(key: Hashable, work: Work) -> Tensor:
    """Run the work without graphs: the CPU's mode, and the reference for replays."""
    return work()


class CudaGraphs:
    """Captures the work of each key once and replays it; graphs share one memory pool, since one runs at a time.

    Work advances recurrent states, so each call runs it exactly once: first eagerly, later by replay. A capture does
    not execute it.
    """

    def __init__(self) -> None:
        self._captured: dict[Hashable, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, key: Hashable, work: Work) -> Tensor:
        if key not in self._captured:
            logits = self._warm_up(work)
            self._captured[key] = self._capture(work)
            return logits
        graph, out = self._captured[key]
        graph.replay()
        return out

    def _warm_up(self, work: Work) -> Tensor:
        """Run the work on a side stream, to compile kernels and initialise libraries before the capture."""
        current, side_stream = torch.cuda.current_stream(), torch.cuda.Stream()
        side_stream.wait_stream(current)
        with torch.cuda.stream(side_stream):
            logits = work()
        current.wait_stream(side_stream)
        return logits

    def _capture(self, work: Work) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        from spanlab_kernels.attention.tiles import forget_lists  # imports Triton, which a CPU does not need

        forget_lists()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            out = work()
        forget_lists()  # tensors in the graph's memory belong to its replays
        return graph, out


class Padded:
    """Pads forwards to powers of two of rows and spans. Padding rows read and write a reserved page.

    `replay`  runs the work of a forward
    """

    def __init__(self, device: torch.device, pages: PageTable, pool: PagePool, replay: Replay) -> None:
        self._device, self._replay = device, replay
        spare = pool.allocate(_SPARE_PAGES)
        self._slot, self._spare = int(spare[0]) * pool.shape.page_size, PageList(pages, spare)
        self._buffers: dict[tuple[int, int], Tensor] = {}

    def run(self, tails: TailRows, prepare: Prepare) -> Tensor:
        """Run the padded forward; return logits of the rows without padding."""
        rows = pad_rows(tails, self._slot, self._spare.start)
        size = len(rows.slots), len(rows.independent)
        if size not in self._buffers:
            room = max(MIN_BYTES, 256 * sum(size))  # several int64 arrays per row and span, with alignment
            self._buffers[size] = torch.empty(room, dtype=torch.uint8, device=self._device)
        transfer = TransferBatch(self._device, self._buffers[size])
        key, work = prepare(rows, transfer, for_replay=True)
        transfer.send()
        # cloned, because the next replay overwrites these logits
        return self._replay((size, key), work)[: len(tails.slots)].clone()


def pad_rows(tails: TailRows, slot: int, page: int) -> TailRows:
    """Decode rows and spans, padded to the next power of two; padding rows have token 0 and use one slot and page."""
    more = _next_power(len(tails.slots)) - len(tails.slots)
    spans, none = len(tails.independent) + more, np.zeros(more, np.int64)
    groups = _with_spans(joined([tails.groups, _padding_rows(more, page)]), _next_power(spans) - spans)
    padding = np.zeros(len(groups.of_span.index) - len(tails.independent), bool)
    return TailRows(
        np.concatenate([tails.ids, none]),
        np.concatenate([tails.rotations, none]),
        np.concatenate([tails.slots, np.full(more, slot)]),
        groups,
        np.concatenate([tails.independent, padding]),
    )


def _padding_rows(count: int, page: int) -> GroupArrays:
    """Padding groups of one row, which reads only the key that it writes."""
    ones, none = np.ones(count, np.int64), np.zeros(count, np.int64)
    return GroupArrays(ones, ones, none, none, Spans(none, ones, none, none + page, none))


def _with_spans(groups: GroupArrays, more: int) -> GroupArrays:
    """Append empty spans that no group reads."""
    none = np.zeros(more, np.int64)
    return groups._replace(of_span=Spans(*(np.concatenate([values, none]) for values in groups.of_span)))


def _next_power(count: int) -> int:
    return 1 << (count - 1).bit_length()


def new_decoder(decode: str, device: torch.device, pages: PageTable, pool: PagePool) -> Plain | Padded:
    """The launch mode `engine.decode` of decode-only forwards."""
    if decode == PLAIN:
        return Plain(device)
    return Padded(device, pages, pool, CudaGraphs() if decode == GRAPHS else run_eager)


def spare_pages(decode: str) -> int:
    """Number of pages that a decoder reserves in the pool."""
    return 0 if decode == PLAIN else _SPARE_PAGES


# ------------------------------------------------------------------------------
# Durations of the phases of a step on the device that computes them.
# ------------------------------------------------------------------------------

#: Seconds of one step by phase. Each forward counts as the first phase below `copy_s` that applies to it.
PHASES = (
    "plan_s",  # since the previous step: storing, records, scheduling
    "copy_s",  # outside forwards: span copies, rotation, copy-on-write, loads of states, application of maps
    "repair_s",
    "prefill_s",  # ordered text
    "fill_s",  # spans
    "decode_s",
)


class HostClock:
    """Clock for synchronous work: runs the work of one step and sums the time of each phase."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def run(self, phase: str, work: Callable[..., None], *args: object) -> None:
        """Run work of a phase."""
        began = perf_counter()
        work(*args)
        self._seconds[phase] += perf_counter() - began

    def seconds(self) -> Mapping[str, float]:
        """Seconds by phase."""
        return self._seconds


class StreamClock:
    """Clock for asynchronous work of a CUDA stream, by events around each phase; idle time of the stream counts.

    Only `seconds` synchronizes, and usually without waiting, because the tokens have been read by then.
    """

    def __init__(self) -> None:
        self._spans: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def run(self, phase: str, work: Callable[..., None], *args: object) -> None:
        """Launch work of a phase."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work(*args)
        end.record()
        self._spans.append((phase, begin, end))

    def seconds(self) -> Mapping[str, float]:
        """Seconds by phase; waits for the end of all phases."""
        totals: defaultdict[str, float] = defaultdict(float)
        if self._spans and not self._spans[-1][2].query():
            self._spans[-1][2].synchronize()
        for phase, begin, end in self._spans:
            totals[phase] += begin.elapsed_time(end) * 1e-3
        return totals


def clock_of(device: torch.device) -> HostClock | StreamClock:
    """Create a clock for one step on a device."""
    return StreamClock() if device.type == "cuda" else HostClock()


def phase_of(chunks: list[ScheduledChunk]) -> str:
    """The phase of a forward with these chunks and any decodes."""
    if not chunks:
        return "decode_s"
    if any(is_repair(chunk) for chunk in chunks):
        return "repair_s"
    return "fill_s" if all(of_span(chunk) for chunk in chunks) else "prefill_s"
