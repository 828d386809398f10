"""Upper bounds on each arm's reuse: an infinite cache, and the offline bound with the arm's
memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, singledispatch
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from spanlab.build import build_policy, build_timing, tier_bytes
from spanlab.core.policies.blocks import BlockPolicy
from spanlab.core.policies.named import POLICIES
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.protocol import in_view
from spanlab.core.request import UNLIMITED, Budget, Request
from spanlab.core.rules import StorageRules
from spanlab.core.tree import whole
from spanlab.offline.bound import CacheMemory, Prefill, least_ttft, offline_bound
from spanlab.offline.forest import (
    Admissions,
    Forest,
    Ints,
    Reuses,
    ServiceOrder,
    any_position_rules,
    build_forest,
    find_reuses,
    prefix_rules,
    salted_parent,
    service_order,
)
from spanlab.records import NS, ttft
from spanlab.report.data import ArmData, LoadPoint
from spanlab.settings.analyses import parse_limit
from spanlab.settings.arms import Strategy
from spanlab.settings.server import held_token_bytes
from spanlab.settings.study import Study
from spanlab.stats import SATURATED, verdict_of
from spanlab.study.jobs import Runtime, run_cells
from spanlab.study.numbers import (
    ArmFiles,
    Columns,
    RunCell,
    at_rate,
    bound_tokens,
    copied_mean_bytes,
    load_of,
    load_point,
    read_records,
    select,
    summarise,
    ttft_sums,
)
from spanlab_sim.bounds import LeastPrefill, least_prefill

# ------------------------------------------------------------------------------
# Storage rules of each kind of policy, as far as a bound on its reuse depends on them.
# ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Storage:
    """Storage of a policy.

    `name`        equal for policies that store equal units under equal keys
    `rules`       function that builds the storage rules
    `reserved`    a request has memory for its complete prompt from its admission
    `pooled`      KV and states share one pool of the sum of their budgets
    `last_token`  the last prompt token may be reused too
    `map_bytes`   bytes of a span's map, where reuse reads a map instead of a state
    `state_bytes` bytes of a stored state; None: size of the model's state
    `bounded`     False: these rules do not bound the reuse (a policy from a plugin, or reordered
                  passages)
    `view`        passages of a prompt that are served
    """

    name: Hashable
    rules: Callable[[], StorageRules]
    reserved: bool = True
    pooled: bool = False
    last_token: bool = False
    map_bytes: int | None = None
    bounded: bool = True
    state_bytes: int | None = None
    view: str = "all"

    def budget(self, store_budget: Budget) -> Budget:
        """Return the part of the store's budget that this policy can use."""
        if not self.pooled:
            return store_budget
        return Budget(
            total_bytes=min(
                store_budget.total_bytes, store_budget.kv_bytes + store_budget.state_bytes
            )
        )

    def least_state(self, state_bytes: int) -> int:
        """Least bytes that any reuse needs in addition to its KV, where a model state has
        `state_bytes`."""
        stored = state_bytes if self.state_bytes is None else self.state_bytes
        return stored if self.map_bytes is None else min(stored, self.map_bytes)


@singledispatch
def storage_of(policy: Any) -> Storage:
    """Return the storage of a policy; for an unknown kind, the rules of an infinite cache apply."""
    return Storage(
        "plugin", lambda: prefix_rules(True, True), reserved=False, last_token=True, bounded=False
    )


@storage_of.register
def _(policy: TreePolicy) -> Storage:
    rules, block_size = policy.rules, policy.store.tree.block_size
    # maps of spans are not on the grid; the block size divides the grid
    on_grid = rules.needs_states and rules.maps is None
    unit = max(block_size, rules.grid) if on_grid else block_size
    maps = None if rules.maps is None else rules.map_bytes
    layout = rules.layout.__name__, rules.repair.by_span
    outputs = not rules.needs_states or (rules.progress is not None and rules.progress.every > 0)
    name = layout, type(policy.index).__name__, unit, rules.last_token, maps, outputs
    storage_rules = StorageRules(policy.layout, policy.index.key, unit, rules.last_token, outputs)
    stored = policy.store.state_bytes
    return Storage(
        name, lambda: storage_rules, last_token=rules.last_token, map_bytes=maps, state_bytes=stored
    )


