"""Recurrent layers of a forward in which every row decodes: states are found by one index into their slab.

The index is all that differs from step to step, and lies where it is shipped to. So what was captured once serves every
later batch of as many rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from spanlab.engine.chunk_scan import ScanInputs
from spanlab.engine.mixer_calls import Convolution, LayeredRows
from spanlab.engine.recurrent import Piece
from spanlab.engine.row_scan import row_scan
from spanlab.engine.slab import NOBODY
from spanlab.engine.slot_pool import ALL
from spanlab.engine.state_pool import StatePool
from spanlab_kernels.attention import Send, to_device


class DecodeRecurrence(LayeredRows):
    """One forward's recurrent layers: built once, called by each of them.

    `pieces`  of one row each, in the order of rows; their states run, so that they lie in the pool's slab
    `rows`    of the forward; those behind the pieces' go on from the state of nobody
    `send`    brings its numbers to the device, before a layer runs
    """

    def __init__(
        self, pool: StatePool, pieces: Sequence[Piece], rows: int, device: torch.device, send: Send = to_device
    ) -> None:
        self._pool, self._pieces, self._scan = pool, pieces, row_scan(device)
        places = np.full(rows, NOBODY)
        places[: len(pieces)] = pool.rows(piece.slot for piece in pieces)
        (self._places,) = send([places], torch.int64, device)

    def convolve(self, layer: int, convolution: Convolution, rows: Tensor, *given: object) -> Tensor:
        """As `LayeredRows`: every row stands behind its own last inputs, in a batch of its own."""
        held = self._pool.slab.part("conv", layer)
        before = held.index_select(0, self._places)
        inputs = torch.cat([before[..., 1:], rows[0].mT[..., None]], dim=-1)
        held.index_copy_(0, self._places, inputs)
        return convolution(inputs, *given)[..., -1].mT[None]

    def scan(self, layer: int, inputs: ScanInputs) -> Tensor:
        """As `LayeredRows`."""
        held = self._pool.slab.part("recurrent", layer)
        out, after = self._scan(inputs, held.index_select(0, self._places))
        held.index_copy_(0, self._places, after)
        return out

    def done(self) -> None:
        """As `LayeredRows`; a state that is to be kept is copied, in all layers at once."""
        for piece in self._pieces:
            if piece.keep is not None:
                self._pool.copy(ALL, piece.slot, piece.keep)
            piece.done(self._pool)
