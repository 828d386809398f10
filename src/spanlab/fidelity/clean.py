"""How well the simulator predicts a study that has just run on the engine: from what the study left behind.

Only `make_profile` loads a model: it runs where the arms run, for a card that is opened cannot be forked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from spanlab.core.request import Request
from spanlab.fidelity.compare import Compared, compared, together
from spanlab.fidelity.errors import delays
from spanlab.fidelity.replay import Trace
from spanlab.fidelity.summary import joined, pooled, ranks
from spanlab.fidelity.table import cells_table
from spanlab.settings import DesignSettings, Study
from spanlab.study import summary as sums
from spanlab.study.backends import RealEngine
from spanlab.study.cells import ArmFiles, Cell, cells
from spanlab.study.device import give_memory_back
from spanlab_sim.calibrated import Profile


@dataclass(frozen=True)
class Comparison:
    """Every arm at every rate, engine beside simulator, all seeds together."""

    profile: Profile
    found: list[Compared]

    def summary(self) -> dict[str, Any]:
        """`fidelity` of a study's summary: each cell, and at each rate all arms together and how they rank."""
        rates = sorted({one.rate_rps for one in self.found}, key=lambda rate: rate or 0.0)
        told = asdict(self.profile)
        return {
            "profile": {key: told[key] for key in ("model", "machine", "device", "date", "commit", "left_out")},
            "cells": [one.row() for one in self.found],
            "rates": [self._at(rate) for rate in rates],
        }

    def _at(self, rate: float | None) -> dict[str, Any]:
        own = [one for one in self.found if one.rate_rps == rate]
        return {"rate_rps": rate, "errors": pooled(own)} | (ranks(own) if len(own) > 1 else {})

    def table(self) -> RenderableType:
        """For the terminal."""
        return cells_table([one.row() for one in self.found])

    def draw(self, footer: str, folder: Path) -> list[Path]:
        """The figure of every request, predicted against measured; returns the images written."""
        from spanlab.fidelity import figures  # matplotlib: half a second that only drawing needs

        profile = self.profile
        told = f"{footer} · simulator calibrated {profile.date} at {profile.steps} steps"
        drawn = figures.write_one(self.found, told, folder)
        return [path for path in drawn if path.suffix == ".png"]


def make_profile(study: Study, design: DesignSettings, root: Path, engine: RealEngine) -> Profile:
    """Where the engine runs: the profile that fits, or a new one, kept in `root` for the next study."""
    from spanlab.fidelity.profiles import found_or_made  # which loads torch

    profile = found_or_made(study, lambda: engine.model, design, root, Console(stderr=True))
    give_memory_back()
    return profile


def compare_run(
    study: Study, requests: tuple[Request, ...], files: Mapping[str, ArmFiles], profile: Profile, folder: Path
) -> Comparison:
    """Simulate what a study ran, under the same arrivals, and compare.

    `files`   of each arm that ran to its end, with records and step logs
    `folder`  for the simulator's records
    """
    found = []
    for arm, own in files.items():
        columns = sums.read_records(own.records)
        for rate in dict.fromkeys(cell.rate_rps for cell in cells(study, arm)):
            runs = [cell for cell in cells(study, arm) if cell.rate_rps == rate]
            found.append(_merged([_cell(study, arm, cell, requests, own, columns, profile, folder) for cell in runs]))
    return Comparison(profile, found)


def _cell(
    study: Study,
    arm: str,
    cell: Cell,
    requests: tuple[Request, ...],
    files: ArmFiles,
    columns: sums.Columns,
    profile: Profile,
    folder: Path,
) -> Compared:
    own = sums.select(columns, sums.at_rate(columns, cell.rate_rps) & (columns["seed"] == cell.seed))
    trace = Trace.of(study, requests, cell.seed, cell.rate_rps)
    path = folder / f"{arm}-seed{cell.seed}-rate{cell.rate_rps}.jsonl"
    return compared(study, arm, None, trace, profile, [delays(own)], [files.log(arm, cell)], path)


def _merged(seeds: Sequence[Compared]) -> Compared:
    """One arm at one rate: its seeds one after another, as if they were one run."""
    first = seeds[0]
    return Compared(
        arm=first.arm,
        family=first.family,
        share=None,
        rate_rps=first.rate_rps,
        measured=[joined([one.measured[0] for one in seeds])],
        predicted=joined([one.predicted for one in seeds]),
        parity=together([one.parity for one in seeds]),
        outside=sum(one.outside for one in seeds),
        simulated=sum(one.simulated for one in seeds),
    )
