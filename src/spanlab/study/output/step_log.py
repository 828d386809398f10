"""Step log of a run on the engine: a JSON line for each step, with its contents and times."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from spanlab.core.backend import StepResult
from spanlab.core.protocol import Policy
from spanlab.core.scheduled import ScheduledStep
from spanlab.core.step_features import SpanReads, StepFeatures, features


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """One parsed line of the log: `key` of the scheduled step, times in nanoseconds since the start of the run.

    `started_ns`  end of the previous step, or the arrival that ended an idle time
    `phases`      seconds of its phases, by name
    """

    key: tuple[Any, ...]
    features: StepFeatures
    started_ns: int
    ended_ns: int
    phases: dict[str, float]

    @property
    def took_ns(self) -> int:
        """Nanoseconds from `started_ns` to the end of the step."""
        return self.ended_ns - self.started_ns


class StepLog:
    """Writes the log of one run; pass it to `serve` as `on_step=log.ran`.

    A line has the step's times, the seconds of its phases, the fields of `StepFeatures`, and the step's key.
    """

    def __init__(self, path: Path, policy: Policy, reads: SpanReads | None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb")
        self._read = policy.store.state_bytes, policy.rules, reads

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def ran(self, step: ScheduledStep, now: int, result: StepResult) -> None:
        """Write the line of a step; called before the scheduler advances its sequences."""
        line = {"started_ns": now, "ended_ns": now + result.duration_ns, **result.phases}
        line |= features(step, *self._read)._asdict() | {"key": step.key()}
        self._file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))


def read_steps(path: Path) -> list[LoggedStep]:
    """Read the steps of one run, in order."""
    return [_parse_line(orjson.loads(line)) for line in path.read_bytes().splitlines()]


def _parse_line(line: dict[str, Any]) -> LoggedStep:
    step_features = StepFeatures(**{name: line[name] for name in StepFeatures._fields})
    phases = {name: value for name, value in line.items() if name.endswith("_s")}
    return LoggedStep(_as_tuples(line["key"]), step_features, line["started_ns"], line["ended_ns"], phases)


def _as_tuples(value: Any) -> Any:
    """Convert nested lists to tuples, which JSON does not have."""
    return tuple([_as_tuples(element) for element in value]) if isinstance(value, list) else value
