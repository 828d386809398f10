"""Building blocks of attention on a CPU: torch's flash attention, and rotation of keys during their copy."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from spanlab_kernels.angles import AngleTable
from spanlab_kernels.rope import reference as rope

ROTATED = 512  # keys at once, so that intermediate results stay in cache

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class Angles(NamedTuple):
    """Cosine and sine of the rotation of rows, by channel, float32 [rows, 1, rotary_dim]."""

    cos: Tensor
    sin: Tensor


def angles_at(shift: Tensor, table: AngleTable, interleaved: bool) -> Angles:
    """Angles of rows for signed integer shifts [rows]."""
    return Angles(*rope.by_channel(*table.lookup(shift[:, None]), interleaved=interleaved))


def folded(query: Tensor, kv_heads: int, angles: Angles | None, interleaved: bool) -> Tensor:
    """Queries [T, Hq, D], rotated if `angles` is set, as [1, kv_heads, T · heads per kv head, D], row by row.

    All heads that share a kv head become rows of the kernel, so that it reads keys once.
    """
    rows = query.unflatten(1, (kv_heads, -1))
    out = query.new_empty(kv_heads, len(rows), *rows.shape[2:])
    if angles is None:
        out.copy_(rows.transpose(0, 1))
    else:
        cos, sin = (of_rows[:, None] for of_rows in angles)
        rope.rotate_by(rows, cos, sin, interleaved=interleaved, out=out.transpose(0, 1))
    return out.flatten(1, 2)[None]


def unfolded(x: Tensor, heads: int) -> Tensor:
    """Results [T · heads per kv head, kv_heads, …] as [T, Hq, …]."""
    return x.unflatten(0, (-1, heads)).transpose(1, 2).flatten(1, 2)


def rotated_keys(pool: Tensor, slot: Tensor, position: Tensor, table: AngleTable, interleaved: bool) -> Tensor:
    """Keys of `pool` at slots int64 [K], rotated by positions int64 [K], which are not negative."""
    out = pool.new_empty((len(slot), *pool.shape[1:]))
    angles = _by_position(table, interleaved)
    for block, block_slot, block_position in zip(
        out.split(ROTATED), slot.split(ROTATED), position.split(ROTATED), strict=True
    ):
        cos, sin = angles.index_select(0, block_position).chunk(2, -1)
        rope.rotate_by(pool.index_select(0, block_slot), cos, sin, interleaved=interleaved, out=block)
    return out


@lru_cache(maxsize=2)
def _by_position(table: AngleTable, interleaved: bool) -> Tensor:
    """Cosine and sine of every channel, concatenated, [positions, 1, 2 · rotary_dim]; cached by table."""
    return torch.cat(rope.by_channel(table.cos, table.sin, interleaved=interleaved), -1)[:, None]