@storage_of.register
def _(policy: BlockPolicy) -> Storage:
    storage_rules = StorageRules(whole, salted_parent, policy.blocks.size, outputs=True)
    return Storage(
        ("blocks", storage_rules.unit), lambda: storage_rules, reserved=False, pooled=True
    )


T = TypeVar("T")
_IN_SECONDS = ("least_ttft_s", "ttft_regret_s")
UNBOUNDED = ("offline_tokens", "offline_methods", "regret_points", *_IN_SECONDS)


class BoundCrossedError(ValueError):
    """A run exceeds a proven bound: the bound or the simulation is wrong, and the study reports no
    result."""


def check_not_crossed(arm: str, records: Columns, bound: int) -> None:
    """Raise where the counted requests of a run reuse more tokens than a proven bound."""
    reused = int(records["reused_tokens"][records["counted"].astype(bool)].sum())
    if reused > bound:
        seed = int(records["seed"][0])
        raise BoundCrossedError(
            f"arms.{arm} with seed {seed} reused {reused:,} tokens: expected at most {bound:,}"
        )


def whole_ns(records: Columns) -> int:
    """Return the sum of TTFTs in nanoseconds; a clock of whole nanoseconds wrote the times."""
    first, arrived = (
        np.rint(records[name] / NS).astype(np.int64) for name in ("first_token_s", "arrived_s")
    )
    return int(ttft(arrived, first).sum())


