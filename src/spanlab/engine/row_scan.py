"""The gated delta rule over one row each of many sequences: what a scan is where all of them decode.

With k and q of length 1: S ← γ S + k ⊗ d, where d = b (v - γ Sᵀ k), and o = γ Sᵀ q + (q · k) d before its scale.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from spanlab.engine.chunk_scan import ScanInputs, inverse_norm, per_head
from spanlab.engine.kernel_scan import Kernel, installed

RowScan = Callable[[ScanInputs, Tensor], tuple[Tensor, Tensor]]
"""scan(inputs, states) -> outputs [T, heads, d_v], and the states float32 [T, heads, d_k, d_v] after a row each."""


def row_scan(device: torch.device) -> RowScan:
    """The fastest that is installed for a device."""
    kernels = installed() if device.type == "cuda" else None
    return scan_rows if kernels is None else partial(scan_rows_by_kernel, kernels.single)


def scan_rows(inputs: ScanInputs, states: Tensor) -> tuple[Tensor, Tensor]:
    """A `RowScan` in plain torch; `states` move on in place."""
    query, key, value, g, beta = (each.float() for each in inputs)
    heads, size = value.shape[1], key.shape[-1]
    pairs = torch.stack([key * inverse_norm(key), query * inverse_norm(query) * size**-0.5], dim=-2)
    pairs = per_head(pairs, heads // key.shape[1])
    decay = g.exp()[..., None]
    read = decay[..., None] * (pairs @ states)
    missing = (value - read[..., 0, :]) * beta[..., None]
    meets = (pairs[..., 0, :] * pairs[..., 1, :]).sum(-1, keepdim=True)
    moving, keys = states.flatten(0, 1), pairs[..., 0, :].flatten(0, 1)
    moving.mul_(decay.reshape(-1, 1, 1)).baddbmm_(keys[..., None], missing.flatten(0, 1)[:, None])
    return (read[..., 1, :] + meets * missing).to(inputs.value.dtype), states


def scan_rows_by_kernel(kernel: Kernel, inputs: ScanInputs, states: Tensor) -> tuple[Tensor, Tensor]:
    """A `RowScan` by a kernel for single rows of a batch."""
    query, key, value, g, beta = (each[:, None] for each in inputs)
    query, key = (each.repeat_interleave(value.shape[2] // each.shape[2], dim=2) for each in (query, key))
    found, after = kernel(
        query,
        key,
        value,
        g=g,
        beta=beta,
        initial_state=states,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return found[:, 0].to(value.dtype), after.float()
