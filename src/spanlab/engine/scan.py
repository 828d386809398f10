"""Recurrent layers over a chunk of tokens: by chunks, by a kernel, and by rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from itertools import chain, groupby, pairwise, zip_longest
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spanlab_kernels.attention.batch import Send, to_device
from spanlab_kernels.chunk_scan import Chunks, Steps, scan

# ------------------------------------------------------------------------------
# The gated delta rule over packed rows of many sequences, in chunks.
#
# S_t = exp(g_t) (I - b_t k_t k_tᵀ) S_{t-1} + b_t k_t v_tᵀ and o_t = S_tᵀ q_t. A chunk of rows
# is a triangular system (the UT transform of DeltaNet, arXiv 2406.06484; gated: arXiv
# 2412.06464) and products with the state before it. Chunks of all sequences are prepared
# together; then states advance from chunk to chunk, in plain torch or by a kernel.
# ------------------------------------------------------------------------------

# rows per chunk: the smallest that fits the longest run between stops, else the last
WIDTHS = (1, 8, 32)
_ROWS_AT_ONCE = 256  # more rows exceed a CPU's caches and take longer per row
_EPSILON = 1e-6  # in the L2 normalisation of queries and keys


class Segment(NamedTuple):
    """Rows of one sequence, from `start` to the last of `stops`; the state is reported at every
    stop."""

    start: int
    stops: tuple[int, ...]


OnStop = Callable[[int, int, Tensor], None]
"""on_stop(segment, stop, state [heads, d_k, d]): the state of a segment at one of its stops, both
as indexes."""


class ScanInputs(NamedTuple):
    """Scan inputs of a mixer: query and key [T, key heads, d_k], value [T, heads, d], g and beta
    [T, heads]."""

    query: Tensor
    key: Tensor
    value: Tensor
    g: Tensor
    beta: Tensor


class _Stop(NamedTuple):
    """A stop of a segment, at the end of a chunk of its block; `rank` is the segment's position in
    its batch."""

    chunk: int
    rank: int
    segment: int
    stop: int


@dataclass(frozen=True)
class _Block:
    """Chunks of one or more steps that are prepared together, in the order of segments within each
    step.

    `rows`           int64 [chunks · width], row of each position; positions past a chunk's end
                     repeat its last row
    `valid`          int64 [chunks · width], 0 past a chunk's end, else 1
    `valid_indices`  int64, indexes of the valid positions
    """

    rows: Tensor
    valid: Tensor
    valid_indices: Tensor
    steps: Steps
    stops: list[_Stop]


@dataclass(frozen=True)
class _Batch:
    """Segments with chunks of one width, in descending order of chunk count.

    `order`     int64, their indexes among all segments
    `in_order`  whether the batch is all segments in their original order
    """

    width: int
    order: Tensor
    in_order: bool
    blocks: list[_Block]


class ChunkScan:
    """A scan of segments, planned once per forward and run for every layer."""

    def __init__(
        self, segments: Sequence[Segment], device: torch.device, send: Send = to_device
    ) -> None:
        widths, chunks = [], dict[int, list[_Chunk]]()
        for index, segment in enumerate(segments):
            ranges = list(pairwise((segment.start, *segment.stops)))
            longest = max(stop - start for start, stop in ranges)
            size = next((width for width in WIDTHS if longest <= width), WIDTHS[-1])
            widths.append(size)
            chunks[index] = [
                _Chunk(first, min(first + size, stop), number if first + size >= stop else None)
                for number, (start, stop) in enumerate(ranges)
                for first in range(start, stop, size)
            ]
        ranked = sorted(chunks, key=lambda index: (widths[index], -len(chunks[index])))
        limit = _ROWS_AT_ONCE if device.type == "cpu" else None
        self._batches = []
        for width, members in groupby(ranked, lambda index: widths[index]):
            order = list(members)
            plans = list(_plan_blocks({index: chunks[index] for index in order}, width, limit))
            arrays = [np.array(order), *(array for plan in plans for array in plan.arrays)]
            indexes, *flat = send(arrays, torch.int64, device)
            blocks = []
            for plan, first in zip(plans, range(0, len(flat), _ARRAYS), strict=True):
                rows, valid, valid_indices, *of_steps = flat[first : first + _ARRAYS]
                reported = [(stop.chunk, stop.rank) for stop in plan.stops]
                blocks.append(
                    _Block(
                        rows,
                        valid,
                        valid_indices,
                        Steps(plan.counts, reported, *of_steps),
                        plan.stops,
                    )
                )
            self._batches.append(
                _Batch(width, indexes, order == list(range(len(segments))), blocks)
            )

    def run(self, inputs: ScanInputs, states: Tensor, out: Tensor, on_stop: OnStop) -> None:
        """Update states, float32 [segments, heads, d_k, d], in place; write outputs to `out` [T,
        heads, d_v].

        If `d` is larger than `d_v`, values are zero and outputs are not computed in the remaining
        columns.
        """
        for batch in self._batches:
            state = states if batch.in_order else states.index_select(0, batch.order)
            for block in batch.blocks:
                _run_block(block, batch.width, inputs, state, out, on_stop)
            if not batch.in_order:
                states.index_copy_(0, batch.order, state)


class _Chunk(NamedTuple):
    """Rows `[start, end)`; `stop` is the index of the stop at `end`, or None."""

    start: int
    end: int
    stop: int | None


_ARRAYS = 6


class _BlockPlan(NamedTuple):
    """The `_ARRAYS` arrays of a block: three of its own, then those of its `Steps`; chunks of each
    step, and stops."""

    arrays: tuple[NDArray[np.int64], ...]
    counts: list[int]
    stops: list[_Stop]


def _plan_blocks(
    chunks: Mapping[int, Sequence[_Chunk]], width: int, limit: int | None
) -> Iterator[_BlockPlan]:
    names = list(chunks)
    columns = [
        [chunk for chunk in column if chunk is not None] for column in zip_longest(*chunks.values())
    ]
    for first, last in _group_steps([len(column) for column in columns], width, limit):
        selected = list(chain.from_iterable(columns[first:last]))
        ends = np.array([[chunk.end] for chunk in selected])
        rows = np.array([[chunk.start] for chunk in selected]) + np.arange(width)
        valid = (rows < ends).ravel()
        counts = np.array([len(column) for column in columns[first:last]])
        firsts = np.cumsum(counts) - counts
        ranks = np.concatenate([np.arange(count) for count in counts])
        stops = [
            _Stop(at, rank, names[rank], chunk.stop)
            for at, (rank, chunk) in enumerate(zip(ranks.tolist(), selected, strict=True))
            if chunk.stop is not None
        ]
        reports = np.full(len(selected), -1)
        reports[[stop.chunk for stop in stops]] = np.arange(len(stops))
        lengths = np.bincount(ranks, minlength=len(names))
        arrays = np.minimum(rows, ends - 1).ravel(), valid.astype(np.int64), np.flatnonzero(valid)
        yield _BlockPlan((*arrays, firsts, lengths, reports), counts.tolist(), stops)


def _group_steps(counts: Sequence[int], width: int, limit: int | None) -> Iterator[tuple[int, int]]:
    """Ranges of steps with at most `limit` rows, or of a single step."""
    first, rows = 0, 0
    for step, count in enumerate(counts):
        if limit is not None and step > first and rows + count * width > limit:
            yield first, step
            first, rows = step, 0
        rows += count * width
    yield first, len(counts)


def _run_block(
    block: _Block, width: int, inputs: ScanInputs, state: Tensor, out: Tensor, on_stop: OnStop
) -> None:
    def report(index: int, after: Tensor) -> None:
        _, _, segment, stop = block.stops[index]
        on_stop(segment, stop, after)

    outputs = scan(_prepare(block, width, inputs), block.steps, state, report)
    outputs = outputs.transpose(1, 2).reshape(-1, *out.shape[1:])
    rows = block.rows
    if len(block.valid_indices) < len(rows):
        rows, outputs = rows[block.valid_indices], outputs[block.valid_indices]
    out.index_copy_(0, rows, outputs.to(out.dtype))


def _prepare(block: _Block, width: int, inputs: ScanInputs) -> Chunks:
    query, key, value = (_gather(tensor, block.rows, width) for tensor in inputs[:3])
    g, beta = (_gather(tensor[..., None], block.rows, width)[..., 0] for tensor in inputs[3:])
    if len(block.valid_indices) < len(block.rows):
        valid = block.valid.view(-1, 1, width)
        g, beta = g * valid, beta * valid
    groups = value.shape[1] // key.shape[1]
    key = key * inverse_norm(key)
    decay = g.cumsum(-1)
    pairs = (decay[..., :, None] - decay[..., None, :]).tril_().exp_().tril_()
    system = per_head(key @ key.mT, groups).mul(pairs).mul_(beta[..., None])
    size = per_head(inverse_norm(query) * query.shape[-1] ** -0.5, groups)
    scores = per_head(query @ key.mT, groups).mul(pairs.mul_(size))
    query, key, factor = per_head(query, groups), per_head(key, groups), decay.exp()
    # unit lower triangular: other entries are not read
    identity = torch.eye(width, device=system.device).expand_as(system)
    inverse = torch.linalg.solve_triangular(system, identity, upper=False, unitriangular=True)
    solved = inverse * beta[..., None, :]
    last = decay[..., -1:]
    return Chunks(
        solved @ value,
        (solved * factor[..., None, :]) @ key,
        query * (factor[..., None] * size),
        scores,
        (key * (last - decay).exp()[..., None]).mT,
        last.exp()[..., None],
    )


def _gather(rows: Tensor, indices: Tensor, width: int) -> Tensor:
    """Gather rows [T, heads, d] into chunks [chunks, heads, width, d], float32."""
    return (
        rows.index_select(0, indices)
        .float()
        .view(-1, width, *rows.shape[1:])
        .transpose(1, 2)
        .contiguous()
    )


def inverse_norm(vectors: Tensor) -> Tensor:
    """1 / sqrt(|x|² + epsilon) [..., 1], the L2 normalisation in the scans of Qwen3.5 and
    Qwen3-Next."""
    return torch.rsqrt(torch.linalg.vector_norm(vectors, dim=-1, keepdim=True).square() + _EPSILON)


def per_head(tensor: Tensor, groups: int) -> Tensor:
    """Repeat key heads [T, key heads, …] for the value heads; each serves `groups` consecutive
    heads."""
    return tensor if groups == 1 else tensor.repeat_interleave(groups, dim=1)


# ------------------------------------------------------------------------------
# The gated delta rule by flash-linear-attention's kernels, used on CUDA devices if they are
# installed.
#
# The kernels separate packed sequences and return their final states. So a scan is cut at
# stops: one call computes the next rows of every sequence up to its stop. Never run on a GPU
# here; tests use transformers' scans in place of the kernels.
# ------------------------------------------------------------------------------

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


def run_kernel(
    kernel: Kernel, inputs: ScanInputs, states: Tensor, **options: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs and final states of a kernel; each input has one more axis in front."""
    query, key, value, g, beta = inputs
    query, key = (
        tensor.repeat_interleave(value.shape[2] // tensor.shape[2], dim=2)
        for tensor in (query, key)
    )
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
        self,
        segments: Sequence[Segment],
        device: torch.device,
        kernels: Kernels,
        send: Send = to_device,
    ) -> None:
        self._calls = list(_calls(segments, device, kernels, send))

    def run(self, inputs: ScanInputs, states: Tensor, out: Tensor, on_stop: OnStop) -> None:
        """As `ChunkScan.run`."""
        width = inputs.value.shape[-1]
        for call in self._calls:
            selected = ScanInputs(*(tensor.index_select(0, call.rows)[None] for tensor in inputs))
            value = torch.nn.functional.pad(selected.value, (0, states.shape[-1] - width))
            before = states.index_select(0, call.order)
            outputs, after = run_kernel(
                call.kernel, selected._replace(value=value), before, cu_seqlens=call.edges
            )
            out.index_copy_(0, call.rows, outputs[0, ..., :width].to(out.dtype))
            states.index_copy_(0, call.order, after.float())
            for segment, state in zip(call.segments, after, strict=True):
                on_stop(segment, call.number, state)