@dataclass
class StudyBounds:
    """Bounds of the runs of one study; results that arms share are computed once.

    All arms admit in order of arrival, so that most arms differ only in their unit of storage.
    """

    runtime: Runtime
    _cache: dict[Hashable, Any] = field(default_factory=dict)

    def of_arm(self, arm: str, columns: Columns) -> dict[str, Any]:
        """Bounds and regrets of one arm; `columns` has all records of its runs, including the
        warm-up.

        `infinite_prefix_tokens`, `infinite_any_position_tokens`  reused tokens of a cache without
                                                                  limit
        `offline_tokens`  upper bound for every cache with the arm's unit and memory
        `offline_methods`  methods that computed the bound, over all runs (`spanlab.offline.bound`)
        `regret_points`   (offline - reused) ÷ prompt tokens of the counted requests, in percent
        These three are None for a policy from a plugin, and for passages in the order of the cache.
        `least_ttft_s`    lower bound of the mean TTFT of such a cache, without queueing
                          (`spanlab.offline.bound`)
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
        least, seconds = total.pop("least_ttft_ns", None), dict.fromkeys(_IN_SECONDS)
        if least is not None:  # a sum over requests
            requests, ns = len(counted["seed"]), whole_ns(counted)
            if ns < least:
                raise BoundCrossedError(
                    f"arms.{arm} has TTFTs of {ns:,} ns in all: expected at least {least:,}"
                )
            seconds = {
                "least_ttft_s": least * NS / requests,
                "ttft_regret_s": (ns - least) * NS / requests,
            }
        return total | {"offline_methods": methods, "regret_points": regret} | seconds

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
        strategy = self.runtime.jobs.study.arms[arm]
        # the arm reuses only prefixes, and computes at least the last prompt token
        finds_prefixes = (
            strategy.spans is None
            and strategy.passages.are_default
            and strategy.last_token == "recompute"
        )
        if self._least is not None and finds_prefixes:
            prefill = Prefill(
                self._lengths[order.prompts],
                order.counted,
                self._least.computing,
                self._least.step_ns,
            )
            least = self._cached(("ttft", *key), lambda: least_ttft(reuses, memory, prefill))
            result |= {
                "least_ttft_ns": least.value,
                "offline_methods": {bound.method, least.method},
            }
        return self._infinite(storage, order) | result

    @cached_property
    def _least(self) -> LeastPrefill | None:
        """Least prefill times under the study's timing model; None where times are measured or it
        has no such bound."""
        if self.runtime.backend.interleaved:
            return None
        study = self.runtime.jobs.study
        return least_prefill(build_timing(study), study.model, study.hardware)

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
        anywhere = Storage(
            ("any position", options), lambda: any_position_rules(*options), view=storage.view
        )
        tokens = self._reuses(prefix, order).infinite_tokens
        most = tokens
        # else the ordered text is all of a prompt, and only prefixes are shared
        if self._has_independent:
            most = max(tokens, self._reuses(anywhere, order).infinite_tokens)
        return {"infinite_prefix_tokens": tokens, "infinite_any_position_tokens": most}

    @cached_property
    def _has_independent(self) -> bool:
        return any(span.independent for request in self._served for span in request.spans)

    def _storage(self, arm: str) -> Storage:
        study = self.runtime.jobs.study
        passages = study.arms[arm].passages

        def make() -> Storage:
            storage = replace(
                storage_of(build_policy(study, study.arms[arm], 0, 1)), view=passages.view
            )
            return storage if passages.order == "given" else replace(storage, bounded=False)

        return self._cached(("storage", arm), make)

    def _order(self, records: Columns, reserved: bool) -> ServiceOrder:
        """First admissions of one run, ordered by time, then by arrival."""
        prompts = self._prompts(int(records["seed"][0]))
        arrival = np.array([prompts[number].arrival for number in records["request_id"].tolist()])
        prompt_numbers = np.array(
            [prompts[number].prompt for number in records["request_id"].tolist()]
        )
        rows = np.lexsort((arrival, records["admitted_s"]))
        run = {name: values[rows] for name, values in records.items()}
        preempted, counted = run["preemptions"] > 0, run["counted"].astype(bool)
        times = run["admitted_s"], run["finished_s"]
        return service_order(Admissions(prompt_numbers[rows], *times, preempted, counted), reserved)

    def _prompts(self, seed: int) -> dict[int, _PromptRef]:
        """Map each request id to its prompt's index in the workload and its index by arrival."""

        def make() -> dict[int, _PromptRef]:
            numbers = {
                id(request.spans): index for index, request in enumerate(self.runtime.jobs.requests)
            }
            arrived = self.runtime.jobs.arrivals(
                RunCell(seed, self.runtime.jobs.study.arrivals.rate_rps)
            )
            return {
                request.id: _PromptRef(numbers[id(request.spans)], index)
                for index, request in enumerate(arrived)
            }

        return self._cached(("prompts", seed), make)

    def _reuses(self, storage: Storage, order: ServiceOrder) -> Reuses:
        key = (storage.name, storage.view, _fingerprint(order), "reuses")
        return self._cached(key, lambda: find_reuses(self._forest(storage), order))

    def _forest(self, storage: Storage) -> Forest:
        key = (storage.name, storage.view, "forest")
        return self._cached(
            key, lambda: build_forest(in_view(self._served, storage.view), storage.rules())
        )

    def _memory(self, arm: str, storage: Storage) -> CacheMemory:
        """Memory of the device and of the tiers that the arm uses, over all replicas."""
        study = self.runtime.jobs.study
        model, budget = study.model, storage.budget(study.store.budget)
        states = storage.least_state(model.state_bytes) if model.is_hybrid else 0
        lower = tier_bytes(study, study.arms[arm])
        total, state = (
            min(device + lower, UNLIMITED) for device in (budget.total_bytes, budget.state_bytes)
        )
        # one shared cache is at least as good as separate ones
        memory = replace(budget, total_bytes=total, state_bytes=state).times(study.replicas.count)
        token_bytes = held_token_bytes(study.model, study.batch)
        # frees what layers of windows no longer read
        if POLICIES.takes(study.arms[arm].policy_name, "in_flight"):
            token_bytes -= model.kv_bytes_per_token - model.full_bytes_per_token
        return CacheMemory(memory, token_bytes, states)

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


# ------------------------------------------------------------------------------
# Clairvoyant arms compared with online arms: an error if a provably optimal one is beaten, else
# a caveat.
# ------------------------------------------------------------------------------


class ClairvoyantBeatenError(ValueError):
    """An arm reused more than an optimal clairvoyant: the simulation is wrong, and the study
    reports no result."""


