"""A trace for guidellm's replay profile: kind=mooncake reads its blocks, kind=trace_synthetic only its lengths."""

from __future__ import annotations

from spanlab.workloads.writers.block_ids import block_trace
from spanlab.workloads.writers.formats import WRITERS, Writer


@WRITERS.register("guidellm")
def guidellm(block_size: int = 512) -> Writer:
    """Write a Mooncake trace with `timestamp` in seconds, as guidellm reads it."""
    return block_trace(block_size, lambda request: request.arrived_at / 1e9)
