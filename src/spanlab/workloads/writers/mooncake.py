"""Mooncake trace, which AIPerf, Dynamo and SGLang replay as a timed trace: milliseconds, lengths, block ids."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from spanlab.core.request import Request
from spanlab.workloads.writers.block_ids import BlockIds
from spanlab.workloads.writers.formats import WRITERS, Line, Writer

_NS_PER_MS = 1_000_000


@WRITERS.register("mooncake")
def mooncake(block_size: int = 512) -> Writer:
    """Write `timestamp` in milliseconds, as an integer if exact, and no sessions, because readers continue them."""
    ids = BlockIds(block_size)

    def write(requests: Iterable[Request]) -> Iterator[Line]:
        for request in requests:
            milliseconds, remainder = divmod(request.arrived_at, _NS_PER_MS)
            yield {
                "timestamp": request.arrived_at / _NS_PER_MS if remainder else milliseconds,
                "input_length": request.num_tokens,
                "output_length": request.output_len,
                "hash_ids": ids.of(request),
            }

    return write
