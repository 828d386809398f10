"""Arrangement of several documents in a prompt, with the question after or before them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spanlab.checks import one_of
from spanlab.core.request import Request, Span, Tokens
from spanlab.workloads.joints import Joints
from spanlab.workloads.workload import Workload

Ints = NDArray[np.int64]

SEED = 20251122
POSITIONS = ("after", "before")

#: Order of a prompt's documents, given the question's document and the other documents as drawn.
ORDERS: dict[str, Callable[[int, Ints, np.random.Generator], Ints]] = {
    "shuffled": lambda document, distractors, rng: rng.permutation(np.append(distractors, document)),
    "fixed": lambda document, distractors, rng: np.sort(np.append(distractors, document)),
    "own_first": lambda document, distractors, rng: np.append(document, distractors),
    "own_last": lambda document, distractors, rng: np.append(distractors, document),
}
DEFAULT_ORDER = "shuffled"


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Number and order of a prompt's documents, and the position of its question.

    `documents`  documents of each prompt: the question's document and others of the workload, drawn at random.
    `order`      shuffled: a new order for each prompt; fixed: the order of the workload; own_first or own_last: the
                 question's document first or last, the others as drawn. None: shuffled if there are several.
    `question`   after the documents, or before them.
    """

    documents: int = 1
    order: str | None = None
    question: str = "after"

    def __post_init__(self) -> None:
        if self.documents < 1:
            raise ValueError(f"workload.documents_per_prompt={self.documents}: expected a whole number from 1 up")
        one_of("workload.question_position", self.question, POSITIONS)
        if self.order is not None:
            one_of("workload.documents_order", self.order, ORDERS)
            if self.documents == 1:
                raise ValueError(
                    f"workload.documents_order={self.order} with workload.documents_per_prompt=1: expected null"
                )

    @property
    def is_plain(self) -> bool:
        """Whether prompts are unchanged: one document, then its question."""
        return self.documents == 1 and self.question == "after"

    def key(self) -> str:
        """Return the setting that changes the arrangement, for error messages."""
        if self.documents > 1:
            return f"workload.documents_per_prompt={self.documents}"
        return f"workload.question_position={self.question}"

    def joining_tokens(self, joints: Joints) -> int:
        """Return the largest number of tokens that the arrangement adds to a prompt."""
        return 0 if self.is_plain else len(joints.separator) * (self.documents + (self.question == "before"))

    def line(self) -> str:
        """Return a description of the arrangement for the provenance."""
        documents = [f"{self.documents} documents a prompt, {self.order or DEFAULT_ORDER}"]
        question = ["question before the documents"]
        return ", ".join(documents * (self.documents > 1) + question * (self.question == "before"))


class _Prompt(NamedTuple):
    """Parts of a prompt with one document: spans before it, the document, and the tokens of its question."""

    opening: tuple[Span, ...]
    document: Span
    question: Tokens


def arranged(workload: Workload, arrangement: Arrangement, joints: Joints) -> Workload:
    """Return the workload with documents and questions arranged; ValueError unless each prompt has one document."""
    if arrangement.is_plain:
        return workload
    prompts = [_prompt(request, arrangement, workload.name) for request in workload.requests]
    documents, numbers_of_prompts = _distinct([prompt.document for prompt in prompts])
    if arrangement.documents > len(documents):
        raise ValueError(
            f"{arrangement.key()}: expected at most {len(documents)}, the documents of {workload.name} that are served"
        )
    separated = [_with_separator(document, arrangement, joints) for document in documents]
    choices = _draw_documents(numbers_of_prompts, len(documents), arrangement)
    requests = [
        replace(request, spans=_spans(prompt, [separated[index] for index in numbers], arrangement, joints))
        for request, prompt, numbers in zip(workload.requests, prompts, choices, strict=True)
    ]
    return workload.with_requests(requests, arrangement.line())


def with_independent_documents(workload: Workload, independent: bool | None) -> Workload:
    """Return the workload with documents marked as independent or ordered; None leaves it unchanged.

    An independent document can be reused at any position. ValueError unless each prompt has one document.
    """
    if independent is None:
        return workload
    key = f"workload.documents_independent={str(independent).lower()}"
    positions = [(request, _document_index(request, key, workload.name)) for request in workload.requests]
    marked = {
        id(request.spans[index]): replace(request.spans[index], independent=independent) for request, index in positions
    }
    requests = [
        replace(request, spans=tuple(marked.get(id(span), span) for span in request.spans)) for request, _ in positions
    ]
    return workload.with_requests(requests, f"documents {'independent' if independent else 'ordered'}")


def _prompt(request: Request, arrangement: Arrangement, name: str) -> _Prompt:
    index = _document_index(request, arrangement.key(), name)
    question = np.concatenate([span.tokens for span in request.spans[index + 1 :]])
    return _Prompt(request.spans[:index], request.spans[index], question)


def _document_index(request: Request, key: str, name: str) -> int:
    """Return the index of the document's span.

    ValueError, which names `key`, unless the prompt has one reusable document followed by a question.
    """
    positions = [index for index, span in enumerate(request.spans) if span.reusable]
    unexpected = [span for span in request.spans if span.independent and not span.reusable]
    if len(positions) != 1 or unexpected or len(request.spans) == positions[0] + 1:
        raise ValueError(
            f"{key} with {name}: expected prompts of one reusable document and a question, unlike request {request.id}"
        )
    return positions[0]


def _distinct(documents: Sequence[Span]) -> tuple[list[Span], list[int]]:
    """Return the distinct documents in order of first appearance, and the number of each input document."""
    spans = {id(span): span for span in documents}
    texts = {key: span.tokens.tobytes() for key, span in spans.items()}
    numbers: dict[bytes, int] = {}
    of_span = {key: numbers.setdefault(text, len(numbers)) for key, text in texts.items()}
    distinct = {of_span[key]: span for key, span in reversed(spans.items())}
    return [distinct[number] for number in range(len(numbers))], [of_span[id(span)] for span in documents]


def _draw_documents(question_documents: Sequence[int], available: int, arrangement: Arrangement) -> list[list[int]]:
    """Return the document numbers of each prompt in prompt order.

    The drawn documents do not depend on the order: orders use a separate random stream.
    """
    rng, order_rng = (np.random.default_rng([SEED, stream]) for stream in range(2))
    order = ORDERS[arrangement.order or DEFAULT_ORDER]
    drawn = []
    for document in question_documents:
        distractors = rng.choice(available - 1, size=arrangement.documents - 1, replace=False)
        distractors += distractors >= document
        drawn.append(order(document, distractors, order_rng).tolist())
    return drawn


def _with_separator(document: Span, arrangement: Arrangement, joints: Joints) -> Span:
    """Return the document with its separator; several documents in a prompt are independent of their order."""
    tokens = np.concatenate([document.tokens, joints.separator])
    return replace(document, tokens=tokens, independent=document.independent or arrangement.documents > 1)


def _spans(prompt: _Prompt, documents: list[Span], arrangement: Arrangement, joints: Joints) -> tuple[Span, ...]:
    question = prompt.question[joints.question_overlap :]
    if arrangement.question == "after":
        return (*prompt.opening, *documents, Span(question))
    cut = len(question) - joints.answer
    question_span = Span(np.concatenate([question[:cut], joints.separator]))
    answer = question[cut + joints.answer_overlap :]
    return (*prompt.opening, question_span, *documents, *([Span(answer)] if len(answer) else []))
