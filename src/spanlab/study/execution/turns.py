"""The order of a study's runs: on the engine in turns, the baseline first and last in each turn (A/A)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from spanlab.core.batch_rules import BatchRules
from spanlab.engine.settings import compares
from spanlab.settings import Study
from spanlab.study.execution.cells import Task
from spanlab.study.output.arm_files import ArmFiles, Cell

AGAIN = "A/A"  # the name of the repeated baseline, where arms are listed
CALIBRATION = "calibration of "


@dataclass(frozen=True)
class Row:
    """Cells of one arm with files of their own, under a name.

    `again`       the baseline, repeated
    `calibrates`  shapes, not the study's own requests
    `rules`       limits of its steps; None: the study's
    """

    name: str
    arm: str
    files: ArmFiles
    cells: tuple[Cell, ...]
    again: bool = False
    calibrates: bool = False
    rules: BatchRules | None = None

    def lacking(self) -> bool:
        """Whether a cell is not finished."""
        return not {Cell.of(row) for row in self.files.finished()}.issuperset(self.cells)


def tasks(study: Study, rows: Sequence[Row]) -> list[Task]:
    """What is run in which order: simulated arms whole, runs of the engine in turns.

    Shapes of a calibration come before each repeat, and once more after the last: drift then affects both.
    """
    if study.backend != "engine":
        return [_task(rows, row, row.cells) for row in rows]
    shapes, arms = ([row for row in rows if row.calibrates == what] for what in (True, False))
    rounds = [in_turns(study, arms)] if any(row.again for row in arms) else by_repeat(study, arms)
    if compares(study.engine):  # all others read what the baseline has left
        rounds = [sorted(runs, key=lambda run: run[0].name != study.baseline) for runs in rounds]
    single: list[Task] = []
    for repeat, runs in enumerate([*rounds, []]):
        single += [_task(rows, row, (cell,)) for row, cell in (*_shuffled(study, shapes, repeat), *runs)]
    last = {task.row: number for number, task in enumerate(single)}
    return [replace(task, last=last[task.row] == number) for number, task in enumerate(single)]


def _task(rows: Sequence[Row], row: Row, cells: tuple[Cell, ...]) -> Task:
    return Task(rows.index(row), row.arm, row.files, cells, calibrates=row.calibrates, rules=row.rules)


def in_turns(study: Study, rows: Sequence[Row]) -> list[tuple[Row, Cell]]:
    """Every arm's first cell, then every arm's second, and so on.

    A machine that drifts does so for all arms alike. Within a turn the order is drawn anew; the baseline and its
    repeat stand at the ends and change places from turn to turn, so that drift favours neither.
    """
    (again,) = (row for row in rows if row.again)
    found: list[Row] = []
    for turn in range(max(len(row.cells) for row in rows)):
        others = [row for row in rows if row.arm != again.arm and turn < len(row.cells)]
        middle = [others[at] for at in np.random.default_rng([study.seeds[0], turn]).permutation(len(others)).tolist()]
        ends = [row for row in rows if row.arm == again.arm and turn < len(row.cells)]
        first, last = (ends[:1], ends[1:]) if turn % 2 == 0 else (ends[1:], ends[:1])
        found += [*first, *middle, *last]
    turns = {row.name: iter(row.cells) for row in rows}
    return [(row, next(turns[row.name])) for row in found]


def by_repeat(study: Study, rows: Sequence[Row]) -> list[list[tuple[Row, Cell]]]:
    """All arms and loads of each repeat in an order of its own, so that a slow minute hits any."""
    repeats = 1 + max(cell.repeat for row in rows for cell in row.cells)
    return [_shuffled(study, rows, repeat) for repeat in range(repeats)]


def _shuffled(study: Study, rows: Iterable[Row], repeat: int) -> list[tuple[Row, Cell]]:
    pairs = [(row, cell) for row in rows for cell in row.cells if cell.repeat == repeat]
    order = np.random.default_rng([study.seeds[0], repeat]).permutation(len(pairs)).tolist()
    return [pairs[at] for at in order]


def repeated(study: Study) -> str:
    """The arm that runs twice: the baseline, or the first one where the baseline does not run."""
    chosen = study.chosen()
    return study.baseline if study.baseline in chosen else chosen[0]
