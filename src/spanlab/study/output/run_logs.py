"""Optional logs of a run, in addition to its records and its row."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from spanlab.core.backend import StepResult
from spanlab.core.protocol import StoredBytes
from spanlab.core.scheduled import ScheduledStep
from spanlab.records import Record, ServedRecord
from spanlab.study.execution.jobs import Job
from spanlab.study.output.serving_log import LastSpanTiming, ServingLog
from spanlab.study.output.trace_file import TraceFile
from spanlab_sim.timing import TimingModel

OnStep = Callable[[ScheduledStep, int, StepResult], None]


class RunLogs:
    """Logs of one run; they are complete if it ends without an error.

    `store`  store whose resident bytes a trace has; None where they are unknown
    """

    def __init__(self, job: Job, store: StoredBytes | None) -> None:
        self._job = job
        self._serving = None if job.serving is None else ServingLog()
        self._trace = None if job.trace is None else TraceFile(job.trace, job.title, store)
        self._followers: list[OnStep] = [log.ran for log in (self._serving, self._trace) if log is not None]

    def timing(self, timing: TimingModel) -> TimingModel:
        """Wrap the timing model of a run, so that the serving log reads the durations of its steps."""
        if self._serving is None:
            return timing
        self._serving.spans = LastSpanTiming(timing)
        return self._serving.spans

    def ran(self, step: ScheduledStep, now: int, result: StepResult) -> None:
        """Log a step; called before the scheduler advances its sequences."""
        for follow in self._followers:
            follow(step, now, result)

    def finished(self, record: Record | ServedRecord) -> None:
        """Log a record."""
        if self._serving is not None:
            self._serving.finished(record)
        if self._trace is not None:
            self._trace.finished(record)

    def __enter__(self) -> RunLogs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._serving is not None and self._job.serving is not None and error is None:
            self._serving.write(self._job.serving)
        if self._trace is not None:
            self._trace.close()
