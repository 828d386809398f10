"""The order of an engine study's runs: arms in turns, the baseline first and last in each turn (A/A)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from spanlab.settings import Study
from spanlab.study.arm_files import ArmFiles
from spanlab.study.cells import Task, cells

AGAIN = "A/A"  # the name of the repeated baseline, where arms are listed


def tasks(study: Study, files: Mapping[str, ArmFiles], again: ArmFiles | None) -> list[Task]:
    """What is run in which order: one arm after another, or in turns where there is a repeat."""
    if again is None:
        return [Task(row, arm, own) for row, (arm, own) in enumerate(files.items())]
    return in_turns(study, files, again)


def in_turns(study: Study, files: Mapping[str, ArmFiles], again: ArmFiles) -> list[Task]:
    """Tasks of one run each: every arm's first cell, then every arm's second, and so on.

    A machine that drifts does so for all arms alike. Within a turn the order is drawn anew; the baseline and its
    repeat stand at the ends and change places from turn to turn, so that drift favours neither; a teacher runs first.
    `again`  where the repeat's files go; its row follows those of the arms
    """
    arms, own = list(files), repeated(study)
    found = []
    for turn in range(max(len(cells(study, arm)) for arm in arms)):
        others = [arm for arm in arms if arm != own and turn < len(cells(study, arm))]
        shuffled = np.random.default_rng([study.seeds[0], turn]).permutation(len(others)).tolist()
        middle = [Task(arms.index(others[at]), others[at], files[others[at]], turn + 1) for at in shuffled]
        ends = [Task(arms.index(own), own, files[own], turn + 1), Task(len(arms), own, again, turn + 1)]
        first, last = ends if turn % 2 == 0 or study.engine.teacher else ends[::-1]
        found += [first, *middle, last] if turn < len(cells(study, own)) else middle
    return found


def repeated(study: Study) -> str:
    """The arm that runs twice: the baseline, or the first one where the baseline does not run."""
    chosen = study.chosen()
    return study.baseline if study.baseline in chosen else chosen[0]