ScanPlan = ChunkScan | KernelScan
"""A scan of segments, planned once per forward and run for every layer."""


def plan_scan(
    segments: Sequence[Segment], device: torch.device, send: Send = to_device
) -> ScanPlan:
    """The fastest scan installed for a device; `send` may copy its indexes later, before the scan
    runs."""
    kernels = installed_kernels() if device.type == "cuda" else None
    return (
        ChunkScan(segments, device, send)
        if kernels is None
        else KernelScan(segments, device, kernels, send)
    )


def _calls(
    segments: Sequence[Segment], device: torch.device, kernels: Kernels, send: Send
) -> Iterator[_Call]:
    for number in range(max(len(segment.stops) for segment in segments)):
        rows_of = {}
        for index, segment in enumerate(segments):
            if len(segment.stops) > number:
                start, stop = list(pairwise((segment.start, *segment.stops)))[number]
                rows_of[index] = np.arange(start, stop)
        for kernel, single in ((kernels.single, True), (kernels.chunks, False)):
            rows = {
                index: indexes
                for index, indexes in rows_of.items()
                if (len(indexes) == 1) == single
            }
            if rows:
                edges = np.cumsum([0, *(len(indexes) for indexes in rows.values())])
                arrays = [np.concatenate([*rows.values()]), edges, np.array([*rows])]
                yield _Call(kernel, number, [*rows], *send(arrays, torch.int64, device))


