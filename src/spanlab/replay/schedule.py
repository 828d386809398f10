"""Requests at their intended times, whatever the server does; or by so many clients, each after its last answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spanlab.core.request import Request
from spanlab.replay.endpoint import Answer, Endpoint, FailedRequestError


@dataclass(frozen=True, slots=True)
class Sent:
    """A request that was sent.

    `arrived_ns`  its intended time, nanoseconds since the run began
    `began_ns`    when the run began, by `time.perf_counter_ns`
    """

    request: Request
    arrived_ns: int
    began_ns: int


OnAnswer = Callable[[Sent, Answer], None]
OnFailure = Callable[[Sent, str], None]


@dataclass(frozen=True)
class Replay:
    """Sends requests in order of arrival and hands over what became of each.

    In an open loop every request is sent at its time: no limit of connections stands between schedule and server, so
    that a queue is the server's. With `clients`, a request arrives when one of so many clients is free.

    `call`  what is called behind the endpoint's address
    `body`  the body of a request
    """

    endpoint: Endpoint
    call: str
    body: Callable[[Request], bytes]
    clients: int | None
    on_answer: OnAnswer
    on_failure: OnFailure

    async def run(self, requests: Sequence[Request]) -> None:
        """Send every request and wait for its end."""
        began = time.perf_counter_ns()
        free = asyncio.Semaphore(self.clients or len(requests))
        try:
            async with asyncio.TaskGroup() as tasks:
                for request in requests:
                    body = self.body(request)  # before its time, so that making it delays nothing
                    await _until(began + request.arrived_at)
                    await free.acquire()
                    late = time.perf_counter_ns() - began
                    arrived = request.arrived_at if self.clients is None else max(late, request.arrived_at)
                    tasks.create_task(self._ask(Sent(request, arrived, began), body, free))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _ask(self, sent: Sent, body: bytes, free: asyncio.Semaphore) -> None:
        try:
            answer = await self.endpoint.ask(self.call, body)
        except FailedRequestError as failure:
            self.on_failure(sent, str(failure))
        else:
            self.on_answer(sent, answer)
        finally:
            free.release()


async def _until(due_ns: int) -> None:
    wait_ns = due_ns - time.perf_counter_ns()
    if wait_ns > 0:
        await asyncio.sleep(wait_ns * 1e-9)
