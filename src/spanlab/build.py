"""Builders: policy, scheduler, backend and server of a run from its settings."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from spanlab.compiled import HOME
from spanlab.core.admission import ADMISSIONS, AdmissionFacts, BatchRules
from spanlab.core.placement.planner import Departures
from spanlab.core.placement.rules import (
    PLACEMENTS,
    PROGRESS,
    ArmFacts,
    Checked,
    Following,
    Placer,
    Union,
)
from spanlab.core.policies.blocks import BlockPolicy
from spanlab.core.policies.named import POLICIES
from spanlab.core.policies.tiered import BackfilledPolicy, TieredPolicy
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.protocol import PassageRules, Policy
from spanlab.core.repair import PREFIXES_ALONE, Repair, map_bytes, working_map_bytes
from spanlab.core.request import Request
from spanlab.core.rules import (
    RECOVERIES,
    STATE_FORMATS,
    Progress,
    Recovery,
    ReuseRules,
    StateFormat,
    merge_progress,
)
from spanlab.core.step import SpanReads
from spanlab.core.store import Store
from spanlab.core.tiers import Link, Tier, TierRules, Tiers
from spanlab.core.tree import LAYOUTS, PrefixTree, composable
from spanlab.engine.settings import EngineSettings, dtype_of
from spanlab.model_files import use_converter
from spanlab.model_spec import COSTS, Cost, CostOf, HardwareSpec, ModelSpec
from spanlab.provenance import machine
from spanlab.registry import Registry
from spanlab.settings.arms import Strategy, departures, eviction_rules
from spanlab.settings.server import StoreSettings, held_token_bytes
from spanlab.settings.study import Study
from spanlab.workloads.files import is_pipe
from spanlab.workloads.load import WorkloadSettings, load_workload, refuse_selection
from spanlab.workloads.logs.read import LogWorkload, open_log, served
from spanlab.workloads.workload import Workload
from spanlab_sim.bounds import PrefillTime
from spanlab_sim.routing import Route
from spanlab_sim.server import Replica
from spanlab_sim.timing import TimingModel
from spanlab_sim.timings import Profile, read_profile

if TYPE_CHECKING:
    from spanlab.engine.engine import Engine
    from spanlab.engine.model import SpanModel


# ------------------------------------------------------------------------------
# Builders: the only place where settings become objects; a registered name is imported on first
# use.
# ------------------------------------------------------------------------------


def _convert(file: Path, folder: Path) -> None:
    from spanlab.engine.load import convert  # needs torch, and most runs convert nothing

    convert(file, folder)


use_converter(_convert)


class Parts(Protocol):
    """The part of a study that builders of policies, models and engines read."""

    @property
    def model(self) -> ModelSpec: ...

    @property
    def store(self) -> StoreSettings: ...

    @property
    def batch(self) -> BatchRules: ...

    @property
    def hardware(self) -> HardwareSpec: ...

    @property
    def engine(self) -> EngineSettings: ...


def build_workload(settings: WorkloadSettings, cache_dir: str, serves: bool = True) -> Workload:
    """Load the workload; requests of a log get token ids only if they are served."""
    workload = load_workload(settings, Path(cache_dir))
    if workload.log is None:
        return workload
    if serves:
        return served(workload, settings.selection)
    refuse_selection(settings)
    return workload


def copy_pipe(settings: WorkloadSettings) -> None:
    """Copy a log that comes through a pipe, so that worker processes that start later can read it
    too."""
    if (
        isinstance(settings, LogWorkload)
        and settings.path is not None
        and is_pipe(Path(settings.path))
    ):
        open_log(Path(settings.path), settings.log)


def build_route(study: Study, seed: int) -> Callable[[Sequence[Replica]], Route]:
    """Return the factory of the router, which takes the replicas of a run."""
    rng = np.random.default_rng([seed, 2])
    return lambda replicas: study.replicas.route(replicas, rng)


def build_timing(study: Study) -> TimingModel:
    """Build the timing model."""
    return study.timing.build(study.model, study.hardware, lambda path: profile_of(study))


def build_policy(
    study: Parts, strategy: Strategy, warmup: int, max_tokens: int, future: Sequence[Request] = ()
) -> Policy:
    """Build the policy of one arm.

    `warmup`      requests that are not counted
    `max_tokens`  length of the longest prompt
    `future`      all requests in order of arrival: clairvoyant rules read them, others only which
                  are continued
    """
    model, budget, name = study.model, study.store.budget, strategy.policy_name
    options = strategy.options if strategy.pool is None else strategy.pool.options
    tree = PrefixTree(strategy.block_size, fixed_blocks=strategy.match == "block_hash")
    drafter, token_bytes = study.batch.speculation, held_token_bytes(study.model, study.batch)
    rules = replace(
        build_reuse_rules(strategy, model),
        drops_last=drafter.has_kv and strategy.match == "block_hash",
    )
    state_bytes = model.state_bytes - rules.state_bytes_saved
    eviction = eviction_rules(strategy, build_cost(model, strategy), rules, future)
    known = departures(strategy, model, rules, future)
    admission = AdmissionFacts(budget, token_bytes)
    return POLICIES.make(
        name,
        {},
        options,
        rules=rules,
        admission=ADMISSIONS.make(
            strategy.admission, {}, strategy.admission_options, facts=admission
        ),
        store=Store(tree, token_bytes, state_bytes, budget, strategy.eviction, eviction),
        placer=build_placer(model, strategy, warmup, max_tokens, known),
        model=model,
        budget=budget,
        token_bytes=token_bytes,
        ahead=study.batch.async_scheduling,
        drafts=drafter.draft_tokens,
        drafter=drafter.reach,
        card=study.hardware.compute_capability,
        in_flight=study.batch.max_num_batched_tokens * (1 + study.batch.async_scheduling),
    )


def build_reuse_rules(strategy: Strategy, model: ModelSpec) -> ReuseRules:
    """Return the reuse rules of an arm."""
    spans = strategy.spans
    maps = None if spans is None else spans.maps
    repaired = spans is not None and spans.repair.kind != "none"
    state_format = build_state_format(model, strategy)
    recovery = build_recovery(model, strategy)
    return ReuseRules(
        keeps=strategy.keep,
        needs_states=model.is_hybrid,
        grid=model.grid,
        last_token=strategy.last_token == "reuse",
        layout=composable if maps else LAYOUTS["whole" if spans is None else spans.provenance],
        repair=Repair() if spans is None else spans.repair.of_model(model.attention_layers),
        copies=spans is not None and spans.copies,
        cache=strategy.cache,
        maps=maps,
        map_bytes=0 if maps is None else map_bytes(maps, model, repaired),
        working_map_bytes=0 if maps is None else working_map_bytes(model, repaired),
        progress=build_progress(model, strategy),
        replay=recovery.replay,
        backfills=recovery.backfill is not None,
        state_format=None if strategy.state_format == "native" else state_format,
        state_bytes_saved=model.state_bytes - state_format.num_bytes,
        bounded=model.bounded,
    )


#: Work of each form of the attention kernel beyond reading keys in place.
SPAN_READS = {
    "rotate_queries": SpanReads(restarts=True),
    "rotate_keys": SpanReads(rotates=True),
    "pre_rotated": SpanReads(),
}


def build_span_reads(strategy: Strategy) -> SpanReads | None:
    """Return the cost of reading an arm's reused spans; None if it reuses prefixes only."""
    return None if strategy.spans is None else SPAN_READS[strategy.spans.kernel]


