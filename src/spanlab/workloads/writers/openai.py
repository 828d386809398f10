"""Requests for an OpenAI-compatible server, one JSON object a line in the form of a batch file, with their times."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from spanlab.core.request import Request
from spanlab.workloads.tokenizer import find_tokenizer
from spanlab.workloads.writers.bodies import Bodies, check_prompts
from spanlab.workloads.writers.formats import WRITERS, Line, Writer


@WRITERS.register("openai")
def openai(served_model: str | None = None, prompts: str = "tokens", tokenizer: str | None = None) -> Writer:
    """`body` is what a server gets; `timestamp` in seconds, `session_id` and `output_length` stand beside it."""
    check_prompts("writer", prompts, tokenizer)
    made = Bodies(served_model, prompts, None if tokenizer is None else find_tokenizer(tokenizer).tokenizer)

    def write(requests: Iterable[Request]) -> Iterator[Line]:
        for request in requests:
            yield {
                "custom_id": f"request-{request.id}",
                "method": "POST",
                "url": f"/v1/{made.call}",
                "body": made.body(request),
                "timestamp": request.arrived_at / 1e9,
                "session_id": request.group_id,
                "output_length": request.output_len,
            }

    return write
