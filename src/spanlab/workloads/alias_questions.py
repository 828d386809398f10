"""Questions about alias chains, with documents in the cached order and in a shuffled order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from spanlab.checks import one_of
from spanlab.core.request import Request
from spanlab.queries import ChatTokenizer, Group, Message, describe
from spanlab.workloads.alias_chains import MOST_DISTRACTORS, SHORTEST_DOCUMENT, AliasChain, alias_chains
from spanlab.workloads.queries import tokenizer_of
from spanlab.workloads.repeated_documents import ORDERS
from spanlab.workloads.selection import Selection, selected_output_tokens
from spanlab.workloads.source import workload
from spanlab.workloads.workload import Labelled, Workload, labelled_workload

_SYSTEM = "Answer from the documents, with a number alone."
_EARLIER = "What are these documents about?"


@dataclass
class AliasQuestions:
    """Fictional two-hop questions that need two documents; no training data contains their facts.

    `questions`    number of questions
    `words`        words of each document
    `distractors`  documents of a prompt that do not contribute to the answer
    `orders`       orders of the documents: same as in the earlier request, shuffled
    `seed`         seed of texts and orders
    """

    questions: int = 16
    words: int = 50
    distractors: int = 2
    orders: list[str] = field(default_factory=lambda: list(ORDERS))
    seed: int = 0

    def __post_init__(self) -> None:
        for key, value, least, most in (
            ("questions", self.questions, 1, 1 << 12),
            ("words", self.words, SHORTEST_DOCUMENT, 1 << 24),
            ("distractors", self.distractors, 0, MOST_DISTRACTORS),
            ("seed", self.seed, 0, (1 << 63) - 1),
        ):
            if not least <= value <= most:
                expected = f"expected a whole number from {least} to {most}"
                raise ValueError(f"workload.alias_questions.{key}={value}: {expected}")
        for order in self.orders:
            one_of("workload.alias_questions.orders", order, ORDERS)


@workload("alias_questions")
def modelled(alias_questions: AliasQuestions, selection: Selection, tokenizer: str | Path | None = None) -> Workload:
    """Return the requests with the selected output length; `tokenizer` None is the built-in tokenizer."""
    length = selected_output_tokens("alias_questions", selection, "workload.alias_questions.words to set the length")
    return requests_of(alias_questions, tokenizer_of(tokenizer), length)


def requests_of(options: AliasQuestions, tokenizer: ChatTokenizer, output_tokens: int) -> Workload:
    """Two requests for each question and order: an earlier one that caches the documents, then the question.

    Each pair has its own cache salt. Labels: `kind` (earlier or question), `order`.
    """
    chains = alias_chains(options.questions, options.words, options.distractors, options.seed)
    requests = [
        request
        for number, chain in enumerate(chains)
        for order in options.orders
        for request in _pair(options, tokenizer, number, chain, order, output_tokens)
    ]
    detail = (
        f"{len(chains)} fictional questions, {2 + options.distractors} documents of {options.words} words each, "
        f"orders: {', '.join(options.orders)}, {tokenizer.name} tokenizer"
    )
    return labelled_workload("alias chains", detail, requests)


def _pair(
    options: AliasQuestions, tokenizer: ChatTokenizer, number: int, chain: AliasChain, order: str, output_tokens: int
) -> Iterator[Labelled]:
    texts = chain.documents
    moved = (
        [texts[position] for position in _shuffled(options.seed, number, len(texts))] if order == "shuffled" else texts
    )
    group = number * len(options.orders) + options.orders.index(order)
    prompts = (("earlier", texts, _EARLIER, 1), ("question", moved, chain.question, output_tokens))
    for kind, documents, question, length in prompts:
        spans = describe(_query(documents, question), tokenizer, measure_delta=False).request_spans
        answer = chain.answer if kind == "question" else None
        request = Request(0, group, spans, output_len=length, cache_salt=f"{order} {number}", answer=answer)
        yield Labelled(request, {"kind": kind, "order": order if kind == "question" else ""})


def _query(documents: Sequence[str], question: str) -> Group:
    """Return a query of system prompt, documents that do not attend to each other, and question."""
    spans = Group("plus", tuple(Message("user", text) for text in documents))
    return Group("seq", (Message("system", _SYSTEM), spans, Message("user", question)))


def _shuffled(seed: int, number: int, count: int) -> list[int]:
    """Return a permutation that moves at least one document if there are two or more."""
    rng = np.random.default_rng([seed, number, 5])
    order = list(range(count))
    while count > 1 and order == sorted(order):
        order = rng.permutation(count).tolist()
    return order
