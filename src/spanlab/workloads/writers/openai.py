"""Requests to an OpenAI-compatible server as lines of a batch file, with their times."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from spanlab.core.request import Request
from spanlab.workloads.tokenizer import find_tokenizer
from spanlab.workloads.writers.bodies import Bodies, check_prompts
from spanlab.workloads.writers.formats import WRITERS, Line, Writer


@WRITERS.register("openai")
def openai(served_model: str | None = None, prompts: str = "tokens", tokenizer: str | None = None) -> Writer:
    """Write the call as `body`, with `timestamp` in seconds, `session_id` and `output_length` as further fields."""
    check_prompts("writer", prompts, tokenizer)
    bodies = Bodies(served_model, prompts, None if tokenizer is None else find_tokenizer(tokenizer).tokenizer)

    def write(requests: Iterable[Request]) -> Iterator[Line]:
        for request in requests:
            yield {
                "custom_id": f"request-{request.id}",
                "method": "POST",
                "url": f"/v1/{bodies.call}",
                "body": bodies.body(request),
                "timestamp": request.arrived_at / 1e9,
                "session_id": request.group_id,
                "output_length": request.output_len,
            }

    return write
