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
        runs = [self._of_run(arm, select(columns, columns["seed"] == s)) for s in np.unique(columns["seed"])]
        total = {name: sum(run[name] for run in runs) for name in runs[0]}
        counted = select(columns, columns["counted"].astype(bool))
        prompt, reused = (int(counted[f"{name}_tokens"].sum()) for name in ("prompt", "reused"))
        total["regret_points"] = 100.0 * (total["offline_tokens"] - reused) / prompt
        return total

    def _of_run(self, arm: str, records: Columns) -> dict[str, Any]:
        strategy, order = self.bench.study.arms[arm], self._order(records)
        last_token = strategy.last_token == "reuse"
        prefix = self._reuses(("prefix", last_token), lambda: prefix_rules(last_token), order)
        anywhere = self._reuses(("anywhere", last_token), lambda: any_position_rules(last_token), order)
        family = self._family(strategy)
        own = self._reuses(family, lambda: self._rules(strategy), order)
        known = (family, _fingerprint(order), "offline")
        return {
            "infinite_prefix_tokens": prefix.infinite_tokens,
            "infinite_any_position_tokens": max(prefix.infinite_tokens, anywhere.infinite_tokens),
            "offline_tokens": self._once(known, lambda: offline_bound_tokens(own, self._memory())),
        }

    def _order(self, records: Columns) -> ServiceOrder:
        """One run's first admissions: by time, and by arrival where times are equal."""
        prompts = self._prompts(int(records["seed"][0]))
        arrival = np.array([prompts[number].arrival for number in records["request_id"].tolist()])
        sorted_rows = np.lexsort((arrival, records["admitted_s"]))
        asked = np.array([prompts[number].prompt for number in records["request_id"].tolist()])
        run = select(records, sorted_rows)
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

    def _reuses(self, family: Hashable, rules: Callable[[], StorageRules], order: ServiceOrder) -> Reuses:
        known = (family, _fingerprint(order), "reuses")
        return self._once(known, lambda: find_reuses(self._forest(family, rules), order))

    def _forest(self, family: Hashable, rules: Callable[[], StorageRules]) -> Forest:
        served = self._once("served", lambda: self.bench.backend.served(self.bench.requests))
        return self._once((family, "forest"), lambda: build_forest(served, rules()))

    def _family(self, strategy: Strategy) -> Hashable:
        """Arms of one family store the same units in the same places of their trees."""
        spans = strategy.spans
        layout = None if spans is None else (spans.provenance, build.build_repair(spans.repair).by_span)
        return layout, strategy.sharing, strategy.last_token, self._unit(strategy)

    def _unit(self, strategy: Strategy) -> int:
        model = self.bench.study.model
        return max(strategy.page, model.grid) if model.is_hybrid else strategy.page

    def _rules(self, strategy: Strategy) -> StorageRules:
        policy = build.build_policy(self.bench.study, strategy, 0, 1)
        last_token = strategy.last_token == "reuse"
        return StorageRules(policy.layout, policy.roots.key, self._unit(strategy), last_token)

    def _memory(self) -> CacheMemory:
        study = self.bench.study
        state_bytes = study.model.state_bytes if study.model.is_hybrid else 0
        return CacheMemory(build.build_budget(study.store), study.model.kv_bytes_per_token, state_bytes)

    def _once(self, key: Hashable, make: Callable[[], T]) -> T:
        if key not in self._known:
            self._known[key] = make()
        known: T = self._known[key]
        return known


@dataclass(frozen=True)
class _Asked:
    prompt: int
    arrival: int


def _fingerprint(order: ServiceOrder) -> tuple[bytes, bytes, bytes]:
    return order.prompts.tobytes(), order.stored_until.tobytes(), order.counted.tobytes()
