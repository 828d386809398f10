"""A step that preempted admits no request, even if the freed memory would suffice (vLLM's rule)."""

import pytest

from spanlab.core.admission import BatchRules
from spanlab.core.placement import every_n
from spanlab.core.scheduler import Scheduler
from spanlab.core.step import finished_after

from .factories import make_budget, make_policy, make_request

PROMPTS = [[0, 1, 50, 51, 52], [*range(9), *range(150, 155)], [*range(5), *range(250, 256)]]
OUTPUTS = [2, 4, 3]
BUDGETS = range(60, 100, 2)  # bytes of KV and states together


def scheduler_of(budget: int) -> Scheduler:
    """Three requests that share beginnings on a hybrid, none of them served yet."""
    policy = make_policy(make_budget(total=budget), hybrid=True, placer=every_n(4), block_size=4, fixed_blocks=True)
    scheduler = Scheduler(policy, BatchRules(max_num_batched_tokens=3, max_num_seqs=4))
    for id, (prompt, output) in enumerate(zip(PROMPTS, OUTPUTS, strict=True)):
        scheduler.add(make_request(prompt, id=id, output=output))
    return scheduler


def admitted_while_preempting(budget: int) -> tuple[int, list[int]]:
    """How many steps preempted, and the requests that these steps computed and that did not run before them."""
    scheduler, preempting, admitted = scheduler_of(budget), 0, []
    for now in range(200):
        waiting = list(scheduler.waiting)
        before = {sequence: sequence.preemptions for sequence in (*waiting, *scheduler.running)}
        step = scheduler.schedule(now)
        if step is None:
            break
        preempted = [sequence for sequence, count in before.items() if sequence.preemptions > count]
        preempting += bool(preempted)
        if preempted:
            admitted += [c.sequence.request.id for c in step.chunks if c.sequence in (*waiting, *preempted)]
        scheduler.complete(step, now + 1, finished_after(step))
    assert scheduler.idle
    return preempting, admitted


@pytest.mark.parametrize("budget", BUDGETS)
def test_preempting_step_admits_no_request(budget: int):
    assert admitted_while_preempting(budget)[1] == []


def test_budgets_of_these_tests_do_preempt():
    assert sum(admitted_while_preempting(budget)[0] for budget in BUDGETS) >= 3
