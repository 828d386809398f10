"""Clairvoyant arms compared with online arms: an error if a provably optimal one is beaten, else a caveat."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spanlab.report.data import ArmData
from spanlab.settings import Study
from spanlab.study.numbers.summary import Columns


class ClairvoyantBeatenError(ValueError):
    """An arm reused more than an optimal clairvoyant: the simulation is wrong, and the study reports no result."""


def served_alone(columns: Columns) -> bool:
    """Whether each request is admitted only after all earlier requests of its seed have finished."""
    rows = np.lexsort((columns["admitted_s"], columns["seed"]))
    seed, admitted, finished = (columns[name][rows] for name in ("seed", "admitted_s", "finished_s"))
    same = seed[1:] == seed[:-1]
    return bool((admitted[1:] >= finished[:-1])[same].all())


def describe_beaten(study: Study, arms: Sequence[ArmData]) -> list[str]:
    """Caveats for clairvoyants that an online arm beats; ClairvoyantBeatenError where the clairvoyant is optimal."""
    sentences = []
    for clairvoyant in arms:
        rivals = [arm for arm in arms if _is_rival(study, arm.name, clairvoyant.name)]
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

    Belady's rule is optimal where entries of equal size are evicted one by one (blocks of KV only), and where the other
    memory does not depend on the arm (one request at a time).
    """
    arm = study.arms[clairvoyant.name]
    blocks = arm.policy_name == "tree" and arm.match == "block_hash" and study.store.entries is None
    kv_alone = arm.spans is None and not study.model.is_hybrid and not study.store.tiers
    return arm.eviction == "belady" and blocks and kv_alone and bool(clairvoyant.summary["bounds"]["served_alone"])


def _is_rival(study: Study, arm_name: str, clairvoyant_name: str) -> bool:
    """Whether an arm is online and has the same matching and units as the clairvoyant."""
    arm, clairvoyant = study.arms[arm_name], study.arms[clairvoyant_name]
    keys = ("match", "block_size", "spans", "passages", "pool", "last_token")
    equal = all(getattr(arm, key) == getattr(clairvoyant, key) for key in keys)
    return equal and bool(clairvoyant.foresees) and not arm.foresees


def _reused(arm: ArmData) -> int:
    return int(arm.summary["tokens"]["reused"])
