"""Requests of questions and their passages, with labels, and what their prompts have in common."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spanlab.core.request import Request, Span
from spanlab.workloads.questions.found import Found
from spanlab.workloads.questions.prompt import PromptWriter
from spanlab.workloads.questions.task import Task
from spanlab.workloads.selection import Selection
from spanlab.workloads.workload import Label, Provenance, Workload

#: Tokens of an answer of one's own beside those of the longest gold answer.
ROOM = 8


def workload_of(task: Task, found: Sequence[Found], writer: PromptWriter, selection: Selection, how: str) -> Workload:
    """One request a question, in groups by document.

    Spans: head, passages, question with the opened answer. Labels: `task`; `opening`, the words that open the answer;
    `choices`, one a line; and where gold passages are known, `gold_position` (−1: not found) and `gold_tokens` of the
    passage that states the answer.

    `how`  how passages were found and ordered, in words.
    """
    requests = tuple(_request(number, one, writer, selection) for number, one in enumerate(found))
    _check_length(requests, found, selection)
    labels: dict[str, tuple[Label, ...]] = {
        "task": tuple(one.question.label or task.name for one in found),
        "opening": tuple(one.question.stem for one in found),
        "choices": tuple("\n".join(one.question.choices) for one in found),
    }
    positions = [one.position for one in found if one.position is not None]
    if positions:
        labels["gold_position"] = tuple(positions)
        stated = [one.stated for one in found if one.stated is not None]
        labels["gold_tokens"] = tuple(len(writer.passage(text).tokens) for text in stated)
    detail = [_asked(task, found, how), *_retrieved(found), *_prompts(requests), f"{writer.name} tokenizer"]
    return Workload(task.name, requests, Provenance(task.kind, ", ".join(detail)), labels)


def _request(number: int, found: Found, writer: PromptWriter, selection: Selection) -> Request:
    passages = [writer.passage(text) for text in found.passages]
    question = found.question
    return Request(
        number,
        found.document,
        (writer.head, *passages, writer.question(question)),
        selection.output_tokens or writer.answer_tokens(question) + ROOM,
        answer="\n".join(question.answers),
        gold=tuple(1 + at for at in found.gold or ()),
    )


def _check_length(requests: Sequence[Request], found: Sequence[Found], selection: Selection) -> None:
    """Refuse prompts beyond the limit, naming a passage that alone is beyond it."""
    limit = selection.max_prompt_tokens
    for request, one in zip(requests, found, strict=True):
        if limit is None or request.num_tokens <= limit:
            continue
        longest = max(request.spans[1:-1], key=lambda span: len(span.tokens))
        text = one.passages[request.spans.index(longest) - 1]
        what = f"the prompt of question {request.id} has {request.num_tokens:,} tokens: expected a smaller k or shorter"
        if len(longest.tokens) > limit:
            what = f"the passage {text[:40]!r} has {len(longest.tokens):,} tokens: expected shorter"
        raise ValueError(f"workload.max_prompt_tokens={limit}: {what} passages")


def _asked(task: Task, found: Sequence[Found], how: str) -> str:
    documents = len({one.document for one in found})
    left_out = f" ({task.left_out} left out, for their passages are not told apart)" if task.left_out else ""
    counts = sorted({len(one.passages) for one in found})
    passages = " to ".join(dict.fromkeys((str(counts[0]), str(counts[-1]))))
    return f"{len(found)} questions about {documents} {task.nouns}{left_out}, {passages} passages each {how}"


def _prompts(requests: Sequence[Request]) -> tuple[str, str]:
    """The numbers that reuse lives on."""
    lengths = [request.num_tokens for request in requests]
    length = f"prompts of {np.median(lengths):.0f} tokens (median), at most {max(lengths)}"
    return length, f"{overlap(requests):.0%} of the passages' tokens stood in an earlier prompt"


def _retrieved(found: Sequence[Found]) -> list[str]:
    """How many questions have all their gold passages, where they are known."""
    whole = [len(one.gold) == len(set(one.question.gold or ())) for one in found if one.gold is not None]
    return [f"all gold passages found for {sum(whole) / len(whole):.0%}"] if whole else []


def overlap(requests: Sequence[Request]) -> float:
    """Share of the passages' tokens that stand in an earlier request's prompt too."""
    seen: set[int] = set()
    again = tokens = 0
    for request in requests:
        for span in _passages(request):
            tokens += len(span.tokens)
            again += len(span.tokens) * (id(span) in seen)
        seen |= {id(span) for span in _passages(request)}
    return again / tokens


def _passages(request: Request) -> tuple[Span, ...]:
    return request.spans[1:-1]