def served_alone(columns: Columns) -> bool:
    """Whether each request is admitted only after all earlier requests of its seed have
    finished."""
    rows = np.lexsort((columns["admitted_s"], columns["seed"]))
    seed, admitted, finished = (
        columns[name][rows] for name in ("seed", "admitted_s", "finished_s")
    )
    same = seed[1:] == seed[:-1]
    return bool((admitted[1:] >= finished[:-1])[same].all())


#: Settings that a clairvoyant shares with the arms that it bounds: matching and units.
_SAME_TASK = ("match", "block_size", "spans", "passages", "pool", "last_token")


def describe_beaten(study: Study, arms: Sequence[ArmData]) -> list[str]:
    """Caveats for clairvoyants that an online arm beats; ClairvoyantBeatenError where the
    clairvoyant is optimal."""
    sentences = []
    for clairvoyant in arms:
        task = study.arms[clairvoyant.name]
        if not task.foresees:
            continue
        rivals = []
        for arm in arms:
            online = study.arms[arm.name]
            equal = all(getattr(online, key) == getattr(task, key) for key in _SAME_TASK)
            if equal and not online.foresees:
                rivals.append(arm)
        best = max(rivals, key=_reused, default=clairvoyant)
        if _reused(best) <= _reused(clairvoyant):
            continue
        result = f"arms.{best.name} reused {_reused(best):,} tokens"
        if best.summary["bounds"]["served_alone"] and is_optimal(study, clairvoyant):
            raise ClairvoyantBeatenError(
                f"{result}: expected at most {_reused(clairvoyant):,}, those of arms.{clairvoyant.name}"
            )
        sentences.append(
            f"{result}, more than the {_reused(clairvoyant):,} of the clairvoyant {clairvoyant.name}, "
            "which is no bound here"
        )
    return sentences


def is_optimal(study: Study, clairvoyant: ArmData) -> bool:
    """Whether a clairvoyant provably reuses the most tokens of all arms with the same matching.

    Belady's rule is optimal where entries of equal size are evicted one by one (blocks of KV only),
    and where the other memory does not depend on the arm (one request at a time).
    """
    arm = study.arms[clairvoyant.name]
    blocks = arm.policy_name == "tree" and arm.match == "block_hash" and study.store.entries is None
    kv_alone = arm.spans is None and not study.model.is_hybrid and not study.store.tiers
    return (
        arm.eviction == "belady"
        and blocks
        and kv_alone
        and bool(clairvoyant.summary["bounds"]["served_alone"])
    )


def _reused(arm: ArmData) -> int:
    return int(arm.summary["tokens"]["reused"])


# ------------------------------------------------------------------------------
# Results of one arm from its files: the summary, and the columns that figures use.
# ------------------------------------------------------------------------------

# Columns that figures use; sending complete records between processes would cost more than drawing.
REPORTED = ("seed", "arrived_s", "first_token_s", "prompt_tokens", "seen_tokens", "reused_tokens")

#: How reusable tokens are counted: as prefixes of prompts, or as spans at any position.
PREFIXES, ANYWHERE = "prefixes", "spans anywhere"

REMEDY = "expected more memory, or a smaller store, batch or workload; rerun with output.if_exists=resume"


@dataclass(frozen=True)
class ArmFailure:
    """An arm that failed, with the reason in one sentence."""

    arm: str
    sentence: str


class ArmsFailedError(ValueError):
    """Some arms of a study failed; its folder is complete for the others."""


def raise_failures(failed: dict[str, str], arms: int) -> None:
    """Raise where some of `arms` arms failed; call it after all files are written."""
    if failed:
        lost = f"{len(failed)} of {arms} arms failed, the others are reported"
        raise ArmsFailedError(f"{lost}: {'; '.join(failed.values())}; {REMEDY}")


class LimitError(ValueError):
    """A result exceeds the limit `fail_on`; the study is complete."""


def raise_limit(fail_on: str | None, summary: dict[str, Any]) -> None:
    """Raise where the explained arm exceeds the limit; call it after all files are written."""
    if fail_on is None:
        return
    limit, name = parse_limit(fail_on), summary["baseline"]
    numbers = summary["presets"].get(name)
    if numbers is None:
        raise LimitError(
            f"fail_on={fail_on}: the log has only lengths; expected a log that shows what prompts share"
        )
    if limit.holds(numbers):
        raise LimitError(
            f"fail_on={fail_on}: {limit.metric} of {name} is {numbers[limit.metric]:.4f}"
        )


