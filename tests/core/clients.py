"""Clients that put random operations on a policy, and a sequential oracle that repeats a recorded history."""

from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from spanlab.core.protocol import SharedPolicy
from spanlab.core.request import Request, Span

MS = 1_000_000
DOCUMENTS = [np.random.default_rng(index).integers(0, 9, 40).astype(np.int32) for index in range(12)]


@dataclass(eq=False)
class InFlight:
    """A request that holds an allocation."""

    request: Request
    allocation: Any
    computed: int
    generated: int = 0


class Client:
    """Admits requests, computes them in chunks, lets them answer, preempts or ends them; up to `most` at once.

    Prompts are beginnings of a few documents and a tail; `times` and `ids` may be shared with other clients.
    """

    def __init__(self, policy: SharedPolicy, seed: int, most: int, times: count, ids: count) -> None:
        self.policy, self.most, self.times, self.ids = policy, most, times, ids
        self.rng = np.random.default_rng(seed)
        self.running: list[InFlight] = []
        self.refused = 0

    def act(self) -> None:
        """One operation."""
        draw = self.rng.random()
        if not self.running or (len(self.running) < self.most and draw < 0.4):
            self.admit()
        else:
            self.go_on(self.running[int(self.rng.integers(len(self.running)))], draw)

    def admit(self) -> None:
        rng = self.rng
        document, tail = DOCUMENTS[int(rng.integers(len(DOCUMENTS)))], rng.integers(0, 9, rng.integers(1, 9))
        tokens = np.concatenate([document[: rng.integers(41)], tail]).astype(np.int32)
        output = rng.integers(0, 9, 8).astype(np.int32)
        salt = "ab"[int(rng.random() < 0.2)]
        request = Request(next(self.ids), 0, (Span(tokens),), 8, cache_salt=salt, output=output)
        allocation = self.policy.admit(request, self.now())
        if allocation is None:
            self.refused += 1
        else:
            self.running.append(InFlight(request, allocation, allocation.plan.resume))

    def go_on(self, request: InFlight, draw: float) -> None:
        policy, prompt = self.policy, request.request.num_tokens
        if draw > 0.97:
            self.running.remove(request)
            policy.free(request.allocation, self.now())
        elif request.computed < prompt:
            stop = int(self.rng.integers(request.computed + 1, prompt + 1))
            if policy.append(request.allocation, request.computed, stop):
                request.computed = stop
                policy.insert(request.allocation, stop, self.now())
        elif request.generated < 7 and draw < 0.9:
            stop = prompt + request.generated + 1
            request.generated += policy.append(request.allocation, stop - 1, stop)
        else:
            self.running.remove(request)
            policy.finish(request.allocation, request.generated, self.now())

    def end(self) -> None:
        """Give everything back."""
        for request in self.running:
            self.policy.free(request.allocation, self.now())
        self.running = []

    def now(self) -> int:
        return next(self.times) * MS


class Recorder:
    """Hands every operation to a policy, and writes it down with its result; operations must not overlap."""

    def __init__(self, policy: Any) -> None:
        self.policy, self.history = policy, []
        self.inside = False
        self.of: dict[int, int] = {}  # by allocation, the number of its admission

    def start_step(self, now: int) -> None:
        self.policy.start_step(now)

    def match(self, request: Request, now: int, generated: int = 0) -> Any:
        return self.policy.match(request, now, generated)

    def allocate(self, plan: Any, now: int, generated: int = 0) -> Any:
        allocation = self.call("allocate", plan, now, generated)
        if allocation is not None:
            self.of[id(allocation)] = len(self.history)
        self.history.append(("admit", (plan.request, now, generated), allocation and (plan.resume, allocation)))
        return allocation

    def append(self, allocation: Any, *given: Any) -> bool:
        return self.note("append", allocation, given)

    def insert(self, allocation: Any, *given: Any) -> None:
        self.note("insert", allocation, given)

    def finish(self, allocation: Any, *given: Any) -> None:
        self.note("finish", allocation, given)

    def free(self, allocation: Any, *given: Any) -> None:
        self.note("free", allocation, given)

    def note(self, name: str, allocation: Any, arguments: tuple) -> Any:
        result = self.call(name, allocation, *arguments)
        self.history.append((name, (self.of[id(allocation)], *arguments), result))
        return result

    def call(self, name: str, *given: Any) -> Any:
        assert not self.inside, "two operations overlap"
        self.inside = True
        result = getattr(self.policy, name)(*given)
        self.inside = False
        return result


def repeat(history: list, policy: Any) -> None:
    """Put a history on a fresh policy, one operation after another; every result must be the same."""
    allocations: dict[int, Any] = {}
    for index, (name, arguments, result) in enumerate(history):
        if name == "admit":
            request, now, generated = arguments
            policy.start_step(now)
            plan = policy.match(request, now, generated)
            allocations[index] = policy.allocate(plan, now, generated)
            assert (allocations[index] is None) == (result is None)
            assert result is None or plan.resume == result[0]
        else:
            number, *more = arguments
            assert getattr(policy, name)(allocations[number], *more) == result
