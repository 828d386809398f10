"""Requests at their intended times, whatever the server does, and after the requests or clients they wait for."""

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
class Sent:
    """A request that was sent; its `arrived_at` is the intended time, nanoseconds since the run began.

    `began_ns`  when the run began, by `time.perf_counter_ns`
    """

    request: Request
    began_ns: int


@dataclass(frozen=True)
class Calls:
    """What is called and what becomes of it.

    `call`  what is called behind the endpoint's address
    `body`  the body of a request
    """

    endpoint: Endpoint
    call: str
    body: Callable[[Request], bytes]
    on_answer: Callable[[Sent, Answer], None]
    on_failure: Callable[[Sent, str], None]


@dataclass
class Replay:
    """Sends the requests of a source as they arrive.

    No limit of connections stands between schedule and server, so that a queue is the server's. Where a source holds
    a request back, for a client or for an earlier turn of its session, it arrives when it is let go.
    """

    calls: Calls
    source: Source
    _ended: asyncio.Event = field(default_factory=asyncio.Event)
    _in_flight: int = 0
    _began_ns: int = 0
    _freed_ns: int = 0  # when an end last let a request arrive that had been held back

    async def run(self) -> None:
        """Send all requests and wait for the end of each."""
        self._began_ns = time.perf_counter_ns()
        try:
            async with asyncio.TaskGroup() as tasks:
                while (request := await self._next()) is not None:
                    tasks.create_task(self._ask(Sent(request, self._began_ns)))
                    self._in_flight += 1
                    await asyncio.sleep(0)  # so that it is on its way
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _next(self) -> Request | None:
        """The next request, once it is due; None where none is left."""
        while (due := self.source.next_at) is not None or self._in_flight:
            if due is not None and due <= self._now():
                return self.source.take(max(due, self._freed_ns))
            await self._wait(due)
        return None

    async def _wait(self, due: int | None) -> None:
        """Wait until a time, or until a request ends, which may let another arrive earlier."""
        self._ended.clear()
        timeout = None if due is None else (due - self._now()) * 1e-9
        with suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), timeout)

    async def _ask(self, sent: Sent) -> None:
        try:
            answer = await self.calls.endpoint.ask(self.calls.call, self.calls.body(sent.request))
        except FailedRequestError as failure:
            self.calls.on_failure(sent, str(failure))
        else:
            self.calls.on_answer(sent, answer)
        finally:
            self._end(sent.request)

    def _end(self, request: Request) -> None:
        now, held_back = self._now(), self.source.next_at is None
        self.source.finished(request, now)
        self._in_flight -= 1
        if held_back:
            self._freed_ns = now
        self._ended.set()

    def _now(self) -> int:
        return time.perf_counter_ns() - self._began_ns
