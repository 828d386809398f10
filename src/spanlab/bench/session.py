"""One empty cache over a loaded model, asked one request after another."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from spanlab import build
from spanlab.bench.bed import Bed
from spanlab.core.backend import StepResult
from spanlab.core.placement import PrefillInfo
from spanlab.core.request import Request
from spanlab.core.scheduler import BatchRules, ScheduledStep
from spanlab.engine.engine import Engine, OnLogits
from spanlab.engine.sampling import Sampler
from spanlab.engine.sizing import stored_tokens
from spanlab.model_spec import ModelSpec
from spanlab.records import Record
from spanlab.settings import StoreSettings, Strategy
from spanlab_sim.run import serve


@dataclass(frozen=True)
class Cache:
    """What a policy is built for: a model's sizes, and a store as large as the pool below it."""

    model: ModelSpec
    store: StoreSettings


@dataclass(frozen=True, slots=True)
class Served:
    """One request's record and the steps that it took, planned and measured."""

    record: Record
    plans: list[ScheduledStep]
    steps: list[StepResult]


class Session:
    """A new policy and a new engine; `requests` are all that will be asked, so that there is room for them.

    `token_budget`  prompt tokens of one step
    `told`          visits that the placement of states is told of beforehand, as if the workload had gone on for long
    `output`        tokens generated for each request, by id
    """

    def __init__(
        self,
        bed: Bed,
        strategy: Strategy,
        requests: Sequence[Request],
        token_budget: int,
        *,
        sampler: Sampler | None = None,
        on_logits: OnLogits | None = None,
        told: Sequence[PrefillInfo] = (),
    ) -> None:
        longest = max(request.num_tokens + request.output_len for request in requests)
        self._rules = BatchRules(token_budget=token_budget, max_num_seqs=1)
        self.policy = build.build_policy(_study(bed.spec), strategy, 0, longest)
        for visit in told:
            self.policy.placer.observe_and_place(visit)
        self.engine = Engine(
            bed.model,
            bed.pool(strategy.page, _pages(requests, strategy.page)),
            self.policy,
            build.build_reading(strategy),
            positions=longest,
            sampler=sampler,
            on_logits=on_logits,
            states=bed.states(self._states(requests)),
        )

    def _states(self, requests: Sequence[Request]) -> int:
        """States that may be there at once: a running one, and one at every point of the grid in what is stored."""
        rules = self.policy.rules
        return 1 + (stored_tokens(self.policy, requests) // rules.grid + len(requests) if rules.keeps else 0)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:  # else its requests may hold pages too, and the run is over
            self.engine.pool.give(self.engine.nodes.all())
            if self.engine.states is not None:
                self.engine.states.pool.give(self.engine.states.all())

    def ask(self, request: Request) -> Served:
        """Serve one request with nobody else there; its time starts at its admission."""
        records: list[Record] = []
        plans: list[ScheduledStep] = []
        steps: list[StepResult] = []

        def note(plan: ScheduledStep, now: int, step: StepResult) -> None:
            plans.append(plan)
            steps.append(step)

        gc.disable()  # a collection while the clock runs would count
        try:
            serve([request], self.policy, self._rules, self.engine, records.append, on_step=note)
        finally:
            gc.enable()
        return Served(records[0], plans, steps)

    def output(self, request: Request) -> list[int]:
        """The tokens generated for a request."""
        return self.engine.outputs[request.id]


def _study(model: ModelSpec) -> Any:
    """What `build_policy` reads of a study; without limits, since the pool is made for what is asked."""
    return Cache(model, StoreSettings())


def _pages(requests: Sequence[Request], page: int) -> int:
    """Room to store every request whole, and for one to copy all its spans; every section may end within a page."""
    each = [-(-(request.num_tokens + request.output_len) // page) + len(request.spans) + 1 for request in requests]
    return sum(each) + max(each)
