"""The gated delta rule over rows of many sequences at once, in chunks, in plain torch.

S_t = exp(g_t) (I - b_t k_t k_tᵀ) S_{t-1} + b_t k_t v_tᵀ and o_t = S_tᵀ q_t. A chunk of rows is a triangular system
(the UT transform of DeltaNet, arXiv 2406.06484; gated: arXiv 2412.06464) and products with the state before it. Chunks
of all sequences are prepared together; then the first of each sequence run in one batch, then the second of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, pairwise, zip_longest
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spanlab_kernels.attention import Send, to_device

WIDTHS = (1, 8, 32)  # rows of a chunk: the smallest that holds a whole segment, else the last
_ROWS_AT_ONCE = 256  # more rows at once leave a processor's caches, and take longer for each
_EPSILON = 1e-6  # of the L2 norm of queries and keys


class Segment(NamedTuple):
    """Rows of one sequence, from `start` to the last of `stops`; the state is reported at each of these."""

    start: int
    stops: tuple[int, ...]


Reached = Callable[[int, int, Tensor], None]
"""reached(segment, stop, state [heads, d_k, d]): the state of a segment at one of its stops, both as indexes."""


class ScanInputs(NamedTuple):
    """What a mixer gives its scan: query and key [T, key heads, d_k], value [T, heads, d], g and beta [T, heads]."""

    query: Tensor
    key: Tensor
    value: Tensor
    g: Tensor
    beta: Tensor


class _Stop(NamedTuple):
    """A stop of a segment, and the segment's index in its batch."""

    rank: int
    segment: int
    stop: int


class _Step(NamedTuple):
    """The next chunk of so many first `segments` of a batch, and which stops they then reach."""

    segments: int
    reached: list[_Stop]


@dataclass(frozen=True)
class _Block:
    """Chunks that are prepared together: those of one or more steps, each step's in the order of segments.

    `rows`     int64 [chunks · width], row of each place; places beyond a chunk's end repeat its last row
    `valid`    int64 [chunks · width], 0 beyond the end, else 1
    `written`  int64, the places that are rows
    """

    rows: Tensor
    valid: Tensor
    written: Tensor
    steps: list[_Step]


@dataclass(frozen=True)
class _Batch:
    """Segments whose chunks are of one width, those of most chunks first.

    `order`  int64, their indexes among all segments
    `whole`  whether they are all segments, in their own order
    """

    width: int
    order: Tensor
    whole: bool
    blocks: list[_Block]


class ChunkScan:
    """A scan of segments, planned once and run for every layer."""

    def __init__(self, segments: Sequence[Segment], device: torch.device, send: Send = to_device) -> None:
        widths = [_width(segment) for segment in segments]
        chunks = {at: list(_chunks(segment, widths[at])) for at, segment in enumerate(segments)}
        ranked = sorted(chunks, key=lambda at: (widths[at], -len(chunks[at])))
        limit = _ROWS_AT_ONCE if device.type == "cpu" else None
        self._batches = []
        for width, members in groupby(ranked, lambda at: widths[at]):
            order = list(members)
            places = list(_places({at: chunks[at] for at in order}, width, limit))
            arrays = [np.array(order), *(array for place in places for array in place.arrays)]
            indexes, *rest = send(arrays, torch.int64, device)
            parts = zip(rest[::3], rest[1::3], rest[2::3], places, strict=True)
            blocks = [_Block(rows, valid, written, place.steps) for rows, valid, written, place in parts]
            self._batches.append(_Batch(width, indexes, order == list(range(len(segments))), blocks))

    def run(self, inputs: ScanInputs, states: Tensor, out: Tensor, reached: Reached) -> None:
        """Move states float32 [segments, heads, d_k, d] on in place; outputs go to their rows of `out` [T, heads, d_v].

        Where `d` is larger than `d_v`, values are taken to be zero there, and further outputs are not computed.
        """
        for batch in self._batches:
            state = states if batch.whole else states.index_select(0, batch.order)
            for block in batch.blocks:
                _run_block(block, batch.width, inputs, state, out, reached)
            if not batch.whole:
                states.index_copy_(0, batch.order, state)


class _Chunk(NamedTuple):
    """Rows `[start, end)`; the number of the stop there, if it is one."""

    start: int
    end: int
    stop: int | None


def _chunks(segment: Segment, width: int) -> Iterator[_Chunk]:
    for number, (start, stop) in enumerate(pairwise((segment.start, *segment.stops))):
        for first in range(start, stop, width):
            last = min(first + width, stop)
            yield _Chunk(first, last, number if last == stop else None)


def _width(segment: Segment) -> int:
    longest = max(stop - start for start, stop in pairwise((segment.start, *segment.stops)))
    return next((width for width in WIDTHS if longest <= width), WIDTHS[-1])


class _Places(NamedTuple):
    """The arrays of a block: rows, valid and written; and its steps."""

    arrays: tuple[NDArray[np.int64], ...]
    steps: list[_Step]


def _places(chunks: Mapping[int, Sequence[_Chunk]], width: int, limit: int | None) -> Iterator[_Places]:
    names = list(chunks)
    columns = [[chunk for chunk in column if chunk is not None] for column in zip_longest(*chunks.values())]
    for first, last in _together([len(column) for column in columns], width, limit):
        together = list(chain.from_iterable(columns[first:last]))
        ends = np.array([[chunk.end] for chunk in together])
        rows = np.array([[chunk.start] for chunk in together]) + np.arange(width)
        valid = (rows < ends).ravel()
        arrays = np.minimum(rows, ends - 1).ravel(), valid.astype(np.int64), np.flatnonzero(valid)
        yield _Places(arrays, [_Step(len(column), _stops(names, column)) for column in columns[first:last]])


