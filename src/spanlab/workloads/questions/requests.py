"""Requests of questions and their passages, with labels, and the overlap of their prompts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spanlab.core.request import Request, Span
from spanlab.workloads.questions.passage_retrieval import RetrievedPassages
from spanlab.workloads.questions.prompt import PromptWriter
from spanlab.workloads.questions.task import Task
from spanlab.workloads.selection import Selection
from spanlab.workloads.workload import Label, Provenance, Workload

#: Tokens that a generated answer may have beyond the longest gold answer.
ROOM = 8


def make_workload(
    task: Task, retrieved: Sequence[RetrievedPassages], writer: PromptWriter, selection: Selection, how: str
) -> Workload:
    """Make one request per question, in groups by document.

    Spans: head, passages, question with the opened answer. Labels: `task`; `opening`, the words that open the answer;
    `choices`, one a line; and if gold passages are known, `gold_position` (−1: not retrieved) and `gold_tokens` of the
    passage that states the answer.

    `how`  description of retriever and order.
    """
    requests = tuple(_request(number, item, writer, selection) for number, item in enumerate(retrieved))
    _check_length(requests, retrieved, selection)
    labels: dict[str, tuple[Label, ...]] = {
        "task": tuple(item.question.label or task.name for item in retrieved),
        "opening": tuple(item.question.stem for item in retrieved),
        "choices": tuple("\n".join(item.question.choices) for item in retrieved),
    }
    positions = [item.position for item in retrieved if item.position is not None]
    if positions:
        labels["gold_position"] = tuple(positions)
        stated = [item.stated for item in retrieved if item.stated is not None]
        labels["gold_tokens"] = tuple(len(writer.passage(text).tokens) for text in stated)
    detail = [
        _question_detail(task, retrieved, how),
        *_retrieval_detail(retrieved),
        *_prompt_detail(requests),
        f"{writer.name} tokenizer",
    ]
    return Workload(task.name, requests, Provenance(task.kind, ", ".join(detail)), labels)


def _request(number: int, retrieved: RetrievedPassages, writer: PromptWriter, selection: Selection) -> Request:
    passages = [writer.passage(text) for text in retrieved.passages]
    question = retrieved.question
    return Request(
        number,
        retrieved.document,
        (writer.head, *passages, writer.question(question)),
        selection.output_tokens or writer.answer_tokens(question) + ROOM,
        answer="\n".join(question.answers),
        gold=tuple(1 + position for position in retrieved.gold or ()),
    )


def _check_length(requests: Sequence[Request], retrieved: Sequence[RetrievedPassages], selection: Selection) -> None:
    """Raise ValueError for prompts longer than the limit; name a passage that alone exceeds it."""
    limit = selection.max_prompt_tokens
    for request, item in zip(requests, retrieved, strict=True):
        if limit is None or request.num_tokens <= limit:
            continue
        longest = max(request.spans[1:-1], key=lambda span: len(span.tokens))
        text = item.passages[request.spans.index(longest) - 1]
        problem = (
            f"the prompt of question {request.id} has {request.num_tokens:,} tokens: expected a smaller k or shorter"
        )
        if len(longest.tokens) > limit:
            problem = f"the passage {text[:40]!r} has {len(longest.tokens):,} tokens: expected shorter"
        raise ValueError(f"workload.max_prompt_tokens={limit}: {problem} passages")


def _question_detail(task: Task, retrieved: Sequence[RetrievedPassages], how: str) -> str:
    documents = len({item.document for item in retrieved})
    left_out = f" ({task.left_out} left out, for their passages are not told apart)" if task.left_out else ""
    counts = sorted({len(item.passages) for item in retrieved})
    passages = " to ".join(dict.fromkeys((str(counts[0]), str(counts[-1]))))
    return f"{len(retrieved)} questions about {documents} {task.nouns}{left_out}, {passages} passages each {how}"


def _prompt_detail(requests: Sequence[Request]) -> tuple[str, str]:
    """Return prompt lengths and the overlap of passages, which determine reuse."""
    lengths = [request.num_tokens for request in requests]
    length = f"prompts of {np.median(lengths):.0f} tokens (median), at most {max(lengths)}"
    return length, f"{overlap(requests):.0%} of the passages' tokens stood in an earlier prompt"


def _retrieval_detail(retrieved: Sequence[RetrievedPassages]) -> list[str]:
    """Return the share of questions whose gold passages were all retrieved, if gold passages are known."""
    complete = [len(item.gold) == len(set(item.question.gold or ())) for item in retrieved if item.gold is not None]
    return [f"all gold passages found for {sum(complete) / len(complete):.0%}"] if complete else []


def overlap(requests: Sequence[Request]) -> float:
    """Return the share of passage tokens that also occur in the prompt of an earlier request."""
    earlier: set[int] = set()
    repeated = tokens = 0
    for request in requests:
        for span in _passages(request):
            tokens += len(span.tokens)
            repeated += len(span.tokens) * (id(span) in earlier)
        earlier |= {id(span) for span in _passages(request)}
    return repeated / tokens


def _passages(request: Request) -> tuple[Span, ...]:
    return request.spans[1:-1]
