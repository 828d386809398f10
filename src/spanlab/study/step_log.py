"""The step log of a run on the engine: a JSON line for each step, saying what it was and when."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import orjson

from spanlab.core.policy import Policy
from spanlab.core.scheduler import StepPlan
from spanlab_sim.backend import features
from spanlab_sim.timing import StepFeatures

if TYPE_CHECKING:
    from spanlab.engine.serve import StepRow  # whose room needs torch, which reading a log does not


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """One line of the log, read back: `key` as `StepPlan.key()` gives it, the other fields as in `StepRow`."""

    key: tuple[Any, ...]
    features: StepFeatures
    started_ns: int
    planned_ns: int
    ended_ns: int

    @property
    def took_ns(self) -> int:
        """Nanoseconds from the end of what was before it to its own."""
        return self.ended_ns - self.started_ns


class StepLog:
    """Writes the log of one run, given to `serve` as `on_plan=log.planned, on_step=log.ran`.

    A line holds the fields of `StepRow`, those of `StepFeatures`, and the plan's key.
    """

    def __init__(self, path: Path, policy: Policy) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb")
        self._told = policy.content.state_bytes, policy.rules
        self._planned: dict[str, Any] = {}

    def __enter__(self) -> StepLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def planned(self, step: StepPlan, now: int) -> None:
        """Note what a step will do, before the scheduler moves everybody forward."""
        self._planned = {**features(step, *self._told)._asdict(), "key": step.key()}

    def ran(self, step: StepPlan, row: StepRow) -> None:
        """Write the line of a step that is over."""
        self._file.write(orjson.dumps(asdict(row) | self._planned, option=orjson.OPT_APPEND_NEWLINE))


def read_steps(path: Path) -> list[LoggedStep]:
    """The steps of one run, in their order."""
    return [_logged(orjson.loads(line)) for line in path.read_bytes().splitlines()]


def _logged(line: dict[str, Any]) -> LoggedStep:
    what = StepFeatures(**{name: line[name] for name in StepFeatures._fields})
    times = (line[name] for name in ("started_ns", "planned_ns", "ended_ns"))
    return LoggedStep(_frozen(line["key"]), what, *times)


def _frozen(value: Any) -> Any:
    """Lists as tuples, all the way down: JSON knows no tuples."""
    return tuple([_frozen(one) for one in value]) if isinstance(value, list) else value
