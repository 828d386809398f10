"""Builders of memory tiers below the store, and of the policy over them."""

from __future__ import annotations

from collections.abc import Mapping

from spanlab.build import build_recovery, build_timing
from spanlab.core.batch_rules import BatchRules
from spanlab.core.policies.backfilled import BackfilledPolicy
from spanlab.core.policies.blocks import BlockPolicy
from spanlab.core.policies.tiered import TieredPolicy
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.protocol import Policy
from spanlab.core.tiers.link import Link
from spanlab.core.tiers.rules import TierRules
from spanlab.core.tiers.tier import Tier
from spanlab.core.tiers.tiers import Tiers
from spanlab.model_spec import ModelSpec
from spanlab.settings import Strategy, Study
from spanlab_sim.prefill_time import PrefillTime


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
    return TieredPolicy(policy, _tiers(used, policy.store.block_bytes, model), steps, model.num_layers)


def _tiers(used: Mapping[str, TierRules], size: int, model: ModelSpec) -> Tiers:
    """Build tiers of blocks or states of `size` bytes."""
    tiers = [Tier(name, rules, size, rules.least_bytes(size, model.kv_itemsize)) for name, rules in used.items()]
    return Tiers(tiers, [Link(rules.bytes_per_s, rules.latency_s) for rules in used.values()])


def build_prefill_time(study: Study, policy: Policy, batch: BatchRules) -> PrefillTime:
    """Return the prefill time of a part of a prompt, by the study's timing model."""
    return PrefillTime(build_timing(study), batch, policy.rules)


def tiers_of(study: Study, strategy: Strategy) -> dict[str, TierRules]:
    """Return the tiers that an arm uses, the nearest first."""
    if strategy.pool is None:
        return study.store.tiers if build_recovery(study.model, strategy).backfill is not None else {}
    return {} if strategy.pool.load_when == "never" else study.store.tiers


def tier_bytes(study: Study, strategy: Strategy) -> int:
    """Return the capacity of an arm's tiers in bytes of unquantised blocks."""
    block = study.model.kv_bytes_per_token * (1 << 20)  # of any size
    tiers = tiers_of(study, strategy).values()
    return sum(rules.num_bytes * block // rules.least_bytes(block, study.model.kv_itemsize) for rules in tiers)