def _stops(names: Sequence[int], column: Sequence[_Chunk]) -> list[_Stop]:
    return [_Stop(at, names[at], chunk.stop) for at, chunk in enumerate(column) if chunk.stop is not None]


def _together(counts: Sequence[int], width: int, limit: int | None) -> Iterator[tuple[int, int]]:
    """Ranges of steps whose rows are not more than the limit, or which are one step."""
    first, rows = 0, 0
    for step, count in enumerate(counts):
        if limit is not None and step > first and rows + count * width > limit:
            yield first, step
            first, rows = step, 0
        rows += count * width
    yield first, len(counts)


def _run_block(block: _Block, width: int, inputs: ScanInputs, state: Tensor, out: Tensor, reached: Reached) -> None:
    chunks = _prepare(block, width, inputs)
    heads, found, first = state.shape[1], [], 0
    for count, stops in block.steps:
        part = slice(first * heads, (first + count) * heads)
        moving = state[:count].view(count * heads, *state.shape[2:])
        found.append(_step(_Parts(*(each[part] for each in chunks)), moving))
        for rank, segment, stop in stops:
            reached(segment, stop, state[rank])
        first += count
    outputs = torch.cat(found).view(-1, heads, width, out.shape[-1]).transpose(1, 2).reshape(-1, *out.shape[1:])
    rows = block.rows
    if len(block.written) < len(rows):
        rows, outputs = rows[block.written], outputs[block.written]
    out.index_copy_(0, rows, outputs.to(out.dtype))


class _Parts(NamedTuple):
    """Chunks [chunks · heads, …]: what they write to an empty state, and how they read and change the one before.

    `written`   [width, d_v], values to be written where the state is empty
    `erased`    [width, d_k], how the state before changes them
    `read`      [width, d_k], queries to the state before
    `attended`  [width, width], queries to keys of the chunk
    `keys`      [d_k, width], keys of what is written, as the end of the chunk sees them
    `decay`     [1, 1], of the state
    """

    written: Tensor
    erased: Tensor
    read: Tensor
    attended: Tensor
    keys: Tensor
    decay: Tensor


def _prepare(block: _Block, width: int, inputs: ScanInputs) -> _Parts:
    query, key, value = (_gather(each, block.rows, width) for each in inputs[:3])
    g, beta = (_gather(each[..., None], block.rows, width)[..., 0] for each in inputs[3:])
    if len(block.written) < len(block.rows):
        valid = block.valid.view(-1, 1, width)
        g, beta = g * valid, beta * valid
    groups = value.shape[1] // key.shape[1]
    key = key * inverse_norm(key)
    decay = g.cumsum(-1)
    pairs = (decay[..., :, None] - decay[..., None, :]).tril_().exp_().tril_()
    system = per_head(key @ key.mT, groups).mul(pairs).mul_(beta[..., None])
    size = per_head(inverse_norm(query) * query.shape[-1] ** -0.5, groups)
    attended = per_head(query @ key.mT, groups).mul(pairs.mul_(size))
    query, key, factor = per_head(query, groups), per_head(key, groups), decay.exp()
    solved = _inverse(system) * beta[..., None, :]
    last = decay[..., -1:]
    chunks = (
        solved @ value,
        (solved * factor[..., None, :]) @ key,
        query * (factor[..., None] * size),
        attended,
        (key * (last - decay).exp()[..., None]).mT,
        last.exp()[..., None],
    )
    return _Parts(*(each.flatten(0, 1) for each in chunks))


def _inverse(system: Tensor) -> Tensor:
    """The inverse of unit lower triangles [..., width, width]; what a tensor holds elsewhere is not read."""
    identity = torch.eye(system.shape[-1], device=system.device).expand_as(system)
    inverse: Tensor = torch.linalg.solve_triangular(system, identity, upper=False, unitriangular=True)
    return inverse


def _gather(rows: Tensor, at: Tensor, width: int) -> Tensor:
    """Rows [T, heads, d] in chunks [chunks, heads, width, d], float32."""
    return rows.index_select(0, at).float().view(-1, width, *rows.shape[1:]).transpose(1, 2).contiguous()


def inverse_norm(vectors: Tensor) -> Tensor:
    """1 / sqrt(|x|² + epsilon) [..., 1], as the mixers of Qwen3.5 and Qwen3-Next have their scan normalise."""
    return torch.rsqrt(torch.linalg.vector_norm(vectors, dim=-1, keepdim=True).square() + _EPSILON)


def per_head(tensor: Tensor, groups: int) -> Tensor:
    """Key heads [T, key heads, …] as heads: each serves so many that follow each other."""
    return tensor if groups == 1 else tensor.repeat_interleave(groups, dim=1)


def _step(chunks: _Parts, state: Tensor) -> Tensor:
    """Outputs [sequences · heads, width, d_v] of one chunk of each sequence; `state` moves on in place."""
    channels = chunks.written.shape[-1]
    written = torch.bmm(chunks.erased, state).neg_()
    written[..., :channels] += chunks.written
    outputs = torch.bmm(chunks.read, state[..., :channels])
    outputs.baddbmm_(chunks.attended, written[..., :channels])
    state.mul_(chunks.decay).baddbmm_(chunks.keys, written)
    return outputs
