"""Checks of a study with speculative decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spanlab.core.policies.named import POLICIES

if TYPE_CHECKING:
    from spanlab.settings.study import Study

_PAIRS = "such a drafter's KV goes with pairs of tokens (SGLang keys its tree by them), which is not modelled here"


def check_speculation(study: Study) -> None:
    """Raise ValueError where drafts cannot be verified or rolled back."""
    key = f"batch.speculation.draft_tokens={study.batch.speculation.draft_tokens}"
    if not study.batch.speculation.draft_tokens:
        return
    if study.backend != "sim":
        raise ValueError(f"{key} with backend={study.backend}: expected 0, for that backend has no drafter")
    if study.model.is_hybrid:
        reason = "a rejected draft needs the recurrent state before it, and no policy here keeps one per draft"
        raise ValueError(f"{key} with model.name={study.model.name}: expected 0, for {reason}")
    if study.timing.kind == "calibrated":
        raise ValueError(f"{key} with timing.kind=calibrated: expected 0, for no drafts were measured")
    for name in study.chosen():
        if study.arms[name].spans is not None:
            reason = "verifying drafts on spans read at other positions is not modelled"
            raise ValueError(f"{key} with arms.{name}.spans: expected 0, for {reason}")
    if study.batch.speculation.has_kv:
        _check_kv(study)


def _check_kv(study: Study) -> None:
    """Raise ValueError for a drafter with KV where its cache hits or its memory are not modelled."""
    key = f"batch.speculation.method={study.batch.speculation.method}"
    if not study.serves:
        raise ValueError(f"{key} with analyses={study.chosen_analyses()}: expected ngram, for nothing is served")
    if study.store.tiers:
        reason = "vLLM holds a drafter's last blocks back from lower tiers, which is not modelled here"
        raise ValueError(f"{key} with store.tiers={list(study.store.tiers)}: expected none, for {reason}")
    for name in study.chosen():
        arm = study.arms[name]
        ruled = arm.match == "block_hash" and POLICIES.takes(arm.policy_name, "rules")
        if arm.keep and not (ruled or POLICIES.takes(arm.policy_name, "drops_last")):
            expected = "expected a pool of blocks, match=block_hash or keep=false"
            raise ValueError(f"{key} with arms.{name}.policy={arm.policy_name}: {expected}, for {_PAIRS}")
