"""The baseline once more with its prompts in other chunks: how far its own numerics move what is scored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from spanlab.settings import Study
from spanlab.settings.analyses import FLOOR, needed
from spanlab.study.execution.cells import cells
from spanlab.study.execution.turns import Row
from spanlab.study.machine.aa import floor_files

NAME = "floor"  # where arms are listed


def floor_row(study: Study, folder: Path) -> Row | None:
    """What is run for it; None where no analysis reads it."""
    if not needed(study, FLOOR):
        return None
    arm, most = study.baseline, study.methods.floor_tokens
    rules = replace(study.batch, max_num_batched_tokens=most, enable_chunked_prefill=True)
    return Row(NAME, arm, floor_files(folder, arm), tuple(cells(study, arm)), rules=rules)