def build_passages(strategy: Strategy) -> PassageRules | None:
    """Return the choice and order of passages of an arm; None if prompts are unchanged."""
    return None if strategy.passages.are_default else strategy.passages


def build_placer(
    model: ModelSpec,
    strategy: Strategy,
    warmup: int,
    max_tokens: int,
    known: Departures | None = None,
) -> Placer:
    """Build the placement of states; `known` is the future, for clairvoyant placements."""
    facts = ArmFacts(
        grid=model.grid,
        unit=max(strategy.block_size, model.grid),
        warmup=warmup,
        max_tokens=max_tokens,
        cost=build_cost(model, strategy),
        departures=known,
        token_bytes=model.kv_bytes_per_token,
        state_bytes=build_state_format(model, strategy).num_bytes,
    )
    placers = _placers(strategy, facts, PLACEMENTS)
    return placers[0] if len(placers) == 1 else Union(tuple(placers))


def build_progress(model: ModelSpec, strategy: Strategy) -> Progress | None:
    """Return the rule for states that are captured during the prefill; None if the arm has none."""
    facts = ArmFacts(model.grid, max(strategy.block_size, model.grid), 0, 0)
    followed = _placers(strategy, facts, PLACEMENTS.needing(PROGRESS))
    return merge_progress([placer.progress for placer in followed if isinstance(placer, Following)])


