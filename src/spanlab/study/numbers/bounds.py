"""Upper bounds on each arm's reuse: an infinite cache, and the offline bound with the arm's memory."""

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
from spanlab.offline.latency import NS, Prefill, least_ttft
from spanlab.offline.reuses import Admissions, Reuses, ServiceOrder, find_reuses, service_order
from spanlab.study.execution.cells import Runtime
from spanlab.study.numbers.storage import Storage, storage_of
from spanlab.study.numbers.summary import Columns, select
from spanlab.study.output.arm_files import Cell
from spanlab_sim.least_prefill import LeastPrefill, least_prefill

T = TypeVar("T")
UNBOUNDED = ("offline_tokens", "offline_methods", "regret_points", "least_ttft_s", "ttft_regret_s")


class BoundCrossedError(ValueError):
    """A run exceeds a proven bound: the bound or the simulation is wrong, and the study reports no result."""


def check_not_crossed(arm: str, records: Columns, bound: int) -> None:
    """Raise where the counted requests of a run reuse more tokens than a proven bound."""
    reused = int(records["reused_tokens"][records["counted"].astype(bool)].sum())
    if reused > bound:
        seed = int(records["seed"][0])
        raise BoundCrossedError(f"arms.{arm} with seed {seed} reused {reused:,} tokens: expected at most {bound:,}")


def _in_seconds(arm: str, total: dict[str, Any], counted: Columns) -> dict[str, Any]:
    """Lower bound of the mean TTFT, and the regret; `total["least_ttft_ns"]`, if present, is a sum over requests."""
    least = total.pop("least_ttft_ns", None)
    if least is None:
        return {"least_ttft_s": None, "ttft_regret_s": None}
    requests, ns = len(counted["seed"]), whole_ns(counted)
    if ns < least:
        raise BoundCrossedError(f"arms.{arm} has TTFTs of {ns:,} ns in all: expected at least {least:,}")
    return {"least_ttft_s": least * NS / requests, "ttft_regret_s": (ns - least) * NS / requests}


def whole_ns(records: Columns) -> int:
    """Return the sum of TTFTs in nanoseconds; a clock of whole nanoseconds wrote the times."""
    first, arrived = (np.rint(records[name] / NS).astype(np.int64) for name in ("first_token_s", "arrived_s"))
    return int((first - arrived).sum())


