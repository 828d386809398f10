"""The timing model of a study that is compared: the profile that is named, that lies ready, or that is measured now."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from spanlab.bench.machine import progress
from spanlab.calibrate.profiles import keep, own, profile_of
from spanlab.calibrate.run import calibrate
from spanlab.settings import DesignSettings, Study
from spanlab.study.progress import say
from spanlab_sim.calibrated import Profile


def found_or_made(
    study: Study, model: Callable[[], Any], design: DesignSettings, root: Path, console: Console
) -> Profile:
    """The profile that the study names, or that a run left and that reaches its longest prompt; else a new one.

    What is measured is kept in `root`, in place of one that reached less far; not on a noisy machine.
    """
    if study.timing.profile is not None:
        return profile_of(study)
    found = own(study)
    if found is not None and found.longest >= design.longest:
        return found
    say(console, f"{_lacking(study, found, design)}: one is measured first, for the simulator")
    with progress(console) as bars:
        task = bars.add_task(f"calibrating {study.model.name}", total=design.shapes * design.repeats)
        made = calibrate(study, model(), design, lambda: bars.advance(task))
    say(console, keep(made, root))
    return made


def _lacking(study: Study, found: Profile | None, design: DesignSettings) -> str:
    none = f"no profile of {study.model.name} on this machine"
    return none if found is None else f"{none} reaches {design.longest:,} tokens, only {found.longest:,}"
