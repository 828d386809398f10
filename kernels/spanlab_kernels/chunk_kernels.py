"""The Triton kernel of `chunk_scan`: one program carries some columns of one state over all chunks
of its sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

# of a state per program: columns are independent, and few sequences should fill a device
COLUMNS = 16
LEAST_DOT = 16  # rows and columns: the fewest of a matrix product in Triton


@triton.jit
def _load_tile(source, row, column, rows: tl.constexpr, columns: tl.constexpr):
    """A tile of a dense matrix [rows, columns], 0 outside of it."""
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    return tl.load(source + row[:, None] * columns + column[None, :], mask=inside, other=0.0)


@triton.jit
def _scan(
    values, erase_keys, queries, scores, keys, decay, states, reported, out, firsts, lengths, reports,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, KEY_DIM: tl.constexpr, CHANNELS: tl.constexpr, COLUMNS: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr, KEY_BLOCK: tl.constexpr, COLUMN_BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (sequences · heads, blocks of columns). Products are exact to float32: three of TF32
    each."""
    sequence, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    row, key = tl.arange(0, WIDTH_BLOCK), tl.arange(0, KEY_BLOCK)
    column = tl.program_id(1) * COLUMN_BLOCK + tl.arange(0, COLUMN_BLOCK)
    at_state = states + tl.program_id(0).to(tl.int64) * (KEY_DIM * COLUMNS)
    in_state = (key < KEY_DIM)[:, None] & (column < COLUMNS)[None, :]
    in_out = (row < WIDTH)[:, None] & (column < CHANNELS)[None, :]
    offset = key[:, None] * COLUMNS + column[None, :]
    state = tl.load(at_state + offset, mask=in_state, other=0.0)
    for step in range(tl.load(lengths + sequence)):
        chunk = tl.load(firsts + step) + sequence
        at = chunk * HEADS + head
        erase_key = _load_tile(erase_keys + at * (WIDTH * KEY_DIM), row, key, WIDTH, KEY_DIM)
        query = _load_tile(queries + at * (WIDTH * KEY_DIM), row, key, WIDTH, KEY_DIM)
        score = _load_tile(scores + at * (WIDTH * WIDTH), row, row, WIDTH, WIDTH)
        of_key = _load_tile(keys + at * (KEY_DIM * WIDTH), key, row, KEY_DIM, WIDTH)
        value = _load_tile(values + at * (WIDTH * CHANNELS), row, column, WIDTH, CHANNELS)
        written = value - tl.dot(erase_key, state, input_precision="tf32x3")
        result = tl.dot(query, state, input_precision="tf32x3")
        result = tl.dot(score, written, result, input_precision="tf32x3")
        target = out + at * (WIDTH * CHANNELS) + row[:, None] * CHANNELS + column[None, :]
        tl.store(target, result, mask=in_out)
        state = tl.dot(of_key, written, state * tl.load(decay + at), input_precision="tf32x3")
        report = tl.load(reports + chunk)
        if report >= 0:
            at_report = reported + (report * HEADS + head) * (KEY_DIM * COLUMNS)
            tl.store(at_report + offset, state, mask=in_state)
    tl.store(at_state + offset, state, mask=in_state)


def scan(
    chunks: Sequence[Tensor],
    firsts: Tensor,
    lengths: Tensor,
    reports: Tensor,
    count: int,
    states: Tensor,
) -> tuple[Tensor, Tensor]:
    """Launch for `spanlab_kernels.chunk_scan.scan`: outputs, and the `count` reported states."""
    sequences, heads, key_dim, columns = states.shape
    width, channels = chunks[0].shape[2:]
    out = torch.empty_like(chunks[0], memory_format=torch.contiguous_format)
    reported = states.new_empty(count, heads, key_dim, columns)
    _scan[(sequences * heads, triton.cdiv(columns, COLUMNS))](
        *(tensor.contiguous() for tensor in chunks), states, reported, out, firsts, lengths, reports,
        HEADS=heads, WIDTH=width, KEY_DIM=key_dim, CHANNELS=channels, COLUMNS=columns,
        WIDTH_BLOCK=max(LEAST_DOT, triton.next_power_of_2(width)),
        KEY_BLOCK=max(LEAST_DOT, triton.next_power_of_2(key_dim)), COLUMN_BLOCK=COLUMNS, num_warps=4,
    )  # fmt: skip
    return out, reported