def build_cost(model: ModelSpec, strategy: Strategy) -> CostOf:
    """Return the cost function for the rules of an arm: the arm's cost, or the default of each
    rule."""

    def cost_of(usual: str) -> Cost:
        return COSTS.make(strategy.cost or usual, {}, strategy.cost_options, model=model)

    return cost_of


def build_recovery(model: ModelSpec, strategy: Strategy) -> Recovery:
    """Build the recovery of an arm, for KV that reaches deeper than a state."""
    return RECOVERIES.make(strategy.recovery, {}, strategy.recovery_options, model=model)


def build_state_format(model: ModelSpec, strategy: Strategy) -> StateFormat:
    """Build the storage format of an arm's states."""
    return STATE_FORMATS.make(strategy.state_format, {}, {}, model=model)


def _placers(
    strategy: Strategy, facts: ArmFacts, kinds: Container[str] | Registry[Placer]
) -> list[Placer]:
    """Build the placements of an arm that are among `kinds`."""
    settings = strategy.placement
    keys: list[tuple[str, Mapping[str, Any], Mapping[str, Any]]] = [
        (settings.kind, settings.keys, settings.options)
    ]
    keys += [(name, {}, {}) for name in settings.also]
    placers = []
    for kind, own_keys, options in keys:
        if kind in kinds:
            placer = PLACEMENTS.make(kind, own_keys, options, facts=facts)
            placers.append(
                Checked(placer, f"placement.kind={kind}") if PLACEMENTS.is_plugin(kind) else placer
            )
    return placers


# ------------------------------------------------------------------------------
# Builders of the engine: the model on its device, and one arm with its own pools; both import
# torch.
# ------------------------------------------------------------------------------


@dataclass(frozen=True)
class EngineParts:
    """Settings of an engine without a study, on an unknown card; the store has no limit unless it
    is set."""

    model: ModelSpec
    engine: EngineSettings
    batch: BatchRules
    store: StoreSettings = field(default_factory=StoreSettings)
    hardware: HardwareSpec = field(default_factory=lambda: HardwareSpec("unknown", 1.0, 1.0, 1.0))


def build_model(study: Parts) -> SpanModel:
    """Load the model on its device; ValueError if its sizes differ from those of the study's
    model."""
    from spanlab.engine.load import load_model

    return load_model(study.engine, study.model)


def build_engine(
    study: Parts,
    strategy: Strategy,
    model: SpanModel,
    policy: TreePolicy,
    requests: Sequence[Request],
    **more: Any,
) -> Engine:
    """Build the engine of one arm, with page and state pools that hold all that its policy may
    store."""
    from spanlab.engine.engine import Engine, spare_pages
    from spanlab.engine.load import pool_pages
    from spanlab.engine.maps import MapShape, SpanMaps, form_of
    from spanlab.engine.outputs import Sampler
    from spanlab.engine.pages import PagePool, PoolShape
    from spanlab.engine.slots import StatePool

    pages = pool_pages(policy, study.batch, requests, model.context) + spare_pages(
        study.engine.decode
    )
    shape = PoolShape(
        model.layers, pages, policy.store.tree.block_size, model.kv_heads, model.head_dim
    )
    pool = PagePool(shape, model.dtype, model.device)
    if model.state_shape is not None:
        more["states"] = StatePool(model.state_shape, model.dtype, model.device)
        if policy.rules.maps is not None:
            form, repaired = form_of(policy.rules.maps), policy.rules.repair.tokens
            more["maps"] = SpanMaps(
                MapShape(model.state_shape, form, model.dtype, repaired), model.device
            )
    sampler = Sampler(study.engine.temperature, study.engine.seed)
    positions = max(request.num_tokens + request.longest_output for request in requests)
    more |= {"positions": positions, "sampler": sampler, "decode": study.engine.decode}
    more["prefill"] = study.engine.prefill
    return Engine(model, pool, policy, strategy.spans or PREFIXES_ALONE, **more)


# ------------------------------------------------------------------------------
# Builders of memory tiers below the store, and of the policy over them.
# ------------------------------------------------------------------------------


