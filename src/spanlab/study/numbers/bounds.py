"""Bounds of each arm's runs: the infinite cache, and the offline bound under the arm's memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from spanlab import build
from spanlab.build.tiers import tier_bytes
from spanlab.core.budget import UNLIMITED
from spanlab.core.passages import in_view
from spanlab.core.request import Request
from spanlab.offline.bound import CacheMemory, offline_bound
from spanlab.offline.forest import Forest, Ints, build_forest
from spanlab.offline.infinite import any_position_rules, prefix_rules
from spanlab.offline.latency import Prefill, least_ttft
from spanlab.offline.reuses import Admissions, Reuses, ServiceOrder, find_reuses, service_order
from spanlab.study.execution.cells import Bench
from spanlab.study.numbers.storage import Storage, storage_of
from spanlab.study.numbers.summary import Columns, delays, select
from spanlab.study.output.arm_files import Cell
from spanlab_sim.least_prefill import LeastPrefill, least_prefill

T = TypeVar("T")
UNBOUNDED = ("offline_tokens", "offline_methods", "regret_points", "least_ttft_s", "ttft_regret_s")


class BoundCrossedError(ValueError):
    """A run reused more than is possible: the bound or the simulation is wrong, so that nothing is reported."""


def check_not_crossed(arm: str, records: Columns, bound: int) -> None:
    """Refuse a run whose counted requests reuse more tokens than a proven bound."""
    reused = int(records["reused_tokens"][records["counted"].astype(bool)].sum())
    if reused > bound:
        seed = int(records["seed"][0])
        raise BoundCrossedError(f"arms.{arm} with seed {seed} reused {reused:,} tokens: expected at most {bound:,}")


def _in_seconds(arm: str, total: dict[str, Any], counted: Columns) -> dict[str, Any]:
    """The bound of the mean TTFT and the regret to it; `total` holds its sum over requests, where there is one."""
    if "least_ttft_s" not in total:
        return {"least_ttft_s": None, "ttft_regret_s": None}
    mean = float(delays(counted)["ttft_s"].mean())
    least = total["least_ttft_s"] / len(counted["seed"])
    if mean < least * (1 - 1e-6):  # steps last whole nanoseconds
        raise BoundCrossedError(f"arms.{arm} has a mean TTFT of {mean:.9f} s: expected at least {least:.9f}")
    return {"least_ttft_s": least, "ttft_regret_s": mean - least}


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
        `offline_methods`  how bounds were found in some run (`spanlab.offline.pricing`)
        `regret_points`   (offline - reused) ÷ prompt tokens of the counted requests, in percent
        These three are None for a policy from a plugin, and for passages in the order of the cache.
        `least_ttft_s`    mean TTFT below which no such cache comes, without queueing (`spanlab.offline.latency`)
        `ttft_regret_s`   mean TTFT of the counted requests - that
        Both are None where prefixes are not all that is found, or the time of a prefill is not known.
        """
        seeds = columns["seed"]
        runs = [self._of_run(arm, select(columns, seeds == seed)) for seed in np.unique(seeds)]
        methods = sorted(set[str]().union(*(run.pop("offline_methods", ()) for run in runs)))
        total: dict[str, Any] = {name: sum(run[name] for run in runs) for name in runs[0]}
        if not self._storage(arm).bounded:
            return total | dict.fromkeys(UNBOUNDED)
        counted = select(columns, columns["counted"].astype(bool))
        prompt, reused = (int(counted[f"{name}_tokens"].sum()) for name in ("prompt", "reused"))
        regret = 100.0 * (total["offline_tokens"] - reused) / prompt
        return total | {"offline_methods": methods, "regret_points": regret} | _in_seconds(arm, total, counted)

    def _of_run(self, arm: str, records: Columns) -> dict[str, Any]:
        storage = self._storage(arm)
        order = self._order(records, storage.reserved)
        reuses, memory = self._reuses(storage, order), self._memory(arm, storage)
        if not storage.bounded:
            return self._infinite(storage, order)
        known = (storage.name, storage.view, _fingerprint(order), memory, "offline")
        bound = self._once(known, lambda: offline_bound(reuses, memory))
        check_not_crossed(arm, records, bound.tokens)
        found: dict[str, Any] = {"offline_tokens": bound.tokens, "offline_methods": {bound.method}}
        if self._least is not None and self._finds_prefixes(arm):
            prefill = Prefill(self._lengths[order.prompts], order.counted, self._least.computing, self._least.step_s)
            least = self._once(("ttft", *known), lambda: least_ttft(reuses, memory, prefill))
            found |= {"least_ttft_s": least.value, "offline_methods": {bound.method, least.method}}
        return self._infinite(storage, order) | found

    def _finds_prefixes(self, arm: str) -> bool:
        """Whether what an arm reuses of a prompt is always its beginning, and one token of it is computed."""
        strategy = self.bench.jobs.study.arms[arm]
        return strategy.spans is None and strategy.passages.are_usual and strategy.last_token == "recompute"

    @cached_property
    def _least(self) -> LeastPrefill | None:
        """What prefills take at least by the study's timing model; None where times are measured, or it tells none."""
        if self.bench.backend.in_turns:
            return None
        study = self.bench.jobs.study
        return least_prefill(build.build_timing(study), study.model, study.hardware)

    @cached_property
    def _served(self) -> Sequence[Request]:
        return self.bench.backend.served(self.bench.jobs.requests)

    @cached_property
    def _lengths(self) -> Ints:
        """Tokens of each of the workload's prompts."""
        return np.array([request.num_tokens for request in self._served], np.int64)

    def _infinite(self, storage: Storage, order: ServiceOrder) -> dict[str, Any]:
        """Tokens that an infinite cache reuses as prefixes, and at any position."""
        given = storage.last_token, storage.rules().outputs
        prefix = Storage(("prefix", given), lambda: prefix_rules(*given), view=storage.view)
        anywhere = Storage(("any position", given), lambda: any_position_rules(*given), view=storage.view)
        found = [self._reuses(kind, order).infinite_tokens for kind in (prefix, anywhere)]
        return {
            "infinite_prefix_tokens": found[0],
            "infinite_any_position_tokens": max(found),
        }

    def _storage(self, arm: str) -> Storage:
        study = self.bench.jobs.study
        passages = study.arms[arm].passages

        def find() -> Storage:
            storage = replace(storage_of(build.build_policy(study, study.arms[arm], 0, 1)), view=passages.view)
            return storage if passages.order == "given" else replace(storage, bounded=False)

        return self._once(("storage", arm), find)

    def _order(self, records: Columns, reserved: bool) -> ServiceOrder:
        """One run's first admissions: by time, and by arrival where times are equal."""
        prompts = self._prompts(int(records["seed"][0]))
        arrival = np.array([prompts[number].arrival for number in records["request_id"].tolist()])
        asked = np.array([prompts[number].prompt for number in records["request_id"].tolist()])
        rows = np.lexsort((arrival, records["admitted_s"]))
        run = {name: values[rows] for name, values in records.items()}
        preempted, counted = run["preemptions"] > 0, run["counted"].astype(bool)
        times = run["admitted_s"], run["finished_s"]
        return service_order(Admissions(asked[rows], *times, preempted, counted), reserved)

    def _prompts(self, seed: int) -> dict[int, _Asked]:
        """By request: which of the workload's prompts it asks, and its number by arrival."""

        def find() -> dict[int, _Asked]:
            numbers = {id(request.spans): at for at, request in enumerate(self.bench.jobs.requests)}
            arrived = self.bench.jobs.arrivals(Cell(seed, self.bench.jobs.study.arrivals.rate_rps))
            return {r.id: _Asked(numbers[id(r.spans)], at) for at, r in enumerate(arrived)}

        return self._once(("prompts", seed), find)

    def _reuses(self, storage: Storage, order: ServiceOrder) -> Reuses:
        known = (storage.name, storage.view, _fingerprint(order), "reuses")
        return self._once(known, lambda: find_reuses(self._forest(storage), order))

    def _forest(self, storage: Storage) -> Forest:
        known = (storage.name, storage.view, "forest")
        return self._once(known, lambda: build_forest(in_view(self._served, storage.view), storage.rules()))

    def _memory(self, arm: str, storage: Storage) -> CacheMemory:
        """Of the device and of the tiers that the arm uses."""
        study = self.bench.jobs.study
        model, budget = study.model, storage.budget(build.build_budget(study.store))
        states = storage.least_state(model.state_bytes) if model.is_hybrid else 0
        lower = tier_bytes(study, study.arms[arm])
        total, state = (min(own + lower, UNLIMITED) for own in (budget.total_bytes, budget.state_bytes))
        memory = replace(budget, total_bytes=total, state_bytes=state).times(
            study.replicas.count
        )  # one cache of them all is no worse
        return CacheMemory(memory, build.held_token_bytes(study), states)

    def _once(self, key: Hashable, make: Callable[[], T]) -> T:
        if key not in self._known:
            self._known[key] = make()
        known: T = self._known[key]
        return known


@dataclass(frozen=True)
class _Asked:
    prompt: int
    arrival: int


def _fingerprint(order: ServiceOrder) -> Hashable:
    parts = order.prompts, order.stored_until, order.finished, order.counted
    return (order.reserved, *(part.tobytes() for part in parts))
