"""Checks of a study with the analysis `decay`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spanlab.settings.study import Study

DECAY = "decay"


def check_decay(study: Study) -> None:
    """Raise ValueError where requests are not labelled as novel, or no baseline runs."""
    if DECAY not in study.chosen_analyses():
        return
    if study.arrivals.kind != "novel_stream":
        raise ValueError(f"arrivals.kind={study.arrivals.kind} with analyses=decay: expected novel_stream")
    if study.baseline not in study.chosen():
        raise ValueError(f"baseline={study.baseline} with analyses=decay: expected one of the arms that run")
    if study.backend == "server":
        raise ValueError("backend=server with analyses=decay: expected sim or engine, for a server reports no causes")
