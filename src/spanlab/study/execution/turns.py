"""Order of a study's runs: interleaved on the engine, with the baseline first and last in each round (A/A)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from spanlab.core.batch_rules import BatchRules
from spanlab.engine.settings import reads_baseline
from spanlab.settings import Study
from spanlab.study.execution.cells import Task
from spanlab.study.output.arm_files import ArmFiles, Cell

REPEAT_ROW = "A/A"  # name of the repeated baseline in lists of arms
CALIBRATION_PREFIX = "calibration of "


@dataclass(frozen=True)
class Row:
    """Named cells of one arm with separate files.

    `is_repeat`   the repeated baseline
    `calibrates`  the cells are calibration shapes, not the study's requests
    `rules`       batch limits of its steps; None: those of the study
    """

    name: str
    arm: str
    files: ArmFiles
    cells: tuple[Cell, ...]
    is_repeat: bool = False
    calibrates: bool = False
    rules: BatchRules | None = None

    def is_unfinished(self) -> bool:
        """Whether any cell is unfinished."""
        return not {Cell.of(row) for row in self.files.finished()}.issuperset(self.cells)


def schedule_tasks(study: Study, rows: Sequence[Row]) -> list[tuple[Task, ...]]:
    """Return the tasks in order, those that alternate together: one per arm for simulations, runs on the engine.

    Calibration shapes run before each repeat and once after the last, so that drift affects both.
    """
    if study.backend != "engine":
        return [(_task(rows, row, row.cells),) for row in rows]
    calibrations, arms = ([row for row in rows if row.calibrates == calibrates] for calibrates in (True, False))
    rounds = [interleave(study, arms)] if any(row.is_repeat for row in arms) else by_repeat(study, arms)
    if reads_baseline(study.engine):  # other arms read files of the baseline
        rounds = [sorted(runs, key=lambda run: run[0].name != study.baseline) for runs in rounds]
    single: list[Task] = []
    for repeat, runs in enumerate([*rounds, []]):
        single += [_task(rows, row, (cell,)) for row, cell in (*_shuffled(study, calibrations, repeat), *runs)]
    last = {task.row: number for number, task in enumerate(single)}
    tasks = [replace(task, last=last[task.row] == number) for number, task in enumerate(single)]
    return _by_cell(tasks) if study.engine.alternate else [(task,) for task in tasks]


def _by_cell(tasks: Sequence[Task]) -> list[tuple[Task, ...]]:
    """Group the runs of all arms on the same arrivals."""
    groups: dict[tuple[bool, Cell], list[Task]] = {}
    for task in tasks:
        groups.setdefault((task.calibrates, task.cells[0]), []).append(task)
    return [tuple(group) for group in groups.values()]


def _task(rows: Sequence[Row], row: Row, cells: tuple[Cell, ...]) -> Task:
    return Task(rows.index(row), row.arm, row.files, cells, calibrates=row.calibrates, rules=row.rules)


def interleave(study: Study, rows: Sequence[Row]) -> list[tuple[Row, Cell]]:
    """Order cells in rounds: the first cell of every arm, then the second of every arm, and so on.

    Drift of the machine then affects all arms equally. The order within a round is random. The baseline and its repeat
    are first and last, and swap from round to round, so that drift favours neither.
    """
    (repeat,) = (row for row in rows if row.is_repeat)
    order: list[Row] = []
    for round_index in range(max(len(row.cells) for row in rows)):
        others = [row for row in rows if row.arm != repeat.arm and round_index < len(row.cells)]
        middle = [
            others[index]
            for index in np.random.default_rng([study.seeds[0], round_index]).permutation(len(others)).tolist()
        ]
        ends = [row for row in rows if row.arm == repeat.arm and round_index < len(row.cells)]
        first, last = (ends[:1], ends[1:]) if round_index % 2 == 0 else (ends[1:], ends[:1])
        order += [*first, *middle, *last]
    remaining = {row.name: iter(row.cells) for row in rows}
    return [(row, next(remaining[row.name])) for row in order]


def by_repeat(study: Study, rows: Sequence[Row]) -> list[list[tuple[Row, Cell]]]:
    """Shuffle all arms and loads within each repeat, so that a slow minute affects a random run."""
    repeats = 1 + max(cell.repeat for row in rows for cell in row.cells)
    return [_shuffled(study, rows, repeat) for repeat in range(repeats)]


def _shuffled(study: Study, rows: Iterable[Row], repeat: int) -> list[tuple[Row, Cell]]:
    pairs = [(row, cell) for row in rows for cell in row.cells if cell.repeat == repeat]
    order = np.random.default_rng([study.seeds[0], repeat]).permutation(len(pairs)).tolist()
    return [pairs[index] for index in order]


def repeated_arm(study: Study) -> str:
    """The arm that runs twice: the baseline, or the first chosen arm where the baseline does not run."""
    chosen = study.chosen()
    return study.baseline if study.baseline in chosen else chosen[0]
