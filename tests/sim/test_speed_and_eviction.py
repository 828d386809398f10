"""Two backends can reuse different tokens: speed decides which requests run at an admission, and so evictions.

`dp_3_branch` of system_prompts_clean reuses 27,904 tokens on the engine and 31,872 in the simulator (8 MiB of store).
Told the engine's step times, the simulator composes the same 173 steps. At its own speed, request 10 has finished when
request 2 arrives; slower, it still holds its KV and its working state, and the states of group 3, least recently used,
make room. Requests 25, 23, 6 and 29 then find less. With 64 MiB both speeds reuse the same 33,024 tokens.
"""

import numpy as np

from spanlab.core import placement
from spanlab.core.request import Budget, Request, Span
from spanlab.core.rules import ReuseRules
from spanlab.records import Record
from spanlab_sim.timing import ConstantTiming

from ..support.policies import make_tree_policy
from . import serving

MS = 1_000_000
FAST, SLOW = ConstantTiming(0.001), ConstantTiming(0.004)
AMPLE = 1_000
#: Two finished requests (a prompt and a state each) beside a running one (a prompt, a working state, a capture) take
#: 70 bytes and a few for output; one finished beside two running ones takes 80.
TIGHT = 75


def request(number: int, at_ms: int, document: int, question: int = 0) -> Request:
    tokens = np.arange(document, document + 10 + question, dtype=np.int32)
    return Request(number, document, (Span(tokens),), 2, at_ms * MS)


TRACE = [request(0, 0, 100), request(1, 100, 200), request(2, 120, 300), request(3, 900, 100, question=3)]


def serve(timing: ConstantTiming, total_bytes: int) -> dict[int, Record]:
    """Records by request; a token takes one byte, a state ten, and one state stands at each prompt's end."""
    budget = Budget(total_bytes=total_bytes)
    policy = make_tree_policy(ReuseRules(needs_states=True), budget=budget, placer=placement.last())
    return serving.serve(TRACE, policy, timing)[0]


def test_slower_steps_leave_more_running_at_an_admission():
    for timing, running in ((FAST, False), (SLOW, True)):
        records = serve(timing, TIGHT)
        assert (records[1].finished_s > records[2].admitted_s) is running


def test_request_running_at_an_admission_costs_a_later_hit():
    fast, slow = serve(FAST, TIGHT), serve(SLOW, TIGHT)
    different = [number for number in fast if fast[number].reused_tokens != slow[number].reused_tokens]
    assert different == [3]
    assert fast[3].reused_tokens == 10
    assert slow[3].reused_tokens == 0
    assert slow[3].lost_state_evicted + slow[3].lost_kv_evicted == 10


def test_speed_changes_no_reuse_under_an_ample_budget():
    fast, slow = serve(FAST, AMPLE), serve(SLOW, AMPLE)
    assert {n: r.reused_tokens for n, r in fast.items()} == {n: r.reused_tokens for n, r in slow.items()}
