"""A trace for guidellm's replay profile: kind=mooncake reads its blocks, kind=trace_synthetic only its lengths."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from spanlab.core.request import Request
from spanlab.workloads.writers.block_ids import BlockIds
from spanlab.workloads.writers.formats import WRITERS, Line, Writer


@WRITERS.register("guidellm")
def guidellm(block_size: int = 512) -> Writer:
    """Write a Mooncake trace with `timestamp` in seconds, as guidellm reads it."""
    ids = BlockIds(block_size)

    def write(requests: Iterable[Request]) -> Iterator[Line]:
        for request in requests:
            yield {
                "timestamp": request.arrived_at / 1e9,
                "input_length": request.num_tokens,
                "output_length": request.output_len,
                "hash_ids": ids.of(request),
            }

    return write
