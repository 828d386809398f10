"""Cache rules of a study's arms, for the replay of a log."""

from __future__ import annotations

from dataclasses import dataclass, replace

from spanlab import build
from spanlab.build import GIB
from spanlab.core.placement import PLACEMENTS, PROGRESS, PrefillInfo
from spanlab.core.placement.contract import Rule
from spanlab.core.policies.named import BLOCK
from spanlab.model_spec import ModelSpec
from spanlab.offline.replay import CacheRules
from spanlab.settings import Strategy, Study

PREFIX_POLICIES = ("tree", "blocks")
ORDERS = ("lru", "lru_whole_leaves")


@dataclass(frozen=True)
class SpanRules:
    """A cache of spans that match at any position.

    `first`  tokens of each reused span that a repair recomputes; `share` is the recomputed share of the other tokens
    """

    capacity_tokens: float
    first: int = 0
    share: float = 0.0


Rules = CacheRules | SpanRules | None  # None: nothing is stored


def rules_of(study: Study, name: str, longest: int) -> Rules:
    """Return an arm's rules for prompts of at most `longest` tokens; ValueError if a replay cannot express them."""
    arm, model = study.arms[name], study.model
    if not arm.keep:
        return None
    _check(name, arm)
    if arm.spans is not None:
        return _span_rules(name, arm, model, capacity_of(study))
    return _pool(study, name) if arm.pool is not None else _tree(study, name, longest)


def capacity_of(study: Study) -> int:
    """Return the bytes of the store, for KV and states together."""
    for key in ("kv_gib", "state_gib", "state_ratio", "entries"):
        value = getattr(study.store, key)
        if value is not None:
            raise ValueError(f"store.{key}={value} with analyses=explain: expected store.total_gib, one budget for all")
    return build.build_budget(study.store).total_bytes


def _check(name: str, arm: Strategy) -> None:
    if arm.policy_name not in PREFIX_POLICIES:
        raise ValueError(f"arms.{name}.policy={arm.policy_name} with analyses=explain: expected null or a pool")
    if not arm.passages.are_default:
        raise ValueError(f"arms.{name}.passages with analyses=explain: expected given and all; it tries cached_order")
    if arm.eviction not in ORDERS:
        raise ValueError(f"arms.{name}.eviction={arm.eviction} with analyses=explain: expected lru")


def _span_rules(name: str, arm: Strategy, model: ModelSpec, capacity: int) -> SpanRules:
    assert arm.spans is not None, "called for arms of spans"
    spans, repair = arm.spans, arm.spans.repair
    supported = spans.provenance == "isolated" and spans.sharing == "canonical" and repair.kind in ("none", "first")
    if not supported or model.is_hybrid:
        setting = f"arms.{name}.spans with analyses=explain and model.name={model.name}"
        raise ValueError(f"{setting}: expected strategy pic or lego_link, and a model of attention layers alone")
    first = repair.k if repair.kind == "first" else 0
    assert first is not None, "a repair of the first tokens says how many"
    return SpanRules(capacity / model.kv_bytes_per_token, first)


def _pool(study: Study, name: str) -> CacheRules:
    """Return the rules of vLLM's pool: blocks of one size for KV and, in hybrid models, for states."""
    pool, model = study.arms[name].pool, study.model
    assert pool is not None, "called for arms with a pool"
    if pool.retention != 0 and model.is_hybrid:
        raise ValueError(f"arms.{name}.pool.retention={pool.retention} with analyses=explain: expected 0")
    return pool_rules(model, capacity_of(study), pool.block_size)


def pool_rules(model: ModelSpec, capacity: int, block_size: int | None) -> CacheRules:
    """Return the rules of a pool with blocks of `block_size` tokens; None: vLLM's block size for the model."""
    groups = model.state_groups
    size = block_size or (model.block_tokens_per_state(BLOCK) if groups else BLOCK)
    state = -(-model.state_bytes // groups) if groups else 0
    block_bytes = max(size * model.kv_bytes_per_token, state)
    null_block = 1
    rules = CacheRules(size, block_bytes, max(0, capacity // block_bytes - null_block) * block_bytes, pooled=True)
    return replace(rules, state_bytes=groups * block_bytes, unit=size, placer=_align(size)) if groups else rules


def _align(size: int) -> Rule:
    """Place states at the last block boundary, and at the end of a matched prefix that has none."""

    def positions(prefill: PrefillInfo) -> tuple[int, ...]:
        last = (prefill.prompt - 1) // size * size
        junction = min(prefill.matched, last)
        return (last, junction) if junction > prefill.resume else (last,)

    return Rule(positions)


def _tree(study: Study, name: str, longest: int) -> CacheRules:
    arm, model, capacity = study.arms[name], study.model, capacity_of(study)
    rules = CacheRules(arm.block_size, arm.block_size * model.kv_bytes_per_token, capacity)
    if not model.is_hybrid:
        return rules
    _check_states(name, arm)
    return replace(
        rules,
        state_bytes=model.state_bytes,
        unit=max(arm.block_size, model.grid),
        placer=build.build_placer(model, arm, 0, longest),
        outputs=False,
        to_state=arm.cache.store_to == "state",
    )


def _check_states(name: str, arm: Strategy) -> None:
    """Raise ValueError for placements of states that depend on more than lengths of prompts."""
    kinds = [kind for kind in (arm.placement.kind, *arm.placement.also) if kind in PLACEMENTS.needing(PROGRESS)]
    if kinds:
        raise ValueError(f"arms.{name}.placement.kind={kinds[0]} with analyses=explain: expected one of prompts alone")
    for key, usual in (("recovery", "recompute"), ("state_format", "native")):
        if getattr(arm, key) != usual:
            raise ValueError(f"arms.{name}.{key}={getattr(arm, key)} with analyses=explain: expected {usual}")
    if arm.cache.states_per_path is not None:
        setting = f"arms.{name}.cache.states_per_path={arm.cache.states_per_path}"
        raise ValueError(f"{setting} with analyses=explain: expected null")


def check_fits(study: Study, rules: Rules, tokens: int, request: int) -> None:
    """Raise ValueError where the memory is too small for the longest prompt alone."""
    if not isinstance(rules, CacheRules):
        return
    need = -(-tokens // rules.block) * rules.block_bytes + rules.state_bytes
    if need > rules.capacity_bytes:
        raise ValueError(
            f"store.total_gib={study.store.total_gib}: expected at least {need / GIB:.3g} GiB, for request {request} "
            f"of the log alone has {tokens:,} tokens of {study.model.name}"
        )
