"""The entry `schedule`: decisions of our scheduler on given requests, step by step, for comparisons
with a server's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from spanlab.registry import REQUIRED, entry, one_of

if TYPE_CHECKING:
    from spanlab.schedule import Case


@dataclass
class Schedule:
    """Run the scheduler on given requests, and write its decisions step by step.

    `cases`   JSON file of requests by case
    `out`     JSON file of decisions by case
    `preset`  the scheduler to use: vllm_0_32
    """

    cases: str = REQUIRED
    out: str = REQUIRED
    preset: str = "vllm_0_32"


def checked_cases(settings: Schedule) -> dict[str, Case]:
    """Return the cases; ValueError for an unknown preset, an unreadable file, or a request that
    exceeds the memory."""
    from spanlab.schedule import PRESETS, check_fits, read_cases  # pydantic takes time to load
    from spanlab.typed_json import shown

    one_of("preset", settings.preset, PRESETS)
    cases = read_cases(Path(settings.cases))
    for name, case in cases.items():
        try:
            check_fits(case, PRESETS[settings.preset](case))
        except ValueError as error:
            raise ValueError(f"cases={settings.cases}: {shown(name)}.{error}") from error
    return cases


@entry("schedule", Schedule, check=lambda settings, root: checked_cases(settings))
def run_schedule(settings: Schedule, run: str, root: Path) -> None:
    """Read the cases, schedule each, and write the decisions."""
    from spanlab.schedule import PRESETS, schedule

    decided = {
        name: schedule(case, PRESETS[settings.preset](case))
        for name, case in checked_cases(settings).items()
    }
    Path(settings.out).write_bytes(orjson.dumps(decided))
    print(
        f"{len(decided)} cases, {sum(case.num_steps for case in decided.values()):,} steps: {settings.out}"
    )
