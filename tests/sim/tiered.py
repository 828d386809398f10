"""Pools of blocks over lower tiers, with sizes and times that can be counted by hand, for the tests of tiers.

A block has four tokens and as many bytes, one byte a token. A computed token costs a microsecond.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from spanlab.core.admission import BatchRules
from spanlab.core.policies.block_pool import BlockPool, BlockRules, BlockStore
from spanlab.core.policies.blocks import BlockPolicy
from spanlab.core.policies.tiered import TieredPolicy, TieredRecord, TieredRunRow, tiered_record, tiered_row
from spanlab.core.request import Request, Span
from spanlab.core.tiers import Link, Tier, TierRules, Tiers
from spanlab_sim.bounds import PrefillTime
from spanlab_sim.run import simulate
from spanlab_sim.timing import ConstantTiming

SIZE = 4
GIB = 1 << 30
MICROSECOND = 1_000
TIMING = ConstantTiming(seconds_per_computed_token=1e-6)
ONE_AT_A_TIME = BatchRules(max_num_seqs=1)


def rules(blocks: int, bytes_per_us: float = math.inf, **more) -> TierRules:
    """A tier of so many blocks; a byte is a token of KV, so a rate is in tokens per microsecond."""
    return TierRules(gib=blocks * SIZE / GIB, bandwidth_gb_s=bytes_per_us / 1e3, **more)


def make_blocks(blocks: int, states: str = "none") -> BlockPolicy:
    """A pool without tiers."""
    return BlockPolicy(BlockRules(SIZE, states), BlockStore(BlockPool(blocks), SIZE, SIZE))


def make_policy(
    blocks: int, *tiers: TierRules, always: bool = True, states: str = "none", layers: int = 4, itemsize: int = 2
) -> TieredPolicy:
    """A pool of so many blocks over tiers."""
    policy = make_blocks(blocks, states)
    tiers_made = [
        Tier(f"tier{number}", tier_rules, SIZE, tier_rules.least_bytes(SIZE, itemsize))
        for number, tier_rules in enumerate(tiers)
    ]
    links = [Link(tier_rules.bytes_per_s, tier_rules.latency_s) for tier_rules in tiers]
    steps = None if always else PrefillTime(TIMING, BatchRules(), policy.rules)
    return TieredPolicy(policy, Tiers(tiers_made, links), steps, layers)


def request(id: int, tokens: Sequence[int], at_us: float = 0.0, output: int = 1) -> Request:
    return Request(id, 0, (Span(np.array(list(tokens), np.int32)),), output, arrived_at=round(at_us * MICROSECOND))


def serve(
    requests: Sequence[Request], policy: BlockPolicy | TieredPolicy, batch: BatchRules | None = None, **options
) -> tuple[list[TieredRecord], TieredRunRow]:
    """Records in order of the requests' ids, and the run; pool and tiers are recounted after each step."""
    tiered = policy if isinstance(policy, TieredPolicy) else None
    records = []

    def finished(record):
        records.append(record if tiered is None else tiered_record(record, tiered))

    def each_step(step, now, result):
        policy.check()

    row = simulate(
        requests, policy, batch or BatchRules(), TIMING, finished, loads=tiered, on_step=each_step, **options
    )
    policy.check()
    return sorted(records, key=lambda one: one.request_id), row if tiered is None else tiered_row(row, tiered)


def times_us(record: TieredRecord) -> tuple[float, float]:
    """Microseconds of admission and of the first token."""
    return round(record.admitted_s * 1e6, 3), round(record.first_token_s * 1e6, 3)


def apart(requests: Sequence[Request], gap_us: float) -> list[Request]:
    """The same requests, each so long after the one before."""
    return [replace(request, arrived_at=round(index * gap_us * MICROSECOND)) for index, request in enumerate(requests)]
