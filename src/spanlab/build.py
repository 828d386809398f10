"""Settings become objects here, and only here; names resolve to code when they are first used."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from spanlab.core.batch_rules import BatchRules
from spanlab.core.budget import UNLIMITED, Budget
from spanlab.core.cache_spans import LAYOUTS, composable
from spanlab.core.maps import map_bytes, working_map_bytes
from spanlab.core.placement import PLACEMENTS, ArmFacts, Checked, Placer, Union
from spanlab.core.policies.named import POLICIES
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.protocol import Policy
from spanlab.core.repair import Repair
from spanlab.core.request import Request
from spanlab.core.reuse_rules import ReuseRules
from spanlab.core.step_features import SpanReads
from spanlab.core.store import Store
from spanlab.core.tree import PrefixTree
from spanlab.model_spec import ModelSpec
from spanlab.settings import (
    EngineSettings,
    StoreSettings,
    Strategy,
    Study,
    WorkloadSettings,
)
from spanlab.workloads import Workload, load_workload
from spanlab.workloads.log import served
from spanlab_sim.arrivals import ARRIVALS, resample
from spanlab_sim.timing import TimingModel
from spanlab_sim.timings import TIMINGS

GIB = 1 << 30

DTYPES = {2: "bfloat16", 4: "float32"}


class Parts(Protocol):
    """What policies, models and engines are made of: a study, or as much of one."""

    @property
    def model(self) -> ModelSpec: ...

    @property
    def store(self) -> StoreSettings: ...

    @property
    def batch(self) -> BatchRules: ...

    @property
    def engine(self) -> EngineSettings: ...


def resolve(target: str) -> Any:
    """The object that a "module:name" string names."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def build_workload(settings: WorkloadSettings, cache_dir: str, serves: bool = True) -> Workload:
    """The workload's requests and what they really are; of a log, token ids are made only where it is served."""
    workload = load_workload(settings, Path(cache_dir))
    return served(workload) if serves and workload.log is not None else workload


def build_arrivals(study: Study, requests: tuple[Request, ...], seed: int, rate_rps: float | None) -> list[Request]:
    """Requests with their arrival times for one seed; equal seeds give equal sample paths at every rate."""
    popularity, settings = study.workload.popularity, study.arrivals
    if popularity.requests is not None:
        requests = tuple(resample(requests, popularity.requests, popularity.zipf, np.random.default_rng([seed, 1])))
    keys = settings.keys | {"rate_rps": rate_rps}
    return ARRIVALS.make(settings.kind, keys, settings.options, requests=requests, rng=np.random.default_rng([seed, 0]))


def build_timing(study: Study) -> TimingModel:
    """The timing model."""
    settings = study.timing
    return TIMINGS.make(
        settings.kind,
        settings.keys,
        settings.options,
        model=study.model,
        hardware=study.hardware,
        read_profile=lambda path: resolve("spanlab.study.profiles:profile_of")(study),
    )


def build_budget(settings: StoreSettings) -> Budget:
    """The store's budget in bytes."""
    kv, state, total = (
        UNLIMITED if gib is None else min(int(gib * GIB), UNLIMITED)
        for gib in (settings.kv_gib, settings.state_gib, settings.total_gib)
    )
    return Budget(kv, state, total, settings.entries or UNLIMITED)


def build_policy(study: Parts, strategy: Strategy, warmup: int, max_tokens: int) -> Policy:
    """One arm. `warmup` requests are not counted; `max_tokens` is the longest prompt to expect."""
    model, budget, name = study.model, build_budget(study.store), strategy.policy_name
    options = strategy.options if strategy.pool is None else asdict(strategy.pool)
    tree = PrefixTree(strategy.block_size, fixed_blocks=strategy.match == "block_hash")
    return POLICIES.make(
        name,
        {},
        options,
        rules=build_reuse_rules(strategy, model),
        store=Store(tree, model.kv_bytes_per_token, model.state_bytes, budget, strategy.eviction),
        placer=build_placer(model, strategy, warmup, max_tokens),
        model=model,
        budget=budget,
    )


def build_reuse_rules(strategy: Strategy, model: ModelSpec) -> ReuseRules:
    """What a policy obeys."""
    spans = strategy.spans
    maps = None if spans is None else spans.maps
    return ReuseRules(
        keeps=strategy.keep,
        needs_states=model.is_hybrid,
        grid=model.grid,
        last_token=strategy.last_token == "reuse",
        layout=composable if maps else LAYOUTS["whole" if spans is None else spans.provenance],
        repair=Repair() if spans is None else spans.repair,
        copies=spans is not None and spans.sharing == "private",
        cache=strategy.cache,
        maps=maps,
        map_bytes=0 if maps is None else map_bytes(maps, model),
        working_map_bytes=0 if maps is None else working_map_bytes(model),
    )


