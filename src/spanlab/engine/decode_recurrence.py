"""Recurrent layers of a decode-only forward: one index tensor gathers the states from their slab.

Only the index differs between steps, and it is in the transfer's buffer. So a captured graph serves every later batch
with the same number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from spanlab.engine.chunk_scan import ScanInputs
from spanlab.engine.mixer_calls import Convolution, LayeredRows
from spanlab.engine.recurrent import StateScan
from spanlab.engine.row_scan import row_scan
from spanlab.engine.slab import PADDING_ROW
from spanlab.engine.slot_pool import ALL
from spanlab.engine.state_pool import StatePool
from spanlab_kernels.attention import Send, to_device


class DecodeRecurrence(LayeredRows):
    """The recurrent layers of one forward: built once, called by every layer.

    `scans`  one per row, of one row each, in row order; their states are in the pool's slab
    `rows`   number of rows of the forward; rows after the scans' are padding
    `send`   copies the index to the device before the first layer runs
    """

    def __init__(
        self, pool: StatePool, scans: Sequence[StateScan], rows: int, device: torch.device, send: Send = to_device
    ) -> None:
        self._pool, self._scans, self._scan = pool, scans, row_scan(device)
        slab_rows = np.full(rows, PADDING_ROW)
        slab_rows[: len(scans)] = pool.rows(scan.slot for scan in scans)
        (self._slab_rows,) = send([slab_rows], torch.int64, device)

    def convolve(self, layer: int, convolution: Convolution, rows: Tensor, *args: object) -> Tensor:
        """See `LayeredRows`; every row is one batch element after its last conv inputs."""
        conv_states = self._pool.slab.tensor("conv", layer)
        before = conv_states.index_select(0, self._slab_rows)
        inputs = torch.cat([before, rows[0].mT[..., None]], dim=-1)
        conv_states.index_copy_(0, self._slab_rows, inputs[..., 1:])
        return convolution(inputs, *args)[..., -1].mT[None]

    def scan(self, layer: int, inputs: ScanInputs) -> Tensor:
        """See `LayeredRows`."""
        states = self._pool.slab.tensor("recurrent", layer)
        out, after = self._scan(inputs, states.index_select(0, self._slab_rows))
        states.index_copy_(0, self._slab_rows, after)
        return out

    def finish(self) -> None:
        """See `LayeredRows`; captured states are copied in all layers at once."""
        for scan in self._scans:
            if scan.copy_slot is not None:
                self._pool.copy(ALL, scan.slot, scan.copy_slot)
            scan.finish(self._pool)
