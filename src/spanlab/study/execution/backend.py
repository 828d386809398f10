"""What every backend of a study does."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

from spanlab.core.request import Request
from spanlab.records import RunRow, ServedRun
from spanlab.settings import Study
from spanlab.study.execution.jobs import Job

#: A run in progress, which yields at its pauses: times when it serves no request, so that another may run.
Running = Generator[None, None, RunRow | ServedRun]


class Backend:
    """Runs jobs of one study; expensive objects, such as a model, may be reused from one job to the next.

    `interleaved`  times are measured: runs of the arms are interleaved, and the baseline runs twice in each round
    """

    interleaved = False

    def __init__(self, study: Study) -> None:
        self._study = study

    def run(self, job: Job, write: Callable[[Any], None]) -> Running:
        """Run a job and return its row; `write` gets the record of each request: Record, or ServedRecord."""
        raise NotImplementedError

    def served(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Return the requests with the token ids that runs use."""
        return requests

    def warm_up(self, requests: Sequence[Request]) -> None:
        """Serve a few requests with every arm before the first measurement, where times are measured."""

    def recover(self) -> None:
        """Release the memory of a run that ran out of memory."""
