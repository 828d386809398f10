"""Gold answers as the outputs that every arm is given."""

from __future__ import annotations

from dataclasses import replace

from spanlab.core.request import Request, Tokens
from spanlab.engine.settings import GOLD
from spanlab.queries import ChatTokenizer
from spanlab.settings import Study
from spanlab.workloads import Workload
from spanlab.workloads.queries import tokenizer_of


def with_given_answers(study: Study, workload: Workload) -> Workload:
    """The workload with the first gold answer of each request as its output, where `engine.teacher=gold`.

    Requests without a gold answer stay as they are. ValueError where none has one.
    """
    if study.backend != "engine" or study.engine.teacher != GOLD:
        return workload
    if all(request.answer is None for request in workload.requests):
        told = f"engine.teacher=gold with workload.kind={study.workload.kind}"
        raise ValueError(f"{told}: expected a workload whose requests have gold answers")
    tokenizer = tokenizer_of(study.workload.tokenizer)
    openings = workload.labels.get("opening", ("",) * len(workload.requests))
    told = zip(workload.requests, openings, strict=True)
    return replace(workload, requests=tuple(_given(request, str(opening), tokenizer) for request, opening in told))


def gold_tokens(answer: str, opening: str, tokenizer: ChatTokenizer) -> Tokens:
    """Token ids, int32, of a gold answer behind a prompt, without the token that ends the turn.

    `answer`   gold answers, one a line; the first counts
    `opening`  what the prompt has already said of the answer: a space follows it, and none follows an opened turn
    """
    first = answer.split("\n", maxsplit=1)[0]
    return tokenizer.encode_with_places(f" {first}" if opening else first, literal=True).tokens


def _given(request: Request, opening: str, tokenizer: ChatTokenizer) -> Request:
    if request.answer is None:
        return request
    tokens = gold_tokens(request.answer, opening, tokenizer)
    return replace(request, output=tokens, output_len=len(tokens))
