"""Classes of a user's file are plain Python, where the scheduler and the tree may be compiled."""

from spanlab.core.scheduler import BatchRules, Scheduler

from .factories import make_policy, make_request


class InTheMiddle:
    """One state in the middle of each prompt; remembers how many prompts it saw."""

    def __init__(self):
        self.prompts = 0

    def observe(self, prefill):
        self.prompts += 1

    def place(self, prefill):
        return (prefill.prompt // 2,)


class Counting:
    """A policy that counts what the scheduler asks and lets another one answer."""

    def __init__(self, policy):
        self.policy, self.matches = policy, 0

    def __getattr__(self, name):
        return getattr(self.policy, name)

    def match(self, request, now, generated=0):
        self.matches += 1
        return self.policy.match(request, now, generated)


def serve(policy, request):
    scheduler = Scheduler(policy, BatchRules(max_num_seqs=1, max_num_batched_tokens=64))
    scheduler.add(request)
    now = 0
    while (step := scheduler.schedule(now)) is not None:
        now += 1
        scheduler.complete(step, now, step.decodes or [chunk.sequence for chunk in step.chunks if chunk.last])


def test_plain_placement_places_states():
    placement = InTheMiddle()
    policy = make_policy(hybrid=True, placer=placement)
    request = make_request(range(20))
    serve(policy, request)
    assert placement.prompts == 1
    assert policy.checkpoints(request) == [10]


def test_plain_policy_is_asked_by_the_scheduler():
    policy = Counting(make_policy())
    serve(policy, make_request(range(20)))
    assert policy.matches == 1
