"""Gold answers as the fixed outputs of all arms (teacher forcing)."""

from __future__ import annotations

from dataclasses import replace

from spanlab.core.request import Request, Tokens
from spanlab.engine.settings import GOLD
from spanlab.queries import ChatTokenizer
from spanlab.settings import Study
from spanlab.workloads import Workload
from spanlab.workloads.queries import tokenizer_of


def with_given_answers(study: Study, workload: Workload) -> Workload:
    """Return the workload with each request's first gold answer as its output, where `engine.teacher=gold`.

    Where scores are recorded, wrong options are added to the requests. A model with recurrent layers scores no options,
    because its state has advanced. Requests without a gold answer do not change. ValueError where no request has one.
    """
    if study.backend != "engine" or study.engine.teacher != GOLD:
        return workload
    if all(request.answer is None for request in workload.requests):
        setting = f"engine.teacher=gold with workload.kind={study.workload.kind}"
        raise ValueError(f"{setting}: expected a workload whose requests have gold answers")
    tokenizer = tokenizer_of(study.workload.tokenizer)
    unknown = ("",) * len(workload.requests)
    openings = workload.labels.get("opening", unknown)
    compared = study.engine.record == "scores" and not study.model.is_hybrid
    choices = workload.labels.get("choices", unknown) if compared else unknown
    rows = zip(workload.requests, openings, choices, strict=True)
    return replace(
        workload,
        requests=tuple(
            _with_gold_output(request, str(opening), str(choice), tokenizer) for request, opening, choice in rows
        ),
    )


def gold_tokens(answer: str, opening: str, tokenizer: ChatTokenizer) -> Tokens:
    """Token ids (int32) of a gold answer after a prompt, without the token that ends the turn.

    `answer`   gold answers, one per line; the first is used
    `opening`  start of the answer that the prompt already contains; a space follows it, and no space where it is empty
    """
    first = answer.split("\n", maxsplit=1)[0]
    return tokenizer.encode_with_offsets(f" {first}" if opening else first, literal=True).tokens


def _with_gold_output(request: Request, opening: str, choices: str, tokenizer: ChatTokenizer) -> Request:
    """Return the request with its gold output; `choices` has the question's options, one per line, or is empty."""
    if request.answer is None:
        return request
    tokens = gold_tokens(request.answer, opening, tokenizer)
    right = request.answer.split("\n")
    options = tuple(
        gold_tokens(option, opening, tokenizer) for option in choices.split("\n") if option and option not in right
    )
    return replace(request, output=tokens, output_len=len(tokens), options=options)
