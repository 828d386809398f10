"""Loops over a scheduler without a clock: requests are served to the ends of their outputs."""

from collections.abc import Callable, Iterable

from hypothesis import strategies as st

from spanlab.core.admission import BatchRules
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.protocol import Policy
from spanlab.core.request import Request
from spanlab.core.scheduler import Scheduler
from spanlab.core.step import ScheduledSequence, ScheduledStep, finished_after

from .factories import assert_drained, assert_within_budget

batches = st.builds(
    BatchRules,
    max_num_batched_tokens=st.integers(6, 20),
    max_num_seqs=st.integers(1, 6),
    enable_chunked_prefill=st.booleans(),
    prefill_first=st.booleans(),
)


def serve_waves(
    policy: Policy,
    waves: Iterable[Iterable[Request]],
    rules: BatchRules | None = None,
    each_step: Callable[[ScheduledStep], None] = lambda step: None,
) -> dict[int, ScheduledSequence]:
    """Serve waves of requests one after another; return the finished sequences by id."""
    scheduler, finished, now = Scheduler(policy, rules or BatchRules()), {}, 0
    for wave in waves:
        for request in wave:
            scheduler.add(request)
        while (step := scheduler.schedule(now)) is not None:
            each_step(step)
            ended = finished_after(step)
            now += 1
            scheduler.complete(step, now, ended)
            finished |= {sequence.request.id: sequence for sequence in ended}
            policy.check()
        assert scheduler.idle
    return finished


class Loop:
    """A backend without a clock: runs steps one after another and ends each output at its length.

    A subclass audits every step. `jump` is the most equal steps that may run at once.
    """

    def __init__(self, policy: TreePolicy, rules: BatchRules, jump: int = 1) -> None:
        self.policy, self.scheduler, self.jump, self.now = policy, Scheduler(policy, rules), jump, 0
        self.keys: list[tuple] = []
        self.finished: list[ScheduledSequence] = []

    def output_len(self, sequence: ScheduledSequence) -> int:
        return sequence.request.output_len

    def key(self, step: ScheduledStep) -> tuple:
        return step.key()

    def audit(self, step: ScheduledStep) -> None:
        """Properties of every step under all rules."""
        raise NotImplementedError

    def step(self) -> ScheduledStep | None:
        step = self.scheduler.schedule(self.now)
        self.policy.check()
        assert_within_budget(self.policy.store)
        if step is None:
            assert self.scheduler.idle, "requests wait and nothing was planned"
            return None
        self.audit(step)
        if step.decodes and not step.chunks:
            remaining = min(self.output_len(sequence) - sequence.generated for sequence in step.decodes)
            self.scheduler.repeat(step, min(remaining, self.jump, step.max_repeats))
        self.keys.append(self.key(step))
        yielding = step.decodes + [chunk.sequence for chunk in step.chunks if chunk.last]
        ended = [one for one in yielding if one.generated + step.repeats >= self.output_len(one)]
        self.now += step.repeats
        self.scheduler.complete(step, self.now, ended)
        self.finished += ended
        self.policy.check()
        return step

    def run(self, requests: Iterable[Request]) -> list[tuple]:
        """Serve requests; return the key of every step."""
        for request in requests:
            self.scheduler.add(request)
        while self.step() is not None:
            pass
        assert_drained(self.policy)
        return self.keys


def unroll(keys: Iterable[tuple]) -> list[tuple]:
    """Steps one by one."""
    return [(chunks, decodes) for chunks, decodes, repeats in keys for _ in range(repeats)]
