"""Checks of an arm's rules for recurrent states: against each other, the model, the backend and the timing model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spanlab.checks import one_of
from spanlab.core.placement import PLACEMENTS, PROGRESS
from spanlab.core.recovery import RECOVERIES
from spanlab.core.state_formats import STATE_FORMATS
from spanlab.model_spec import ModelSpec

if TYPE_CHECKING:
    from spanlab.settings.arms import Strategy
    from spanlab.settings.study import Study


def check_states(name: str, arm: Strategy, model: ModelSpec) -> None:
    """Raise ValueError for rules that would have no effect."""
    path = f"arms.{name}"
    for kind in (arm.placement.kind, *arm.placement.also):
        if kind in PLACEMENTS.needing(PROGRESS):
            _check_whole_prompts(f"{path}.placement.kind={kind}", path, arm)
    if arm.cache.states_per_path is not None and not arm.placement.places:
        setting = f"{path}.cache.states_per_path={arm.cache.states_per_path}"
        raise ValueError(f"{setting} with {path}.placement.kind=none: expected null, for there are no states")
    _check_recovery(path, arm, model)
    _check_format(path, arm, model)


def _check_format(path: str, arm: Strategy, model: ModelSpec) -> None:
    one_of(f"{path}.state_format", arm.state_format, STATE_FORMATS)
    if arm.state_format == "native":
        return
    setting = f"{path}.state_format={arm.state_format}"
    if not arm.placement.places:
        raise ValueError(f"{setting} with {path}.placement.kind=none: expected native, for there are no states")
    if arm.spans is not None:
        raise ValueError(f"{setting} with {path}.spans: expected native; {path}.spans.maps.dtype is the type of maps")
    if STATE_FORMATS.make(arm.state_format, {}, {}, model=model).num_bytes >= model.state_bytes:
        raise ValueError(
            f"{setting} with model.state_itemsize={model.state_itemsize}: expected native, which is no larger"
        )


def _check_recovery(path: str, arm: Strategy, model: ModelSpec) -> None:
    one_of(f"{path}.recovery", arm.recovery, RECOVERIES)
    chosen = f"recovery={arm.recovery}"
    RECOVERIES.check(path, arm.recovery, {}, arm.recovery_options, chosen, "recovery_options")
    if arm.recovery == "recompute":
        return
    if not model.is_hybrid:
        raise ValueError(
            f"{path}.{chosen} with model.name={model.name}: expected recompute, for it has no recurrent state"
        )
    if not arm.keep or arm.policy_name != "tree":
        setting = f"keep={str(arm.keep).lower()}, policy={arm.policy_name}"
        raise ValueError(f"{path}.{chosen} with {setting}: expected true and tree")
    _check_whole_prompts(f"{path}.{chosen}", path, arm)


def _check_whole_prompts(setting: str, path: str, arm: Strategy) -> None:
    """Raise ValueError for arms that do not compute prompts as one prefix."""
    if arm.sharing == "private":
        raise ValueError(f"{setting} with {path}.sharing=private: expected shared")
    if arm.spans is not None:
        raise ValueError(f"{setting} with {path}.spans: expected null, for states of whole prompts")


def check_priced(study: Study) -> None:
    """Raise ValueError for recoveries and formats without a backend or without a cost in the timing model."""
    for name in study.chosen():
        for key, usual in (("recovery", "recompute"), ("state_format", "native")):
            value = getattr(study.arms[name], key)
            setting = f"arms.{name}.{key}={value}"
            if value != usual and study.backend != "sim":
                raise ValueError(f"{setting} with backend={study.backend}: expected {usual}, or backend=sim")
            if value != usual and study.timing.kind != "roofline":
                raise ValueError(
                    f"{setting} with timing.kind={study.timing.kind}: expected roofline, which counts FLOPs"
                )