def build_tiered(
    study: Study, strategy: Strategy, policy: Policy, batch: BatchRules
) -> TieredPolicy | BackfilledPolicy | None:
    """Build an arm's policy over the tiers of the study; None if the arm uses no tier."""
    used = tiers_of(study, strategy)
    if not used:
        return None
    model, backfill = study.model, build_recovery(study.model, strategy).backfill
    if isinstance(policy, TreePolicy):
        assert backfill is not None, "no other tree of prefixes looks at tiers"
        steps = None if backfill == "always" else build_prefill_time(study, policy, batch)
        return BackfilledPolicy(policy, _tiers(used, policy.store.state_bytes, model), steps)
    assert isinstance(policy, BlockPolicy), "other policies are refused where there are tiers"
    always = strategy.pool is not None and strategy.pool.load_when == "always"
    steps = None if always else build_prefill_time(study, policy, batch)
    return TieredPolicy(
        policy, _tiers(used, policy.store.block_bytes, model), steps, model.num_layers
    )


def _tiers(used: Mapping[str, TierRules], size: int, model: ModelSpec) -> Tiers:
    """Build tiers of blocks or states of `size` bytes."""
    tiers = [
        Tier(name, rules, size, rules.least_bytes(size, model.kv_itemsize))
        for name, rules in used.items()
    ]
    return Tiers(tiers, [Link(rules.bytes_per_s, rules.latency_s) for rules in used.values()])


def build_prefill_time(study: Study, policy: Policy, batch: BatchRules) -> PrefillTime:
    """Return the prefill time of a part of a prompt, by the study's timing model."""
    return PrefillTime(build_timing(study), batch, policy.rules)


def tiers_of(study: Study, strategy: Strategy) -> dict[str, TierRules]:
    """Return the tiers that an arm uses, the nearest first."""
    if strategy.pool is None:
        return (
            study.store.tiers if build_recovery(study.model, strategy).backfill is not None else {}
        )
    return {} if strategy.pool.load_when == "never" else study.store.tiers


def tier_bytes(study: Study, strategy: Strategy) -> int:
    """Return the capacity of an arm's tiers in bytes of unquantised blocks."""
    block = study.model.kv_bytes_per_token * (1 << 20)  # of any size
    tiers = tiers_of(study, strategy).values()
    return sum(
        rules.num_bytes * block // rules.least_bytes(block, study.model.kv_itemsize)
        for rules in tiers
    )


# ------------------------------------------------------------------------------
# Profiles on disk: their folder, the search for one that matches a study, and the reason of a
# mismatch.
# ------------------------------------------------------------------------------

PUBLISHED = HOME / "benchmarks" / "calibrate"


def profile_of(study: Study) -> Profile:
    """Return the profile that a study names, or a matching one; ValueError for a mismatch, or where
    none exists."""
    if study.timing.profile is not None:
        path = Path(study.timing.profile)
        profile = read_profile(path)
        if difference := mismatch(profile, study):
            raise ValueError(f"timing.profile={path}: {difference}")
        return profile
    matching = local_profile(study) or _matching_profile(study, PUBLISHED)
    if matching is None:
        name = study.model.name
        command = f"bash runall.sh -cn calibrate model={name}" + (
            " arms=clean" if study.model.is_hybrid else ""
        )
        raise ValueError(
            f"timing.profile is not set, and no profile of {name} on {machine()} exists: "
            f"expected one, as `{command}` creates it"
        )
    return matching


def local_profile(study: Study) -> Profile | None:
    """Return the profile of this model in the folder of outputs; None without one.

    A published profile with the same machine name may come from another machine.
    """
    return _matching_profile(study, profile_folder(HOME / study.output.root))


def _matching_profile(study: Study, folder: Path) -> Profile | None:
    for path in sorted(folder.glob("*.json")):
        profile = read_profile(path)
        if not mismatch(profile, study):
            return profile
    return None


def mismatch(profile: Profile, study: Study) -> str:
    """Describe why a profile does not match this study's model and this machine; empty where it
    matches."""
    model, engine = study.model, study.engine
    pairs = [
        ("model", profile.model, model.name),
        ("machine", profile.machine, machine()),
        ("dtype", profile.dtype, dtype_of(model)),
    ]
    if engine.device != "auto":
        kind = "cpu" if profile.device == "cpu" else "cuda"
        pairs.append(("device", kind, engine.device.partition(":")[0]))
    if engine.threads is not None:
        pairs.append(("threads", str(profile.threads), str(engine.threads)))
    for name, measured, expected in pairs:
        if measured != expected:
            return f"it was measured with {name} {measured}; expected {name} {expected}"
    return ""


def profile_folder(root: Path) -> Path:
    """Folder of stored profiles below the output root."""
    return root / "profiles"
