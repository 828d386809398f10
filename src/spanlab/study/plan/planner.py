"""Context of every search of a plan: the study's own point, reference points, and the trial of other points."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from spanlab import build
from spanlab.build import GIB
from spanlab.core.request import Request
from spanlab.settings import Strategy, Study
from spanlab.settings.slo import Target
from spanlab.study.plan.monotone import Border, find_border
from spanlab.study.plan.outcome import Outcome
from spanlab.study.plan.point import Point
from spanlab.study.plan.trials import Trials

REFERENCES = {
    "own": "this memory and load",
    "no_limit": "memory without limit, this load",
    "alone": "this memory, one request at a time",
    "floor": "memory without limit, one request at a time",
}


class Pools(NamedTuple):
    """GiB of KV and of states."""

    kv: float
    states: float


class Planner:
    """The planned arm of a study, its baseline; `requests` are those of the workload."""

    def __init__(self, study: Study, requests: tuple[Request, ...], trials: Trials) -> None:
        self.study, self.requests, self.trials = study, requests, trials

    @property
    def targets(self) -> list[Target]:
        """The latency targets."""
        return self.study.slo.targets

    @property
    def targets_text(self) -> str:
        """The targets as text."""
        return " and ".join(target.words for target in self.targets)

    @property
    def strategy(self) -> Strategy:
        """The planned arm."""
        return self.study.arms[self.study.baseline]

    @cached_property
    def references(self) -> dict[str, Outcome]:
        """Outcomes of the reference points, by the keys of `REFERENCES`."""
        own_store, no_limit = self.study.store, replace(self.study.store, total_gib=None)
        points = [
            replace(self.study_point, store=store, load=load) for load in (1.0, None) for store in (own_store, no_limit)
        ]
        return dict(zip(REFERENCES, self.trials.outcomes(points, list(REFERENCES.values())), strict=True))

    @property
    def study_point(self) -> Point:
        """The study's own point, of which a search changes fields."""
        return Point(self.study.store, self.strategy)

    def border(
        self, grid: Sequence[float], point: Callable[[float], Point], describe: Callable[[float], str]
    ) -> Border:
        """Return the border on a grid from worst to best; `point` and `describe` take a value of the grid."""

        def outcomes(values: Sequence[float], every: bool) -> list[Outcome]:
            return self.trials.outcomes(list(map(point, values)), list(map(describe, values)), every)

        return find_border(grid, self.study.plan.points, outcomes)

    def need_gib(self, strategy: Strategy) -> Pools:
        """Return the largest memory of one request alone, for KV and for states."""
        policy = build.build_policy(self.study, strategy, 0, 1)
        needs = [policy.need(request) for request in self.requests]
        kv, states = max(need.kv_bytes for need in needs), max(need.state_bytes for need in needs)
        return Pools(kv / GIB, states / GIB)

    @property
    def memory_text(self) -> str:
        """The study's own memory as text."""
        gib = self.study.store.total_gib
        return "memory without limit" if gib is None else f"{gib:g} GiB"
