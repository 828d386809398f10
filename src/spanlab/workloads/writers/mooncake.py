"""Mooncake trace, which AIPerf, Dynamo and SGLang replay as a timed trace: milliseconds, lengths, block ids."""

from __future__ import annotations

from spanlab.core.request import Request
from spanlab.workloads.writers.block_ids import block_trace
from spanlab.workloads.writers.formats import WRITERS, Writer

_NS_PER_MS = 1_000_000


@WRITERS.register("mooncake")
def mooncake(block_size: int = 512) -> Writer:
    """Write `timestamp` in milliseconds, as an integer if exact, and no sessions, because readers continue them."""
    return block_trace(block_size, _milliseconds)


def _milliseconds(request: Request) -> float:
    milliseconds, remainder = divmod(request.arrived_at, _NS_PER_MS)
    return request.arrived_at / _NS_PER_MS if remainder else milliseconds
