"""A simulated replay of a server: the times of the first and last token of each request of a
log."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import simpy
from numpy.typing import NDArray

from spanlab.core.admission import BatchRules
from spanlab.core.ahead import make_scheduler
from spanlab.core.ledger import NoLedger
from spanlab.core.policies.block_pool import BlockPool, BlockRules, BlockStore, StateMode
from spanlab.core.policies.blocks import BlockPolicy
from spanlab.core.policies.chunks import CountedBlocks, UnsharedPolicy
from spanlab.core.request import Request
from spanlab.core.scheduler import LockstepScheduler
from spanlab.core.step import (
    ScheduledSequence,
    ScheduledStep,
    StepFeatures,
    StepResult,
    features,
    finished_after,
)
from spanlab_sim.routing import Observer
from spanlab_sim.server import Replica, Server, Source
from spanlab_sim.timing import Nanoseconds


class Run(NamedTuple):
    """Equal steps in a row: what each rank did in the first one, how many, and nanoseconds of their
    start and end."""

    ranks: list[StepFeatures]
    repeats: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class Times:
    """The times of the requests of a log, by request, and the totals of the replay.

    `admitted_ns`, `first_ns`, `last_ns`  int64, when it got memory, and when its first and its last
                                          token were out
    `reused`               int64, tokens of its prompt that its first start did not compute
    `preemptions`          in all
    `steps`                in all, equal ones counted one by one
    `blocks`               most blocks of one rank that were in use at once
    `runs`                 the steps themselves, in order
    """

    admitted_ns: NDArray[np.int64]
    first_ns: NDArray[np.int64]
    last_ns: NDArray[np.int64]
    reused: NDArray[np.int64]
    preemptions: int
    steps: int
    blocks: int
    runs: list[Run]


@dataclass(frozen=True)
class Memory:
    """One rank's pool: usable blocks, tokens in each, and bytes of one.

    `state_groups`  blocks that one recurrent state takes; 0 in a model of attention layers alone
    `caches`        whether prefixes are cached
    `shares`        whether the tokens of prompts are known, so that requests with equal beginnings
                    share blocks
    `retention`     states that the cache keeps, as in `BlockRules`
    `state_bytes`   bytes of a recurrent state that a step reads from the cache or writes to it
    """

    blocks: int
    block_size: int
    block_bytes: int
    state_groups: int = 0
    caches: bool = True
    shares: bool = False
    retention: int | None = 0
    state_bytes: int = 0

    def policy(self, ahead: bool = False) -> UnsharedPolicy | BlockPolicy:
        """Return a policy that allocates the blocks; `ahead`: a step is planned while the previous
        one runs.

        States of a cache lie on block boundaries, and shared blocks are found by their tokens;
        otherwise counting blocks suffices.
        """
        if self.caches and (self.state_groups or self.shares):
            states: StateMode = "align" if self.state_groups else "none"
            rules = BlockRules(
                self.block_size, states, self.state_groups, self.retention, ahead=ahead
            )
            pool = BlockStore(BlockPool(self.blocks), self.block_bytes, self.block_bytes)
            return BlockPolicy(rules, pool, ledger=NoLedger())  # causes of misses are not reported
        store = CountedBlocks(self.blocks, self.block_bytes)
        return UnsharedPolicy(self.block_size, store, states=self.state_groups, caches=self.caches)

    def blocks_for(self, request: Request) -> int:
        """Return the most blocks that one request may hold."""
        need, null_block = self.policy().need(request), 1
        return (need.kv_bytes + need.state_bytes) // self.block_bytes - null_block


class LockstepTiming(Protocol):
    """Durations of steps that all ranks take together, as `FittedTiming` has them."""

    def step_together(self, ranks: Ordered[StepFeatures]) -> int:
        """Return the nanoseconds of a step."""

    def span_together(self, ranks: Ordered[StepFeatures], k: int) -> Nanoseconds:
        """Return the durations of k equal decode steps."""


class LockstepBackend:
    """Runs the steps of all ranks by a timing model: a step takes as long as its slowest rank.

    `state_bytes`  of a recurrent state that a step reads from the cache or writes to it
    """

    def __init__(
        self, timing: LockstepTiming, scheduler: LockstepScheduler, state_bytes: int = 0
    ) -> None:
        self._timing, self._scheduler, self._state_bytes = timing, scheduler, state_bytes
        self.ranks: list[StepFeatures] = []  # of the last step

    def resume(self) -> None:
        """Do nothing: the duration of a modelled step does not depend on when it begins."""

    def execute(self, step: ScheduledStep, deadline_ns: int | None) -> StepResult:
        """As `ModelledBackend.execute`, for the ranks' parts of the step."""
        self.ranks = ranks = [
            features(rank_step, self._state_bytes) for rank_step in self._scheduler.rank_steps
        ]
        remaining = min(
            [sequence.request.output_len - sequence.generated for sequence in step.decodes],
            default=1,
        )
        times = 1 if step.chunks else min(remaining, step.max_repeats)
        if times == 1:
            return StepResult(self._timing.step_together(ranks), finished_after(step))
        ends = self._timing.span_together(ranks, times).cumsum()
        if deadline_ns is not None:
            times = min(times, 1 + int(ends.searchsorted(deadline_ns, side="right")))
        return StepResult(
            int(ends[times - 1]), finished_after(step, times), times, ends=ends[:times]
        )

    def completed(self, step: ScheduledStep) -> None:
        """Do nothing: this backend stores no KV."""

    def close(self) -> None:
        """Do nothing: this backend holds no memory."""


def serve_log(
    requests: Ordered[Request],
    memory: Memory,
    rules: BatchRules,
    timing: LockstepTiming,
    ranks: int = 1,
) -> Times:
    """Serve requests in order of arrival; their ids are the numbers below their count.

    Without `memory.shares`, requests must share no tokens, nor a `cache_salt`.
    """
    policies = [memory.policy(rules.async_scheduling) for _ in range(ranks)]
    scheduler = LockstepScheduler([make_scheduler(policy, rules) for policy in policies])
    backend = LockstepBackend(timing, scheduler, memory.state_bytes)
    clock = _Clock(memory, policies, backend, *np.zeros((4, len(requests)), dtype=np.int64))
    replica = Replica(env := simpy.Environment(), scheduler, backend, clock)
    Server(env, Source(requests), [replica]).run()
    times = clock.admitted, clock.first, clock.last, clock.reused
    return Times(*times, clock.preemptions, replica.steps, clock.max_used, clock.runs)


@dataclass
class _Clock(Observer):
    """Times of the requests, by id, and the most blocks in use at the start of a step."""

    memory: Memory
    policies: list[UnsharedPolicy | BlockPolicy]
    backend: LockstepBackend
    admitted: NDArray[np.int64]
    first: NDArray[np.int64]
    last: NDArray[np.int64]
    reused: NDArray[np.int64]
    preemptions: int = 0
    max_used: int = 0
    runs: list[Run] = dataclasses.field(default_factory=list)

    def ran(self, step: ScheduledStep, now: int, result: StepResult) -> None:
        used = self.memory.blocks - min([policy.store.num_free for policy in self.policies])
        self.max_used = max(self.max_used, used)
        self.runs.append(Run(self.backend.ranks, result.repeats, now, now + result.duration_ns))

    def finished(self, replica: int, sequence: ScheduledSequence) -> None:
        index = sequence.request.id
        self.admitted[index], self.first[index] = sequence.admitted_at, sequence.first_token_at
        self.last[index] = sequence.finished_at
        self.reused[index] = 0 if sequence.first_plan is None else sequence.first_plan.resume
        self.preemptions += sequence.preemptions
