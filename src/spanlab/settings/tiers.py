"""Checks of memory tiers: against each other, the arms, the model and the backend."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from spanlab.core.tiers.rules import FORMAT_BITS, TierRules
from spanlab.model_spec import ModelSpec

BACKFILL = "state_backfill"

if TYPE_CHECKING:
    from spanlab.settings.study import Study


def check_tiers(study: Study) -> None:
    """Raise ValueError for invalid tiers, and for settings that need tiers where none is set."""
    tiers = {f"store.tiers.{name}": rules for name, rules in study.store.tiers.items()}
    if not tiers:
        _check_without(study)
        return
    for path, rules in tiers.items():
        rules.check(path)
        _check_formats(path, rules, study.model)
    _check_order(tiers)
    _check_arms(study)
    if study.replicas.count > 1:
        count = f"replicas.count={study.replicas.count}"
        raise ValueError(f"store.tiers={_names(study)} with {count}: expected 1, for tiers belong to one engine")
    if study.backend != "sim":
        raise ValueError(f"store.tiers={_names(study)} with backend={study.backend}: expected backend=sim")
    if not study.serves:
        raise ValueError(f"store.tiers={_names(study)} with analyses={study.analyses}: expected store.tiers={{}}")


def _names(study: Study) -> str:
    return f"[{', '.join(study.store.tiers)}]"


def _check_without(study: Study) -> None:
    for name in study.chosen():
        if study.arms[name].recovery == BACKFILL:
            key = f"arms.{name}.recovery={BACKFILL} without store.tiers"
            raise ValueError(f"{key}: expected a tier, as in +tier@store.tiers.host=dram")
    for name, arm in study.arms.items():
        if arm.pool is not None and arm.pool.load_when is not None:
            path = f"arms.{name}.pool.load_when={arm.pool.load_when}"
            raise ValueError(f"{path} without store.tiers: expected null, or a tier, as in +tier@store.tiers.host=dram")
    if "tiers" in study.chosen_analyses():
        raise ValueError("analyses=tiers without store.tiers: expected a tier, as in +tier@store.tiers.host=dram")


def _check_formats(path: str, rules: TierRules, model: ModelSpec) -> None:
    if rules.quantise_to is None:
        return
    if model.is_hybrid:
        raise ValueError(
            f"{path}.action=quantise with model.name={model.name}: expected evict or demote, for recurrent states are "
            "not quantised"
        )
    if FORMAT_BITS[rules.quantise_to] >= 8 * model.kv_itemsize:
        raise ValueError(
            f"{path}.quantise_to={rules.quantise_to} with model.kv_itemsize={model.kv_itemsize}: expected fewer bits"
        )


def _check_order(tiers: dict[str, TierRules]) -> None:
    """Raise ValueError unless each tier with write=back is below a tier with action=demote, and vice versa."""
    for (above, upper), (below, lower) in pairwise(tiers.items()):
        if lower.write == "back" and upper.action != "demote":
            raise ValueError(f"{below}.write=back with {above}.action={upper.action}: expected {above}.action=demote")
    path, last = list(tiers.items())[-1]
    if last.action == "demote":
        raise ValueError(f"{path}.action=demote: expected evict or quantise, for no tier is below it")


def _check_arms(study: Study) -> None:
    """Raise ValueError for arms that run and have no blocks, which tiers store."""
    arms = {name: study.arms[name] for name in study.chosen()}
    of_states = [name for name, arm in arms.items() if arm.recovery == BACKFILL]
    for name in of_states:
        _check_backfill(study, name)
    for name, arm in arms.items():
        if arm.policy_name != "blocks" and not of_states:  # beside arms with backfill it is a baseline
            raise ValueError(
                f"arms.{name} with store.tiers={_names(study)}: expected arms.{name}.pool, "
                f"for tiers hold hashed blocks, or an arm with recovery={BACKFILL}"
            )


def _check_backfill(study: Study, name: str) -> None:
    """Raise ValueError for tier settings that states do not support."""
    for tier, rules in study.store.tiers.items():
        for key, values in (("write", ("through", "back")), ("load", ("blocking",))):
            value = getattr(rules, key)
            if value not in values:
                pair = f"store.tiers.{tier}.{key}={value} with arms.{name}.recovery={BACKFILL}"
                raise ValueError(f"{pair}: expected {' or '.join(values)}")
