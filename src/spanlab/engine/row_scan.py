"""The gated delta rule over one row of each sequence: the scan of a decode step.

With k and q of length 1: S ← γ S + k ⊗ d, where d = b (v - γ Sᵀ k), and o = γ Sᵀ q + (q · k) d before its scale.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from spanlab.engine.chunk_scan import ScanInputs, inverse_norm, per_head
from spanlab.engine.kernel_scan import Kernel, installed_kernels, run_kernel

RowScan = Callable[[ScanInputs, Tensor], tuple[Tensor, Tensor]]
"""scan(inputs, states) -> outputs [T, heads, d_v], and float32 states [T, heads, d_k, d_v] after one row each."""


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


def scan_rows_by_kernel(kernel: Kernel, inputs: ScanInputs, states: Tensor) -> tuple[Tensor, Tensor]:
    """A `RowScan` by a kernel for batches of single rows."""
    outputs, after = run_kernel(kernel, ScanInputs(*(tensor[:, None] for tensor in inputs)), states)
    return outputs[:, 0].to(inputs.value.dtype), after.float()
