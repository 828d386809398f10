"""Several documents in a prompt, in an order, with the question behind or before them."""

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

#: The own document and the others as drawn become the documents of a prompt.
ORDERS: dict[str, Callable[[int, Ints, np.random.Generator], Ints]] = {
    "shuffled": lambda own, others, draw: draw.permutation(np.append(others, own)),
    "fixed": lambda own, others, draw: np.sort(np.append(others, own)),
    "own_first": lambda own, others, draw: np.append(own, others),
    "own_last": lambda own, others, draw: np.append(others, own),
}
DEFAULT_ORDER = "shuffled"


@dataclass(frozen=True, slots=True)
class Arrangement:
    """The documents of a prompt and the place of its question.

    `documents`  documents of each prompt: the question's own, and others of the workload, drawn at random.
    `order`      shuffled anew for each prompt; fixed, as in the workload; own_first or own_last with the others as
                 drawn. None: shuffled where there are several.
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
        """Whether prompts stay as they are: one document, then its question."""
        return self.documents == 1 and self.question == "after"

    def key(self) -> str:
        """The setting that asks for another arrangement, for messages."""
        if self.documents > 1:
            return f"workload.documents_per_prompt={self.documents}"
        return f"workload.question_position={self.question}"

    def joining_tokens(self, joints: Joints) -> int:
        """Most tokens that the arrangement adds to the documents and the question of a prompt."""
        return 0 if self.is_plain else len(joints.separator) * (self.documents + (self.question == "before"))

    def line(self) -> str:
        """The arrangement in words."""
        documents = [f"{self.documents} documents a prompt, {self.order or DEFAULT_ORDER}"]
        question = ["question before the documents"]
        return ", ".join(documents * (self.documents > 1) + question * (self.question == "before"))


class _Prompt(NamedTuple):
    """A prompt of one document: spans before it, the document, the tokens of its question."""

    opening: tuple[Span, ...]
    document: Span
    question: Tokens


def arranged(workload: Workload, arrangement: Arrangement, joints: Joints) -> Workload:
    """The same requests with their documents and questions arranged; ValueError where prompts have no one document."""
    if arrangement.is_plain:
        return workload
    prompts = [_prompt(request, arrangement, workload.name) for request in workload.requests]
    documents, own = _distinct([prompt.document for prompt in prompts])
    if arrangement.documents > len(documents):
        raise ValueError(
            f"{arrangement.key()}: expected at most {len(documents)}, the documents of {workload.name} that are served"
        )
    written = [_written(document, arrangement, joints) for document in documents]
    chosen = _chosen(own, len(documents), arrangement)
    requests = [
        replace(request, spans=_spans(prompt, [written[at] for at in numbers], arrangement, joints))
        for request, prompt, numbers in zip(workload.requests, prompts, chosen, strict=True)
    ]
    return workload.changed(requests, arrangement.line())


def with_independent_documents(workload: Workload, independent: bool | None) -> Workload:
    """The same tokens, with documents that may, or may not, be reused wherever they stand; None: as they are.

    ValueError where prompts have no one document.
    """
    if independent is None:
        return workload
    key = f"workload.documents_independent={str(independent).lower()}"
    found = [(request, _document_at(request, key, workload.name)) for request in workload.requests]
    marked = {id(request.spans[at]): replace(request.spans[at], independent=independent) for request, at in found}
    requests = [
        replace(request, spans=tuple(marked.get(id(span), span) for span in request.spans)) for request, _ in found
    ]
    return workload.changed(requests, f"documents {'independent' if independent else 'ordered'}")


def _prompt(request: Request, arrangement: Arrangement, name: str) -> _Prompt:
    at = _document_at(request, arrangement.key(), name)
    question = np.concatenate([span.tokens for span in request.spans[at + 1 :]])
    return _Prompt(request.spans[:at], request.spans[at], question)


def _document_at(request: Request, key: str, name: str) -> int:
    """Which span is the document; ValueError, naming the key that asks, where there is not one with a question."""
    at = [number for number, span in enumerate(request.spans) if span.reusable]
    others = [span for span in request.spans if span.independent and not span.reusable]
    if len(at) != 1 or others or len(request.spans) == at[0] + 1:
        raise ValueError(
            f"{key} with {name}: expected prompts of one reusable document and a question, unlike request {request.id}"
        )
    return at[0]


def _distinct(documents: Sequence[Span]) -> tuple[list[Span], list[int]]:
    """The different documents in order of first appearance, and the number of each one given."""
    spans = {id(span): span for span in documents}
    texts = {key: span.tokens.tobytes() for key, span in spans.items()}
    numbers: dict[bytes, int] = {}
    of_span = {key: numbers.setdefault(text, len(numbers)) for key, text in texts.items()}
    distinct = {of_span[key]: span for key, span in reversed(spans.items())}
    return [distinct[number] for number in range(len(numbers))], [of_span[id(span)] for span in documents]


def _chosen(own: Sequence[int], available: int, arrangement: Arrangement) -> list[list[int]]:
    """Numbers of each prompt's documents in their order; another order leaves the draw of the documents as it is."""
    draw, shuffle = (np.random.default_rng([SEED, stream]) for stream in range(2))
    order = ORDERS[arrangement.order or DEFAULT_ORDER]
    found = []
    for document in own:
        others = draw.choice(available - 1, size=arrangement.documents - 1, replace=False)
        others += others >= document
        found.append(order(document, others, shuffle).tolist())
    return found


def _written(document: Span, arrangement: Arrangement, joints: Joints) -> Span:
    """The document with what separates it from the next part; of several, its order among them means nothing."""
    tokens = np.concatenate([document.tokens, joints.separator])
    return replace(document, tokens=tokens, independent=document.independent or arrangement.documents > 1)


def _spans(prompt: _Prompt, documents: list[Span], arrangement: Arrangement, joints: Joints) -> tuple[Span, ...]:
    question = prompt.question[joints.question_overlap :]
    if arrangement.question == "after":
        return (*prompt.opening, *documents, Span(question))
    cut = len(question) - joints.answer
    asked = Span(np.concatenate([question[:cut], joints.separator]))
    answer = question[cut + joints.answer_overlap :]
    return (*prompt.opening, asked, *documents, *([Span(answer)] if len(answer) else []))
