"""What an arm's rules for recurrent states must be for each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spanlab.core.placement import PLACEMENTS, PROGRESS

if TYPE_CHECKING:
    from spanlab.settings.arms import Strategy


def check_states(name: str, arm: Strategy) -> None:
    """Refuse rules that would change nothing, or that an arm of another kind does not follow."""
    path = f"arms.{name}"
    for kind in (arm.placement.kind, *arm.placement.also):
        if kind in PLACEMENTS.needing(PROGRESS):
            _check_following(path, kind, arm)
    if arm.cache.states_per_path is not None and not arm.placement.places:
        raise ValueError(
            f"{path}.cache.states_per_path={arm.cache.states_per_path} with {path}.placement.kind=none: expected null"
        )


def _check_following(path: str, kind: str, arm: Strategy) -> None:
    """Refuse arms whose requests do not take states as tokens are computed."""
    if arm.sharing == "private":
        raise ValueError(f"{path}.placement.kind={kind} with {path}.sharing=private: expected shared")
    if arm.spans is not None:
        raise ValueError(f"{path}.placement.kind={kind} with {path}.spans: expected null, for states of whole prompts")
