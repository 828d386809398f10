"""Readings of the machine between the runs of an engine study, stored as JSON lines."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import orjson

from spanlab.study.machine.noise import Reading

_STAT = Path("/proc/stat")
_STOLEN = 7  # the column of stolen time, of user, nice, system, idle, iowait, irq, softirq, steal
_COUNTED = 8  # later columns are included in user and nice


def cores() -> int:
    """Number of processors of the machine, as for the load average; this process may be pinned to fewer."""
    return os.cpu_count() or 1


def processor_time(stat: str) -> tuple[int, int]:
    """Parse /proc/stat: ticks of all processors, and stolen ticks."""
    ticks = [int(word) for word in stat.partition("\n")[0].split()[1 : 1 + _COUNTED]]
    return sum(ticks), ticks[_STOLEN] if len(ticks) > _STOLEN else 0


def record_reading(path: Path, step_ns: Callable[[], int]) -> None:
    """Append one reading to `path`; `step_ns` measures the fixed step."""
    total, stolen = processor_time(_STAT.read_text()) if _STAT.exists() else (0, 0)
    reading = Reading(step_ns(), os.getloadavg()[0], total, stolen)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(orjson.dumps(asdict(reading), option=orjson.OPT_APPEND_NEWLINE))


def read_readings(path: Path) -> list[Reading]:
    """Read the readings of a study in order, without a partial line of a killed process."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    return [Reading(**orjson.loads(line)) for line in lines]
