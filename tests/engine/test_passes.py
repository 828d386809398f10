"""Which chunks of a step run together, and which wait for a copy."""

import pytest

from spanlab.core.admission import BatchRules
from spanlab.core.plan import PrefillRange, RepairPass
from spanlab.core.scheduler import Scheduler
from spanlab.core.step import ScheduledChunk, ScheduledStep, of_span, passes

from .factories import HEAD, arm, document, make_policy, make_request, make_small, text

PROMPT = (text(HEAD, 9), document(0, 20), text(5, 6), document(1, 33), text(6, 8))


def label(chunk: ScheduledChunk) -> str:
    """Request and cache span of a chunk; -1 for a repair."""
    return f"{chunk.sequence.request.id}:{chunk.work.cache_span if isinstance(chunk.work, PrefillRange) else -1}"


def planned(name: str, count: int = 1, prompt=PROMPT, budget: int = 10**6) -> tuple[ScheduledStep, list[list[str]]]:
    """The first step of so many equal cold requests, and its forwards: for each chunk the request and its work."""
    policy = make_policy(make_small(), arm(name))
    scheduler = Scheduler(policy, BatchRules(max_num_batched_tokens=budget))
    for id in range(count):
        scheduler.add(make_request(id, *prompt))
    step = scheduler.schedule(0)
    rules = policy.rules
    forwards = passes(step, rules.copies or rules.repair.kind != "none", rules.repair.measured)
    return step, [[label(c) for c in chunks] for chunks in forwards]


AT_ONCE = [["0:0", "0:1", "0:2", "0:3", "0:4"]]
SPANS_FIRST = ["0:0", "0:1", "0:3", "1:0", "1:1", "1:3"]
PLANS = {
    "radix": [["0:0", "1:0"]],
    "pic": AT_ONCE,  # nothing is copied
    "as_seen": AT_ONCE,
    "pic_turned": [["0:0", "0:1", "1:0", "1:1"], ["0:2", "0:3", "1:2", "1:3"], ["0:4", "1:4"]],
    "lego_link_16": [SPANS_FIRST, ["0:-1", "1:-1"], ["0:4", "1:4"]],
    "random_16": [SPANS_FIRST, ["0:-1", "1:-1"], ["0:4", "1:4"]],
    "cache_blend_15": [SPANS_FIRST, ["0:-1"], ["1:-1"], ["0:4", "1:4"]],  # a measured repair runs alone
}


@pytest.mark.parametrize("name", PLANS)
def test_what_reads_copies_or_repairs_waits_for_them(name):
    assert planned(name, 1 if PLANS[name] is AT_ONCE else 2)[1] == PLANS[name]


def test_every_chunk_runs_once():
    for name in ("none", "pic", "pic_turned", "lego_link_16", "cache_blend_15", "ape", "as_seen_blend_15"):
        step, forwards = planned(name, 3)
        assert sorted(c for chunks in forwards for c in chunks) == sorted(label(c) for c in step.chunks)


def make_step(name: str, decodes: int) -> ScheduledStep:
    """A step with that many who decode."""
    step = planned(name)[0]
    step.decodes = [step.chunks[0].sequence] * decodes
    return step


def test_decodes_join_the_first_forward_or_a_separate_one():
    assert passes(ScheduledStep([], [], []), True, True) == []
    decoding = make_step("pic", 2)
    assert len(passes(decoding, False, False)) == 1
    assert passes(ScheduledStep([], decoding.decodes, []), False, False) == [[]]
    blend = make_step("cache_blend_15", 1)
    repair = [chunk for chunk in blend.chunks if isinstance(chunk.work, RepairPass)]
    assert passes(ScheduledStep(repair, blend.decodes, []), True, True) == [[], repair]
    assert passes(ScheduledStep(repair, [], []), True, True) == [repair]


def test_a_repair_is_no_span():
    step = planned("lego_link_16")[0]
    assert [of_span(chunk) for chunk in step.chunks] == [False, True, True, False, False]
