"""Routers by name: which of several replicas serves a request, decided when it arrives.

A router reads the present state of its `replicas`, and nothing of the future: no output lengths, no step times.
Among replicas of equal rank, the first in number is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Protocol

import numpy as np

from spanlab.core.request import Request
from spanlab.core.step import ScheduledSequence, ScheduledStep, StepResult
from spanlab.registry import Registry, not_negative


class Target(Protocol):
    """The properties of a replica that a router may read."""

    @property
    def requests(self) -> int:
        """Number of requests sent to it that have not finished."""
        ...

    @property
    def tokens(self) -> int:
        """Prompt tokens of these requests."""
        ...

    def cached(self, request: Request, now: int) -> int:
        """Return the prompt tokens of a request that it would reuse now."""
        ...


# Here and not beside `Replica`, whose file is compiled: Python code cannot extend compiled classes.
class Observer(Protocol):
    """What happens in replicas, which it knows by their numbers; by default, nothing is noted."""

    def arrived(self, request: Request, now: int) -> Request:
        """Return the request that is served in the place of one that is sent to a replica now."""
        return request

    def changing(self, replica: int, now: int) -> None:
        """The content of a replica's store may change next."""
        return

    def ran(self, step: ScheduledStep, now: int, result: StepResult) -> None:
        """A step began at `now` and has this result; the scheduler has not advanced yet."""
        return

    def stored(self, step: ScheduledStep) -> None:
        """The policy has stored the tokens of a step."""
        return

    def finished(self, replica: int, sequence: ScheduledSequence) -> None:
        """A sequence has finished."""
        return


#: From a request and the time in nanoseconds, the number of the replica that serves it.
Route = Callable[[Request, int], int]
ROUTERS: Registry[Route] = Registry("routing", given=("replicas", "rng"))
ROUTERS.later("prefix_events", "spanlab_sim.cache_events")


@ROUTERS.register("round_robin")
def round_robin(replicas: Sequence[Target]) -> Route:
    """One replica after another."""
    numbers = cycle(range(len(replicas)))
    return lambda request, now: next(numbers)


@ROUTERS.register("random")
def at_random(replicas: Sequence[Target], rng: np.random.Generator) -> Route:
    """Any replica, all alike."""
    return lambda request, now: int(rng.integers(len(replicas)))


@ROUTERS.register("least_loaded")
def least_loaded(replicas: Sequence[Target]) -> Route:
    """The replica with the fewest requests; among equals that with the fewest prompt tokens."""
    return lambda request, now: lightest(replicas, range(len(replicas)))


@ROUTERS.register("prefix_aware")
def prefix_aware(replicas: Sequence[Target]) -> Route:
    """The replica that would reuse most of the prompt; among equals the least loaded one."""

    def route(request: Request, now: int) -> int:
        return longest(replicas, [replica.cached(request, now) for replica in replicas])

    return route


@ROUTERS.register("session_sticky")
def session_sticky(replicas: Sequence[Target]) -> Route:
    """The replica that served the session's first request, which goes to the least loaded one."""
    replica_of: dict[int, int] = {}

    def route(request: Request, now: int) -> int:
        if request.group_id not in replica_of:
            replica_of[request.group_id] = lightest(replicas, range(len(replicas)))
        return replica_of[request.group_id]

    return route


@ROUTERS.register("weighted")
def weighted(replicas: Sequence[Target], cache_weight: float = 1.0, load_weight: float = 1.0) -> Route:
    """The highest `cache_weight` × cached share of the prompt − `load_weight` × load.

    The load is the replica's requests ÷ those of the fullest one, so that both terms lie from 0 to 1, as those of the
    weighted scorers in llm-d's scheduler do; SGLang's and Dynamo's routers weigh the same two against each other.
    """
    not_negative("replicas.cache_weight", cache_weight)
    not_negative("replicas.load_weight", load_weight)

    def route(request: Request, now: int) -> int:
        requests = [replica.requests for replica in replicas]
        fullest, prompt = max(1, *requests), request.num_tokens
        shares = [replica.cached(request, now) / prompt for replica in replicas]
        scores = [
            cache_weight * share - load_weight * count / fullest for share, count in zip(shares, requests, strict=True)
        ]
        return lightest(replicas, [number for number, score in enumerate(scores) if score == max(scores)])

    return route


def lightest(replicas: Sequence[Target], among: Sequence[int]) -> int:
    """Return the replica with the fewest requests, then prompt tokens, then the lowest number."""
    return min(among, key=lambda number: (replicas[number].requests, replicas[number].tokens, number))


def longest(replicas: Sequence[Target], cached: Sequence[int]) -> int:
    """Return the replica that has most of a prompt; among equals the least loaded one."""
    most = max(cached)
    return lightest(replicas, [number for number, tokens in enumerate(cached) if tokens == most])
