"""Readings of the machine between the runs of an engine study, kept as JSON lines."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import orjson

from spanlab.study.machine.noise import Reading

_STAT = Path("/proc/stat")
_STOLEN = 7  # the column of stolen time, of user, nice, system, idle, iowait, irq, softirq, steal
_COUNTED = 8  # what follows is contained in user and nice


def cores() -> int:
    """Processors of the machine, whose runnable tasks a load average counts; this process may be pinned to fewer."""
    return os.cpu_count() or 1


def processor_time(stat: str) -> tuple[int, int]:
    """Ticks of all processors and the stolen ones among them, of the text of /proc/stat."""
    ticks = [int(word) for word in stat.partition("\n")[0].split()[1 : 1 + _COUNTED]]
    return sum(ticks), ticks[_STOLEN] if len(ticks) > _STOLEN else 0


def take(path: Path, step_ns: Callable[[], int]) -> None:
    """Append one reading to `path`."""
    total, stolen = processor_time(_STAT.read_text()) if _STAT.exists() else (0, 0)
    reading = Reading(step_ns(), os.getloadavg()[0], total, stolen)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(orjson.dumps(asdict(reading), option=orjson.OPT_APPEND_NEWLINE))


def readings(path: Path) -> list[Reading]:
    """The readings of a study, first to last; a line that a killed process left unfinished is dropped."""
    if not path.exists():
        return []
    whole = path.read_bytes().split(b"\n")[:-1]
    return [Reading(**orjson.loads(line)) for line in whole]
