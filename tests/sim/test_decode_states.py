"""States of outputs in whole runs: jumps pay for them as single steps do, and the next turn reads them."""

import numpy as np
import pytest

from spanlab.core.admission import BatchRules
from spanlab.core.placement import last
from spanlab.core.request import Request, Span
from spanlab.core.rules import Progress, ReuseRules
from spanlab.model_spec import HardwareSpec
from spanlab_sim.timing import RooflineTiming

from ..support.models import make_model
from ..support.policies import make_tree_policy
from .serving import serve

STATE, UNIT = 40, 4
SLOW_MEMORY = HardwareSpec("toy", 1e15, 1e9, 1.0, 1.0, 1.0, host_s=3e-6)  # every byte of a state takes a nanosecond
TURN, ANSWER = np.arange(10, dtype=np.int32), np.arange(50, 70, dtype=np.int32)


def asked(tokens, output, id=0, at=0):
    return Request(id, 0, (Span(np.array(tokens, np.int32)),), len(output), at, output=np.array(output, np.int32))


def served(requests, progress, jump):
    steps, rules = [], ReuseRules(needs_states=True, grid=UNIT, progress=progress)
    policy = make_tree_policy(rules, placer=last(), kv_bytes=2, state_bytes=STATE, block_size=UNIT)
    ran = lambda step, now, result: steps.append((now, step.repeats))  # noqa: E731
    timing = RooflineTiming(make_model(), SLOW_MEMORY)
    records, row = serve(requests, policy, timing, BatchRules(64, 4), jump=jump, on_step=ran)
    return records, row, steps, policy


@pytest.mark.parametrize(
    "progress", [Progress(newest=4), Progress(interval=8), Progress(interval=12, newest=8)], ids=str
)
def test_jumps_pay_for_states_as_steps_do(progress):
    requests = [asked(TURN, ANSWER), asked(TURN[:7] + 100, ANSWER[:13], 1)]
    jumped, jumped_row, jumps, _ = served(requests, progress, jump=True)
    stepped, stepped_row, steps, policy = served(requests, progress, jump=False)
    assert jumped == stepped
    assert (jumped_row.makespan_s, jumped_row.steps) == (stepped_row.makespan_s, stepped_row.steps)
    assert len(jumps) < len(steps)
    assert policy.store.state_cached == sum(record.captured_states for record in stepped.values()) * STATE


def test_each_state_of_an_output_takes_its_bytes():
    """Both runs compute the same tokens; the second one writes states at 12, 16, 20, 24 and 28 of 29 tokens."""
    without, with_states = (
        served([asked(TURN, ANSWER)], progress, jump=False)[1] for progress in (None, Progress(interval=4))
    )
    assert round((with_states.makespan_s - without.makespan_s) * 1e9) == 5 * STATE


@pytest.mark.parametrize(
    ("progress", "reused"), [(None, 8), (Progress(newest=4), 28), (Progress(interval=8), 24), (Progress(chunk=4), 8)]
)
def test_a_next_turn_goes_on_from_the_output(progress, reused):
    requests = [asked(TURN, ANSWER), asked([*TURN, *ANSWER, 1, 2, 3], [0], 1, at=10**9)]
    records, *_ = served(requests, progress, jump=True)
    assert records[1].reused_tokens == reused
