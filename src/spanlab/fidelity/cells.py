"""What is run on the engine: every arm at every load, several times over, in an order that spares nobody the drift."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np


class Cell(NamedTuple):
    """One run on the engine. `share` is the load, as a share of the rate at which the baseline is saturated."""

    arm: str
    share: float
    repeat: int

    @property
    def name(self) -> str:
        """What its files are called."""
        return f"{self.arm}-load{self.share:g}-repeat{self.repeat}"


def in_order(arms: Sequence[str], shares: Sequence[float], repeats: int, seed: int) -> list[list[Cell]]:
    """All cells by repeat: arms and loads shuffled within each, so that a slow minute hits anybody."""
    every = [(arm, share) for share in shares for arm in arms]
    shuffled = [np.random.default_rng([seed, repeat]).permutation(len(every)).tolist() for repeat in range(repeats)]
    return [[Cell(*every[at], repeat) for at in order] for repeat, order in enumerate(shuffled)]


@dataclass(frozen=True)
class Files:
    """Where a run's cells are kept; a cell's records are there once it is finished, and not before."""

    folder: Path

    @property
    def readings(self) -> Path:
        """The machine's state before every run."""
        return self.folder / "readings.jsonl"

    def records(self, cell: Cell) -> Path:
        """What the engine left of a cell."""
        return self.folder / "records" / "engine" / f"{cell.name}.jsonl"

    def steps(self, cell: Cell) -> Path:
        """The step log of a cell."""
        return self.folder / "steps" / f"{cell.name}.jsonl"

    def simulated(self, arm: str, share: float) -> Path:
        """What the simulator made of the same arrivals."""
        return self.folder / "records" / "simulated" / f"{arm}-load{share:g}.jsonl"
