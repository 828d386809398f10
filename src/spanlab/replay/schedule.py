"""Open-loop sending of requests at their arrival times, also of requests that wait for others or for a client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from spanlab.core.request import Request
from spanlab.replay.endpoint import Answer, Endpoint, FailedRequestError
from spanlab_sim.source import Source


@dataclass(frozen=True, slots=True)
class SentRequest:
    """A request that was sent; its `arrived_at` is the scheduled time, nanoseconds since the start of the run.

    `began_ns`  start of the run, by `time.perf_counter_ns`
    """

    request: Request
    began_ns: int


@dataclass(frozen=True)
class Calls:
    """The API call of a request, and the callbacks for its result.

    `call`  path after the address of the endpoint
    `body`  builds the body of a request
    """

    endpoint: Endpoint
    call: str
    body: Callable[[Request], bytes]
    on_answer: Callable[[SentRequest, Answer], None]
    on_failure: Callable[[SentRequest, str], None]


@dataclass
class Replay:
    """Replay of the requests of a source at their arrival times.

    Connections are not limited, so that requests queue in the server only. A request that waits for a client or for
    an earlier turn of its session arrives when the source releases it.
    """

    calls: Calls
    source: Source
    _ended: asyncio.Event = field(default_factory=asyncio.Event)
    _in_flight: int = 0
    _began_ns: int = 0
    _released_ns: int = 0  # time at which the end of a request last released a waiting one

    async def run(self) -> None:
        """Send all requests and wait until all have ended."""
        self._began_ns = time.perf_counter_ns()
        try:
            async with asyncio.TaskGroup() as tasks:
                while (request := await self._next()) is not None:
                    tasks.create_task(self._send(SentRequest(request, self._began_ns)))
                    self._in_flight += 1
                    await asyncio.sleep(0)  # so that the task starts
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _next(self) -> Request | None:
        """Wait until the next request is due and return it; None after the last one."""
        while (due := self.source.next_at) is not None or self._in_flight:
            if due is not None and due <= self._now():
                return self.source.take(max(due, self._released_ns))
            await self._wait(due)
        return None

    async def _wait(self, due: int | None) -> None:
        """Wait until `due`, or until a request ends, which may release an earlier request."""
        self._ended.clear()
        timeout = None if due is None else (due - self._now()) * 1e-9
        with suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), timeout)

    async def _send(self, sent: SentRequest) -> None:
        try:
            body = self.calls.body(sent.request)
            answer = await self.calls.endpoint.stream(self.calls.call, body, sent.request.output_len)
        except FailedRequestError as failure:
            self.calls.on_failure(sent, str(failure))
        else:
            self.calls.on_answer(sent, answer)
        finally:
            self._end(sent.request)

    def _end(self, request: Request) -> None:
        now, was_blocked = self._now(), self.source.next_at is None
        self.source.finished(request, now)
        self._in_flight -= 1
        if was_blocked:
            self._released_ns = now
        self._ended.set()

    def _now(self) -> int:
        return time.perf_counter_ns() - self._began_ns