#: What each form of the attention kernel does beyond reading keys in place.
SPAN_READS = {
    "rotate_queries": SpanReads(restarts=True),
    "rotate_keys": SpanReads(rotates=True),
    "pre_rotated": SpanReads(),
}


def build_span_reads(strategy: Strategy) -> SpanReads | None:
    """What reading an arm's reused spans costs; None where it reuses prefixes only."""
    return None if strategy.spans is None else SPAN_READS[strategy.spans.kernel]


def build_key_layout(strategy: Strategy) -> Any:
    """How the engine reads what an arm stores."""
    key_layout = resolve("spanlab.engine.key_layout:KeyLayout")
    spans = strategy.spans
    if spans is None:
        return key_layout()
    copies = spans.sharing == "private"
    return key_layout(spans.keys, spans.positions, spans.kernel, copies, spans.temperature, spans.scale)


def device_of(study: Parts) -> str:
    """The engine's device: as asked, or where it is left open the first card, or the processor."""
    if study.engine.device != "auto":
        return study.engine.device
    return "cuda" if importlib.import_module("torch").cuda.is_available() else "cpu"


def build_model(study: Parts) -> Any:
    """The engine's model on its device; ValueError where its sizes are not those of the study's model."""
    settings, spec = study.engine, study.model
    torch = importlib.import_module("torch")
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    choice = resolve("spanlab.engine.load:ModelChoice")(
        name=settings.name or spec.name,
        weights=settings.weights,
        path=settings.path,
        dtype=DTYPES[spec.weight_itemsize],
        device=device_of(study),
        seed=settings.seed,
    )
    model = resolve("spanlab.engine.load:load_model")(choice)
    found = replace(model.spec(), name=spec.name)
    if found != spec:
        different = [key for key, value in asdict(found).items() if getattr(spec, key) != value]
        raise ValueError(
            f"model.{different[0]}={getattr(spec, different[0])}: {choice.name} has {getattr(found, different[0])}; "
            "expected the sizes of the model that the engine runs"
        )
    return model


def build_engine(
    study: Parts, strategy: Strategy, model: Any, policy: TreePolicy, requests: Sequence[Request], **more: Any
) -> Any:
    """One arm's engine over pools of its own, with room for what its policy may hold."""
    rules = study.batch
    pages = resolve("spanlab.engine.sizing:pool_pages")(policy, rules, requests, model.context)
    shape = resolve("spanlab.engine.pool:PoolShape")(
        model.layers, pages, policy.store.tree.block_size, model.kv_heads, model.head_dim
    )
    pool = resolve("spanlab.engine.pool:PagePool")(shape, model.dtype, model.device)
    if model.state_shape is not None:
        more["states"] = resolve("spanlab.engine.state_pool:StatePool")(model.state_shape, model.dtype, model.device)
    sampler = resolve("spanlab.engine.sampling:Sampler")(study.engine.temperature, study.engine.seed)
    positions = max(request.num_tokens + request.output_len for request in requests)
    engine = resolve("spanlab.engine.engine:Engine")
    return engine(model, pool, policy, build_key_layout(strategy), positions=positions, sampler=sampler, **more)


def build_placer(model: ModelSpec, strategy: Strategy, warmup: int, max_tokens: int) -> Placer:
    """Where states go: the placement's kind and whatever it adds."""
    settings = strategy.placement
    facts = ArmFacts(
        grid=model.grid,
        unit=max(strategy.block_size, model.grid),
        warmup=warmup,
        max_tokens=max_tokens,
        work=lambda depths: model.prefill_flops(0, depths),
    )
    placers = [_placer(settings.kind, settings.keys, settings.options, facts)]
    placers += [_placer(name, {}, {}, facts) for name in settings.also]
    return placers[0] if len(placers) == 1 else Union(tuple(placers))


def _placer(kind: str, keys: Mapping[str, Any], options: Mapping[str, Any], facts: ArmFacts) -> Placer:
    placer = PLACEMENTS.make(kind, keys, options, facts=facts)
    return Checked(placer, f"placement.kind={kind}") if PLACEMENTS.is_plugin(kind) else placer
