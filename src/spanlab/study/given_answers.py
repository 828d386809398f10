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

    Wrong options go along where scores are kept; a model with recurrent layers scores none, for its state has moved on.
    Requests without a gold answer stay as they are. ValueError where none has one.
    """
    if study.backend != "engine" or study.engine.teacher != GOLD:
        return workload
    if all(request.answer is None for request in workload.requests):
        told = f"engine.teacher=gold with workload.kind={study.workload.kind}"
        raise ValueError(f"{told}: expected a workload whose requests have gold answers")
    tokenizer = tokenizer_of(study.workload.tokenizer)
    unknown = ("",) * len(workload.requests)
    openings = workload.labels.get("opening", unknown)
    compared = study.engine.record == "scores" and not study.model.is_hybrid
    choices = workload.labels.get("choices", unknown) if compared else unknown
    rows = zip(workload.requests, openings, choices, strict=True)
    return replace(workload, requests=tuple(_given(one, str(said), str(of), tokenizer) for one, said, of in rows))


def gold_tokens(answer: str, opening: str, tokenizer: ChatTokenizer) -> Tokens:
    """Token ids, int32, of a gold answer behind a prompt, without the token that ends the turn.

    `answer`   gold answers, one a line; the first counts
    `opening`  what the prompt has already said of the answer: a space follows it, and none follows an opened turn
    """
    first = answer.split("\n", maxsplit=1)[0]
    return tokenizer.encode_with_places(f" {first}" if opening else first, literal=True).tokens


def _given(request: Request, opening: str, choices: str, tokenizer: ChatTokenizer) -> Request:
    """`choices`: the options of the question, one a line; empty where it has none."""
    if request.answer is None:
        return request
    tokens = gold_tokens(request.answer, opening, tokenizer)
    right = request.answer.split("\n")
    options = tuple(gold_tokens(one, opening, tokenizer) for one in choices.split("\n") if one and one not in right)
    return replace(request, output=tokens, output_len=len(tokens), options=options)
