"""Bounds of each arm's runs: the infinite cache, and the offline bound under the arm's memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from spanlab import build
from spanlab.offline.bound import CacheMemory, offline_bound_tokens
from spanlab.offline.forest import Forest, StorageRules, build_forest
from spanlab.offline.infinite import any_position_rules, prefix_rules
from spanlab.offline.reuses import Admissions, Reuses, ServiceOrder, find_reuses, service_order
from spanlab.settings import Strategy
from spanlab.study.cells import Bench, Cell
from spanlab.study.summary import Columns, select

T = TypeVar("T")


@dataclass
class StudyBounds:
    """Bounds of runs of one study; what arms have in common is computed once.

    All arms admit in order of arrival, so that most differ in the unit alone.
    """

    bench: Bench
    _known: dict[Hashable, Any] = field(default_factory=dict)

    def of_arm(self, arm: str, columns: Columns) -> dict[str, Any]:
        """Tokens and points of one arm; `columns` holds all records of its runs, warm-up included.

        `infinite_prefix_tokens`, `infinite_any_position_tokens`  reused by a cache without limit
        `offline_tokens`  what no cache of the arm's unit and memory can exceed
        `regret_points`   (offline - reused) ÷ prompt tokens of the counted requests, in percent
        """
        seeds = columns["seed"]
        runs = [self._of_run(arm, select(columns, seeds == seed)) for seed in np.unique(seeds)]
        total = {name: sum(run[name] for run in runs) for name in runs[0]}
        counted = select(columns, columns["counted"].astype(bool))
        prompt, reused = (int(counted[f"{name}_tokens"].sum()) for name in ("prompt", "reused"))
        total["regret_points"] = 100.0 * (total["offline_tokens"] - reused) / prompt
        return total

    def _of_run(self, arm: str, records: Columns) -> dict[str, Any]:
        strategy, order = self.bench.study.arms[arm], self._order(records)
        prefix, anywhere = self._infinite(strategy, order)
        own = self._own(strategy)
        known = (own.name, _fingerprint(order), "offline")
        reuses, memory = self._reuses(own, order), self._memory()
        return {
            "infinite_prefix_tokens": prefix,
            "infinite_any_position_tokens": max(prefix, anywhere),
            "offline_tokens": self._once(known, lambda: offline_bound_tokens(reuses, memory)),
        }

    def _infinite(self, strategy: Strategy, order: ServiceOrder) -> tuple[int, int]:
        """Tokens that an infinite cache reuses as prefixes, and at any position."""
        last_token = strategy.last_token == "reuse"
        prefix = _Family(("prefix", last_token), lambda: prefix_rules(last_token))
        anywhere = _Family(("anywhere", last_token), lambda: any_position_rules(last_token))
        found = [self._reuses(family, order).infinite_tokens for family in (prefix, anywhere)]
        return found[0], found[1]

    def _order(self, records: Columns) -> ServiceOrder:
        """One run's first admissions: by time, and by arrival where times are equal."""
        prompts = self._prompts(int(records["seed"][0]))
        arrival = np.array([prompts[number].arrival for number in records["request_id"].tolist()])
        sorted_rows = np.lexsort((arrival, records["admitted_s"]))
        asked = np.array([prompts[number].prompt for number in records["request_id"].tolist()])
        run = {name: values[sorted_rows] for name, values in records.items()}
        preempted, counted = run["preemptions"] > 0, run["counted"].astype(bool)
        times = run["admitted_s"], run["finished_s"]
        return service_order(Admissions(asked[sorted_rows], *times, preempted, counted))

    def _prompts(self, seed: int) -> dict[int, _Asked]:
        """By request: which of the workload's prompts it asks, and its number by arrival."""

        def find() -> dict[int, _Asked]:
            numbers = {id(request.spans): at for at, request in enumerate(self.bench.requests)}
            arrived = self.bench.arrivals(Cell(seed, self.bench.study.arrivals.rate_rps))
            return {r.id: _Asked(numbers[id(r.spans)], at) for at, r in enumerate(arrived)}

        return self._once(("prompts", seed), find)

    def _reuses(self, family: _Family, order: ServiceOrder) -> Reuses:
        known = (family.name, _fingerprint(order), "reuses")
        return self._once(known, lambda: find_reuses(self._forest(family), order))

    def _forest(self, family: _Family) -> Forest:
        served = self._once("served", lambda: self.bench.backend.served(self.bench.requests))
        return self._once((family.name, "forest"), lambda: build_forest(served, family.rules()))

    def _own(self, strategy: Strategy) -> _Family:
        """Arms of one family store the same units under the same keys."""
        spans, layout = strategy.spans, None
        if spans is not None:
            layout = spans.provenance, build.build_repair(spans.repair).by_span
        name = layout, strategy.sharing, strategy.last_token, self._unit(strategy)
        return _Family(name, lambda: self._rules(strategy))

    def _unit(self, strategy: Strategy) -> int:
        model = self.bench.study.model
        return max(strategy.page, model.grid) if model.is_hybrid else strategy.page

    def _rules(self, strategy: Strategy) -> StorageRules:
        policy = build.build_policy(self.bench.study, strategy, 0, 1)
        last_token = strategy.last_token == "reuse"
        return StorageRules(policy.layout, policy.roots.key, self._unit(strategy), last_token)

    def _memory(self) -> CacheMemory:
        study, model = self.bench.study, self.bench.study.model
        states = model.state_bytes if model.is_hybrid else 0
        return CacheMemory(build.build_budget(study.store), model.kv_bytes_per_token, states)

    def _once(self, key: Hashable, make: Callable[[], T]) -> T:
        if key not in self._known:
            self._known[key] = make()
        known: T = self._known[key]
        return known


@dataclass(frozen=True)
class _Family:
    """Storage rules, made when they are first needed, and a name that equal rules share."""

    name: Hashable
    rules: Callable[[], StorageRules]


@dataclass(frozen=True)
class _Asked:
    prompt: int
    arrival: int


def _fingerprint(order: ServiceOrder) -> tuple[bytes, bytes, bytes]:
    return order.prompts.tobytes(), order.stored_until.tobytes(), order.counted.tobytes()
