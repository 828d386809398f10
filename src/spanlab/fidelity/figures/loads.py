"""What the figures share: loads as panels, arms as strokes."""

from __future__ import annotations

from collections.abc import Sequence

from spanlab.fidelity.compare import Compared
from spanlab.report import look


def by_load(found: Sequence[Compared]) -> dict[str, list[Compared]]:
    """Arms by load, light loads first; a study that set a rate instead is named by it."""
    loads = dict.fromkeys(name_of(one) for one in sorted(found, key=lambda one: (one.share or 0, one.rate_rps or 0)))
    return {load: [one for one in found if name_of(one) == load] for load in loads}


def name_of(one: Compared) -> str:
    """A load in words."""
    if one.share is not None:
        return f"load {one.share:g} of saturation"
    return "recorded arrivals" if one.rate_rps is None else f"{one.rate_rps:g} requests/s"


def strokes(found: Sequence[Compared]) -> dict[str, look.Stroke]:
    """How each arm is drawn."""
    return look.strokes({one.arm: one.family for one in found}.items())
