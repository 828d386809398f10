"""Runs of a pool of hashed blocks that jump over steps equal runs that look at everything in every step."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spanlab.core.admission import BatchRules, Speculation
from spanlab.core.policies.block_pool import BlockPool, BlockRules, BlockStore, GroupRule
from spanlab.core.policies.blocks import BlockPolicy
from spanlab.core.policies.chunks import ChunkPolicy
from spanlab.core.request import UNLIMITED, Request, Span
from spanlab.model_spec import HardwareSpec
from spanlab_sim.timing import ConstantTiming, RooflineTiming

from ..support.models import make_model
from .serving import serve

SIZE = 4
TIMING = ConstantTiming(1e-6, 4e-6, 2e-6)
READS = RooflineTiming(make_model(), HardwareSpec("toy", 1e15, 1e9, 1.0, 1.0, 1.0, host_s=3e-6))  # of all contexts
KINDS = {
    "full": {},
    "chunks": {},
    "ahead": {"ahead": True},
    "drafter": {"drafter": 1},
    "states": {"states": "align"},
    "all_states": {"states": "align", "state_groups": 2, "retention": None},
    "inner_states": {"states": "align", "retention": 8, "inner_states": True},
    "window": {"groups": (GroupRule("full", SIZE), GroupRule("window", SIZE, 6))},
}
EXAMPLES = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


class Thorough:
    """Matches a refused prompt in every step, allocates block by block, and publishes each block at once."""

    def futile_steps(self, request, batch):
        return 0

    def match(self, request, now, generated=0):
        self._refusal = None
        return super().match(request, now, generated)

    def allocate(self, plan, now, generated=0, drafts=0):
        allocation = super().allocate(plan, now, generated, drafts)
        if allocation is not None:
            allocation.alone_from = UNLIMITED
        return allocation

    def append(self, allocation, start, stop, drafts=0):
        allocation.room = 0
        return super().append(allocation, start, stop, drafts)

    def spare_steps(self, batch):
        return 0


class ThoroughBlocks(Thorough, BlockPolicy):
    """`BlockPolicy`, block by block."""


class ThoroughChunks(Thorough, ChunkPolicy):
    """`ChunkPolicy`, block by block."""


@st.composite
def requests(draw):
    """Prompts of few tokens, which share beginnings; some continue a known output of another."""
    served, clock = [], 0
    for id in range(draw(st.integers(2, 9))):
        clock += 1_000 * draw(st.sampled_from([0, 0, 1, 5, 30]))
        tokens = draw(st.lists(st.integers(0, 1), min_size=1, max_size=14))
        length = draw(st.integers(1, 20))
        output = draw(st.none() | st.lists(st.integers(0, 1), min_size=length, max_size=length))
        earlier = [other for other in served if other.output is not None]
        if earlier and draw(st.booleans()):
            other = earlier[draw(st.integers(0, len(earlier) - 1))]
            tokens = [*other.tokens.tolist(), *other.output.tolist(), *tokens]
        request = asked(id, tokens, length, output, clock)
        served.append(replace(request, priority=draw(st.integers(0, 1))))
    return served


def asked(id, tokens, length, output=None, clock=0):
    known = None if output is None else np.array(output, np.int32)
    return Request(id, 0, (Span(np.array(tokens, np.int32)),), length, clock, output=known)


#: The second prompt has one block too many, until the first request fills a block that it contains.
CONTINUED = [asked(0, range(8), 8, range(8, 16)), asked(1, range(13), 1, clock=9_000)]


def served(cls, kind, requests, batch, spare, jump):
    rules = BlockRules(SIZE, **KINDS[kind])
    longest = max(request.num_tokens + request.output_len for request in requests)
    blocks = (longest // SIZE + 3) * len(rules.layout) + 1 + spare
    return served_by(cls(rules, BlockStore(BlockPool(blocks), 1, 1)), requests, batch, jump, READS)


def served_by(policy, requests, batch, jump, timing=TIMING):
    records, row = serve(requests, policy, timing, batch, jump=jump, on_step=lambda *step: policy.check())
    same = ("makespan_s", "busy_s", "steps", "preemptions", "inserted_bytes", "evicted_bytes")
    resident = [f"{content}_resident_{value}_bytes" for content in ("kv", "state") for value in ("mean", "peak")]
    return list(records.items()), {key: getattr(row, key) for key in (*same, *resident)}


@pytest.mark.parametrize("kind", KINDS)
@EXAMPLES
@given(requests=requests(), budget=st.sampled_from([3, 8, 64]), seats=st.integers(1, 5), spare=st.integers(0, 12))
def test_a_run_that_jumps_is_one_that_looks_at_every_block(kind, requests, budget, seats, spare):
    drafts = Speculation(draft_tokens=1) if kind == "drafter" else Speculation()
    batch = BatchRules(
        max(budget, seats * (1 + drafts.draft_tokens)), seats, async_scheduling=kind == "ahead", speculation=drafts
    )
    jumps, looks = (ChunkPolicy, ThoroughChunks) if kind == "chunks" else (BlockPolicy, ThoroughBlocks)
    jumped = served(jumps, kind, requests, batch, spare, jump=True)
    assert jumped == served(looks, kind, requests, batch, spare, jump=False)


def test_a_block_of_a_known_output_may_make_room_for_a_refused_prompt():
    jumped, stepped = (
        served_by(cls(BlockRules(SIZE), BlockStore(BlockPool(4), 1, 1)), CONTINUED, BatchRules(), cls is BlockPolicy)
        for cls in (BlockPolicy, ThoroughBlocks)
    )
    assert jumped == stepped
    assert dict(jumped[0])[1].reused_tokens == 12
