"""A run on a real OpenAI-compatible server with its own scheduler and cache; records hold client-side values."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from spanlab.core.request import Request
from spanlab.engine.remap_tokens import remap_tokens
from spanlab.records import ServedRecord, ServedRun
from spanlab.study.execution.backend import Backend
from spanlab.study.execution.jobs import Job
from spanlab.study.output.run_logs import RunLogs
from spanlab.study.output.serving_log import TokenGaps
from spanlab_sim.source import Source

if TYPE_CHECKING:
    from spanlab.replay.endpoint import Answer
    from spanlab.replay.schedule import SentRequest

_NS = 1e-9


class RemoteServer(Backend):
    """Sends requests to `base_url` at the times of their arrivals."""

    def run(self, job: Job, write: Callable[[ServedRecord], None]) -> Generator[None, None, ServedRun]:
        """Replay one run, without pauses; ValueError where no request was answered."""
        yield from ()
        from spanlab.study.execution.remote_calls import replay  # loads an HTTP client that other backends do not need

        with RunLogs(replace(job, serving=None), None) as logs:  # the gaps are those between response chunks

            def finished(record: ServedRecord) -> None:
                logs.finished(record)
                write(record)

            source = Source(self.served(job.requests), job.clients, job.warmup)
            answers = Answers(job, source.early, finished)
            asyncio.run(replay(self._study, source, answers))
        if not answers.served:
            number, first = next(iter(answers.failures.items()))
            raise ValueError(
                f"base_url={self._study.base_url}: expected answers, but all {len(job.requests):,} requests failed; "
                f"request {number}: {first}"
            )
        if job.serving is not None:
            answers.gaps.write(job.serving)
        return answers.row()

    def served(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Return the requests with token ids of the model's vocabulary."""
        return remap_tokens(requests, self._study.model.vocab_size)


@dataclass
class Answers:
    """Answers and failures of the requests of one run.

    `uncounted`  ids of the warm-up requests; it grows as they arrive
    """

    job: Job
    uncounted: Collection[int]
    write: Callable[[ServedRecord], None]
    served: int = 0
    other_lengths: int = 0
    failures: dict[str, str] = field(default_factory=dict)
    gaps: TokenGaps = field(default_factory=TokenGaps)
    _late_ns: list[int] = field(default_factory=list)
    _end_ns: int = 0

    def answered(self, sent: SentRequest, answer: Answer) -> None:
        """Write the record of a request."""
        times = [time_ns - sent.began_ns for time_ns in answer.chunks_ns]
        counted = sent.request.id not in self.uncounted
        self.served += 1
        self.other_lengths += answer.output_tokens != sent.request.output_len
        self._late_ns.append(answer.sent_ns - sent.began_ns - sent.request.arrived_at)
        self._end_ns = max(self._end_ns, times[-1])
        if counted:
            self.gaps.extend(np.diff(times))
        self.write(
            ServedRecord(
                seed=self.job.seed,
                rate_rps=self.job.rate_rps,
                request_id=sent.request.id,
                group_id=sent.request.group_id,
                counted=counted,
                arrived_s=sent.request.arrived_at * _NS,
                first_token_s=times[0] * _NS,
                finished_s=times[-1] * _NS,
                prompt_tokens=answer.prompt_tokens,
                output_tokens=answer.output_tokens,
                reused_tokens=answer.cached_tokens,
            )
        )

    def failed(self, sent: SentRequest, reason: str) -> None:
        """Record the failure of a request."""
        self.failures[str(sent.request.id)] = reason

    def row(self) -> ServedRun:
        """Return the row of the finished run."""
        return ServedRun(
            seed=self.job.seed,
            rate_rps=self.job.rate_rps,
            requests=self.served,
            makespan_s=self._end_ns * _NS,
            late_mean_s=float(np.mean(self._late_ns)) * _NS,
            late_max_s=max(self._late_ns) * _NS,
            failures=self.failures,
            other_lengths=self.other_lengths,
        )
