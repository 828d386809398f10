"""Which arms stand for a study where all of them would be too many to read."""

from __future__ import annotations

from collections.abc import Iterable

from spanlab.report.data import ArmData
from spanlab.report.measures import reads_nothing

_REFERENCES = ("none", "kv_only")


def best_of_families(arms: Iterable[ArmData], limit: int) -> list[ArmData]:
    """The arm with the highest token hit rate of each family, references first, at most `limit` arms."""
    best: dict[str, ArmData] = {}
    for arm in arms:
        rival = best.get(arm.family)
        if rival is None or _rank(arm) < _rank(rival):
            best[arm.family] = arm
    references = [best.pop(family) for family in _REFERENCES if family in best]
    return (references + sorted(best.values(), key=_rank))[:limit]


def reference(arms: Iterable[ArmData]) -> ArmData | None:
    """The full recompute, if the study has one."""
    return next((arm for arm in arms if reads_nothing(arm)), None)


def _rank(arm: ArmData) -> tuple[float, str]:
    return -float(arm.summary["token_hit_rate"]), arm.name
