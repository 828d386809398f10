"""The floor: the baseline repeated with other prefill chunks, which measures the numerical noise of its scores."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from spanlab.settings import Study
from spanlab.settings.analyses import FLOOR, needed
from spanlab.study.execution.cells import cells
from spanlab.study.execution.turns import Row
from spanlab.study.machine.aa import floor_files

NAME = "floor"  # name of the row in lists of arms


def floor_row(study: Study, folder: Path) -> Row | None:
    """Row of the floor; None where no analysis reads it."""
    if not needed(study, FLOOR):
        return None
    arm, max_tokens = study.baseline, study.methods.floor_tokens
    rules = replace(study.batch, max_num_batched_tokens=max_tokens, enable_chunked_prefill=True)
    return Row(NAME, arm, floor_files(folder, arm), tuple(cells(study, arm)), rules=rules)
