"""Selection of representative arms, for figures that cannot show all arms of a study."""

from __future__ import annotations

from collections.abc import Iterable

from spanlab.report.data import ArmData
from spanlab.report.measures import is_full_recompute

_REFERENCES = ("none", "kv_only")


def best_of_families(arms: Iterable[ArmData], limit: int) -> list[ArmData]:
    """Return the arm with the highest token hit rate of each family, references first, at most `limit` arms."""
    best: dict[str, ArmData] = {}
    for arm in arms:
        rival = best.get(arm.family)
        if rival is None or _rank(arm) < _rank(rival):
            best[arm.family] = arm
    references = [best.pop(family) for family in _REFERENCES if family in best]
    return (references + sorted(best.values(), key=_rank))[:limit]


def reference(arms: Iterable[ArmData]) -> ArmData | None:
    """Return the full recompute, or None if the study has none."""
    return next((arm for arm in arms if is_full_recompute(arm)), None)


def _rank(arm: ArmData) -> tuple[float, str]:
    return -float(arm.summary["token_hit_rate"]), arm.name