@dataclass
class StudyBounds:
    """Bounds of the runs of one study; results that arms share are computed once.

    All arms admit in order of arrival, so that most arms differ only in their unit of storage.
    """

    runtime: Runtime
    _cache: dict[Hashable, Any] = field(default_factory=dict)

    def of_arm(self, arm: str, columns: Columns) -> dict[str, Any]:
        """Bounds and regrets of one arm; `columns` has all records of its runs, including the warm-up.

        `infinite_prefix_tokens`, `infinite_any_position_tokens`  reused tokens of a cache without limit
        `offline_tokens`  upper bound for every cache with the arm's unit and memory
        `offline_methods`  methods that computed the bound, over all runs (`spanlab.offline.pricing`)
        `regret_points`   (offline - reused) ÷ prompt tokens of the counted requests, in percent
        These three are None for a policy from a plugin, and for passages in the order of the cache.
        `least_ttft_s`    lower bound of the mean TTFT of such a cache, without queueing (`spanlab.offline.latency`)
        `ttft_regret_s`   mean TTFT of the counted requests - `least_ttft_s`
        Both are None where reuse is not limited to prefixes, or prefill times are unknown.
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
        key = (storage.name, storage.view, _fingerprint(order), memory, "offline")
        bound = self._cached(key, lambda: offline_bound(reuses, memory))
        check_not_crossed(arm, records, bound.tokens)
        result: dict[str, Any] = {"offline_tokens": bound.tokens, "offline_methods": {bound.method}}
        if self._least is not None and self._finds_prefixes(arm):
            prefill = Prefill(self._lengths[order.prompts], order.counted, self._least.computing, self._least.step_ns)
            least = self._cached(("ttft", *key), lambda: least_ttft(reuses, memory, prefill))
            result |= {"least_ttft_ns": least.value, "offline_methods": {bound.method, least.method}}
        return self._infinite(storage, order) | result

    def _finds_prefixes(self, arm: str) -> bool:
        """Whether an arm reuses only prefixes, and computes at least the last prompt token."""
        strategy = self.runtime.jobs.study.arms[arm]
        return strategy.spans is None and strategy.passages.are_default and strategy.last_token == "recompute"

    @cached_property
    def _least(self) -> LeastPrefill | None:
        """Least prefill times under the study's timing model; None where times are measured or it has no such bound."""
        if self.runtime.backend.interleaved:
            return None
        study = self.runtime.jobs.study
        return least_prefill(build.build_timing(study), study.model, study.hardware)

    @cached_property
    def _served(self) -> Sequence[Request]:
        return self.runtime.backend.served(self.runtime.jobs.requests)

    @cached_property
    def _lengths(self) -> Ints:
        """Number of tokens of each prompt of the workload."""
        return np.array([request.num_tokens for request in self._served], np.int64)

    def _infinite(self, storage: Storage, order: ServiceOrder) -> dict[str, Any]:
        """Reused tokens of an infinite cache: as prefixes, and at any position."""
        options = storage.last_token, storage.rules().outputs
        prefix = Storage(("prefix", options), lambda: prefix_rules(*options), view=storage.view)
        anywhere = Storage(("any position", options), lambda: any_position_rules(*options), view=storage.view)
        tokens = [self._reuses(kind, order).infinite_tokens for kind in (prefix, anywhere)]
        return {
            "infinite_prefix_tokens": tokens[0],
            "infinite_any_position_tokens": max(tokens),
        }

    def _storage(self, arm: str) -> Storage:
        study = self.runtime.jobs.study
        passages = study.arms[arm].passages

        def make() -> Storage:
            storage = replace(storage_of(build.build_policy(study, study.arms[arm], 0, 1)), view=passages.view)
            return storage if passages.order == "given" else replace(storage, bounded=False)

        return self._cached(("storage", arm), make)

    def _order(self, records: Columns, reserved: bool) -> ServiceOrder:
        """First admissions of one run, ordered by time, then by arrival."""
        prompts = self._prompts(int(records["seed"][0]))
        arrival = np.array([prompts[number].arrival for number in records["request_id"].tolist()])
        prompt_numbers = np.array([prompts[number].prompt for number in records["request_id"].tolist()])
        rows = np.lexsort((arrival, records["admitted_s"]))
        run = {name: values[rows] for name, values in records.items()}
        preempted, counted = run["preemptions"] > 0, run["counted"].astype(bool)
        times = run["admitted_s"], run["finished_s"]
        return service_order(Admissions(prompt_numbers[rows], *times, preempted, counted), reserved)

    def _prompts(self, seed: int) -> dict[int, _PromptRef]:
        """Map each request id to its prompt's index in the workload and its index by arrival."""

        def make() -> dict[int, _PromptRef]:
            numbers = {id(request.spans): index for index, request in enumerate(self.runtime.jobs.requests)}
            arrived = self.runtime.jobs.arrivals(Cell(seed, self.runtime.jobs.study.arrivals.rate_rps))
            return {request.id: _PromptRef(numbers[id(request.spans)], index) for index, request in enumerate(arrived)}

        return self._cached(("prompts", seed), make)

    def _reuses(self, storage: Storage, order: ServiceOrder) -> Reuses:
        key = (storage.name, storage.view, _fingerprint(order), "reuses")
        return self._cached(key, lambda: find_reuses(self._forest(storage), order))

    def _forest(self, storage: Storage) -> Forest:
        key = (storage.name, storage.view, "forest")
        return self._cached(key, lambda: build_forest(in_view(self._served, storage.view), storage.rules()))

    def _memory(self, arm: str, storage: Storage) -> CacheMemory:
        """Memory of the device and of the tiers that the arm uses, over all replicas."""
        study = self.runtime.jobs.study
        model, budget = study.model, storage.budget(build.build_budget(study.store))
        states = storage.least_state(model.state_bytes) if model.is_hybrid else 0
        lower = tier_bytes(study, study.arms[arm])
        total, state = (min(device + lower, UNLIMITED) for device in (budget.total_bytes, budget.state_bytes))
        memory = replace(budget, total_bytes=total, state_bytes=state).times(
            study.replicas.count
        )  # one shared cache is at least as good as separate ones
        return CacheMemory(memory, build.held_token_bytes(study), states)

    def _cached(self, key: Hashable, make: Callable[[], T]) -> T:
        if key not in self._cache:
            self._cache[key] = make()
        value: T = self._cache[key]
        return value


@dataclass(frozen=True)
class _PromptRef:
    prompt: int
    arrival: int


def _fingerprint(order: ServiceOrder) -> Hashable:
    arrays = order.prompts, order.stored_until, order.finished, order.counted
    return (order.reserved, *(array.tobytes() for array in arrays))
