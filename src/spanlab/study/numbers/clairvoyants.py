"""Arms that know what comes, beside those that do not: never beaten where that is proven, else told when they are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spanlab.report.data import ArmData
from spanlab.settings import Study
from spanlab.study.numbers.summary import Columns


class ClairvoyantBeatenError(ValueError):
    """An arm reused more than an optimal clairvoyant: the simulation is wrong, so that nothing is reported."""


def served_alone(columns: Columns) -> bool:
    """Whether each request of every seed is admitted when all before it have finished."""
    rows = np.lexsort((columns["admitted_s"], columns["seed"]))
    seed, admitted, finished = (columns[name][rows] for name in ("seed", "admitted_s", "finished_s"))
    same = seed[1:] == seed[:-1]
    return bool((admitted[1:] >= finished[:-1])[same].all())


def beaten(study: Study, arms: Sequence[ArmData]) -> list[str]:
    """Sentences on clairvoyants that an arm in the dark beats; ClairvoyantBeatenError where that cannot be."""
    said = []
    for known in arms:
        rivals = [one for one in arms if _rivals(study, one.name, known.name)]
        best = max(rivals, key=_reused, default=known)
        if _reused(best) <= _reused(known):
            continue
        told = f"arms.{best.name} reused {_reused(best):,} tokens"
        if best.summary["bounds"]["served_alone"] and is_optimal(study, known):
            raise ClairvoyantBeatenError(f"{told}: expected at most {_reused(known):,}, those of arms.{known.name}")
        said.append(f"{told}, more than the {_reused(known):,} of the clairvoyant {known.name}, which is no bound here")
    return said


def is_optimal(study: Study, known: ArmData) -> bool:
    """Whether a clairvoyant is proven to reuse the most of all arms that find what it finds.

    Belady's rule is where entries of one size leave one by one: blocks of KV alone; and where the memory beside them
    does not depend on the arm: one request at a time.
    """
    arm = study.arms[known.name]
    blocks = arm.policy_name == "tree" and arm.match == "block_hash" and study.store.entries is None
    kv_alone = arm.spans is None and not study.model.is_hybrid and not study.store.tiers
    return arm.eviction == "belady" and blocks and kv_alone and bool(known.summary["bounds"]["served_alone"])


def _rivals(study: Study, blind: str, known: str) -> bool:
    """Whether an arm finds what the clairvoyant finds, in the same units, and knows nothing of what comes."""
    one, other = study.arms[blind], study.arms[known]
    same = ("match", "block_size", "spans", "passages", "pool", "last_token")
    alike = all(getattr(one, key) == getattr(other, key) for key in same)
    return alike and bool(other.foresees) and not one.foresees


def _reused(arm: ArmData) -> int:
    return int(arm.summary["tokens"]["reused"])
