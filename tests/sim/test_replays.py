"""Replays of gaps in complete runs save the omitted work for every cut of a prompt; conversions of states cost time."""

import numpy as np
import pytest

from spanlab.core.admission import BatchRules
from spanlab.core.placement import Rule
from spanlab.core.request import Request, Span
from spanlab.core.rules import Replay, ReuseRules, StateFormat
from spanlab.model_spec import HardwareSpec
from spanlab_sim.timing import RooflineTiming

from ..support.models import make_model
from ..support.policies import make_tree_policy
from .serving import serve

SLOW = HardwareSpec("toy", 1e9, 1e15, 1.0, 1.0, 1.0, host_s=0.0)  # a FLOP takes a nanosecond
DOCUMENT, TAIL = np.arange(40, dtype=np.int32), np.arange(100, 107, dtype=np.int32)
REPLAY = Replay(True, token_flops=50, pair_flops=3, read_bytes=0)


def ttft_ns(replay: Replay | None, chunk: int, rules: ReuseRules | None = None) -> list[int]:
    """Times to first token of a document, and of 30 of its 40 tokens with a tail: its state stands at 8."""
    rules = rules or ReuseRules(needs_states=True, replay=replay)
    policy = make_tree_policy(rules, placer=Rule(lambda prefill: (8,)), kv_bytes=2)
    requests = [Request(0, 0, (Span(DOCUMENT),)), Request(1, 0, (Span(DOCUMENT[:30]), Span(TAIL)), arrived_at=10**9)]
    records, _ = serve(requests, policy, RooflineTiming(make_model(), SLOW), BatchRules(chunk, 4))
    return [round((record.first_token_s - record.arrived_s) * 1e9) for record in records.values()]


@pytest.mark.parametrize("chunk", [5, 16, 64])
def test_a_replay_saves_what_it_leaves_out(chunk):
    plain, replayed = ttft_ns(None, chunk), ttft_ns(REPLAY, chunk)
    assert plain[0] == replayed[0]
    pairs = sum(range(9, 31))
    assert plain[1] - replayed[1] == 22 * 50 + 3 * pairs


def test_states_are_converted_where_they_are_stored_and_loaded():
    form = StateFormat(10, store_flops=1000, load_flops=100)
    rules = ReuseRules(needs_states=True, state_format=form)
    plain, converted = ttft_ns(None, 64), ttft_ns(None, 64, rules)
    assert [late - early for early, late in zip(plain, converted, strict=True)] == [1000, 100]
