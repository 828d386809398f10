"""What figures of compared runs share: loads in words, looks of arms."""

from __future__ import annotations

from collections.abc import Sequence

from spanlab.analysis.compare import Compared
from spanlab.report import look


def name_of(one: Compared) -> str:
    """A load in words."""
    if one.share is not None:
        return f"load {one.share:g} of saturation"
    return "recorded arrivals" if one.rate_rps is None else f"{one.rate_rps:g} requests/s"


def strokes(found: Sequence[Compared]) -> dict[str, look.Stroke]:
    """The look of each arm."""
    return look.strokes({one.arm: one.family for one in found}.items())