# ------------------------------------------------------------------------------
# The gated delta rule over one row of each sequence: the scan of a decode step.
#
# With k and q of length 1: S ← γ S + k ⊗ d, where d = b (v - γ Sᵀ k), and o = γ Sᵀ q + (q · k)
# d before its scale.
# ------------------------------------------------------------------------------

RowScan = Callable[[ScanInputs, Tensor], tuple[Tensor, Tensor]]
"""scan(inputs, states) -> outputs [T, heads, d_v], and float32 states [T, heads, d_k, d_v] after
one row each."""


def row_scan(device: torch.device) -> RowScan:
    """The fastest row scan installed for a device."""
    kernels = installed_kernels() if device.type == "cuda" else None
    return scan_rows if kernels is None else partial(scan_rows_by_kernel, kernels.single)


def scan_rows(inputs: ScanInputs, states: Tensor) -> tuple[Tensor, Tensor]:
    """A `RowScan` in plain torch that updates `states` in place."""
    query, key, value, g, beta = (tensor.float() for tensor in inputs)
    heads, size = value.shape[1], key.shape[-1]
    pairs = torch.stack([key * inverse_norm(key), query * inverse_norm(query) * size**-0.5], dim=-2)
    pairs = per_head(pairs, heads // key.shape[1])
    decay = g.exp()[..., None]
    readout = decay[..., None] * (pairs @ states)
    missing = (value - readout[..., 0, :]) * beta[..., None]
    overlap = (pairs[..., 0, :] * pairs[..., 1, :]).sum(-1, keepdim=True)
    moving, keys = states.flatten(0, 1), pairs[..., 0, :].flatten(0, 1)
    moving.mul_(decay.reshape(-1, 1, 1)).baddbmm_(keys[..., None], missing.flatten(0, 1)[:, None])
    return (readout[..., 1, :] + overlap * missing).to(inputs.value.dtype), states


def scan_rows_by_kernel(
    kernel: Kernel, inputs: ScanInputs, states: Tensor
) -> tuple[Tensor, Tensor]:
    """A `RowScan` by a kernel for batches of single rows."""
    outputs, after = run_kernel(kernel, ScanInputs(*(tensor[:, None] for tensor in inputs)), states)
    return outputs[:, 0].to(inputs.value.dtype), after.float()
