"""Classes of a user's file are plain Python, where the scheduler and the tree may be compiled."""

from spanlab.core.admission import BatchRules

from .factories import make_policy, make_request
from .steps import serve_waves

RULES = BatchRules(max_num_seqs=1, max_num_batched_tokens=64)


class InTheMiddle:
    """One state in the middle of each prompt; remembers how many prompts it saw."""

    def __init__(self):
        self.prompts = 0

    def observe(self, prefill):
        self.prompts += 1

    def place(self, prefill):
        return (prefill.prompt // 2,)


class Counting:
    """A policy that counts the calls of the scheduler and forwards them to another policy."""

    def __init__(self, policy):
        self.policy, self.matches = policy, 0

    def __getattr__(self, name):
        return getattr(self.policy, name)

    def match(self, request, now, generated=0):
        self.matches += 1
        return self.policy.match(request, now, generated)


def test_plain_placement_places_states():
    placement = InTheMiddle()
    policy = make_policy(hybrid=True, placer=placement)
    request = make_request(range(20))
    serve_waves(policy, [[request]], RULES)
    assert placement.prompts == 1
    assert policy.checkpoints(request) == [10]


def test_plain_policy_is_asked_by_the_scheduler():
    policy = Counting(make_policy())
    serve_waves(policy, [[make_request(range(20))]], RULES)
    assert policy.matches == 1