def raise_unequal(fail_on: list[str], summary: dict[str, Any]) -> None:
    """Raise where a running server and ours differ in what must be equal; call it after all files
    are written."""
    broken = [name for name in summary.get("rendezvous", {}).get("broken", ()) if name in fail_on]
    if broken:
        limit = f"analyses.rendezvous.fail_on={fail_on}"
        raise LimitError(
            f"{limit}: not equal: {', '.join(broken)}; the table above has the first difference"
        )


class BarMissedError(ValueError):
    """A result misses a bar; the study is complete."""


def raise_missed(summary: dict[str, Any]) -> None:
    """Raise where a result misses a bar; call it after all files are written."""
    verdicts = [verdict_of(bar) for bar in summary.get("bars", ())]
    sentences = [verdict.sentence() for verdict in verdicts if not verdict.holds]
    if sentences:
        raise BarMissedError("; ".join(sentences))


@dataclass(frozen=True)
class ArmResult:
    """Summary of one arm, before arms are compared.

    bound        tokens that an infinite cache would have reused
    ttft_sums    seconds of TTFT by seed and group, shape (seeds, groups)
    """

    data: ArmData
    load: list[LoadPoint]
    bound: int
    ttft_sums: NDArray[np.float64]

    @property
    def saturated(self) -> bool:
        """Whether the arm's queue grows at the study's load."""
        return bool(self.data.summary["stationarity"]["verdict"] == SATURATED)


def read_arm(study: Study, arm: str, files: ArmFiles, bounds: StudyBounds) -> ArmResult:
    """Read and summarize one arm's records and runs."""
    # read the records and runs of the study's cells; files of a resumed run may have more cells
    columns, runs = read_records(files.records), files.finished()
    study_cells = set(run_cells(study, arm))
    selected = np.repeat(
        [RunCell.of(run) in study_cells for run in runs], [run["requests"] for run in runs]
    )
    columns = select(columns, selected)
    runs = [run for run in runs if RunCell.of(run) in study_cells]
    records = select(
        columns,
        at_rate(columns, study.arrivals.rate_rps) & np.isin(columns["seed"], study.runs.seeds),
    )
    counted = select(records, records["counted"].astype(bool))
    base_runs = [
        run
        for run in runs
        if run["rate_rps"] == study.arrivals.rate_rps and run["seed"] in study.runs.seeds
    ]
    strategy = study.arms[arm]
    load = load_of(records, base_runs, study.arrivals.clients)
    summary = summarise(family(strategy), counted, base_runs, study.runs.count_hit_as, load)
    summary["bytes"]["copied_mean"] = copied_mean_bytes(
        records, base_runs, study.model.kv_bytes_per_token
    )
    summary["bounds"] = bounds.of_arm(arm, records)
    summary["bounds"]["served_alone"] = served_alone(records)
    summary["finds"] = (
        PREFIXES if strategy.spans is None and strategy.passages.order == "given" else ANYWHERE
    )
    # the tokens that a cache without limit reuses at the positions where the arm looks
    hit_last = strategy.last_token == "reuse"
    if summary["finds"] == PREFIXES:
        infinite_cache = bound_tokens(counted, hit_last)
    else:
        infinite_cache = int(summary["bounds"]["infinite_any_position_tokens"])
    load_points = []
    if arm in study.runs.load.arms:
        for rate in sorted({*study.runs.load.rates_rps, study.arrivals.rate_rps or 0.0} - {0.0}):
            rate_runs = [run for run in runs if run["rate_rps"] == rate]
            rate_columns = select(columns, at_rate(columns, rate))
            load_points.append(load_point(arm, family(strategy), rate_columns, rate_runs))
    return ArmResult(
        data=ArmData(
            arm, summary["family"], {name: counted[name] for name in REPORTED}, base_runs, summary
        ),
        load=load_points,
        bound=infinite_cache,
        ttft_sums=ttft_sums(counted),
    )


def family(strategy: Strategy) -> str:
    """Family of an arm, which decides its colour in figures."""
    return strategy.family or strategy.placement.kind
