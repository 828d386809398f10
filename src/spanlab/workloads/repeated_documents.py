"""Repeated documents: prompts with the same documents in the same order, which prefix caches reuse, or shuffled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from spanlab.checks import not_negative, one_of, positive
from spanlab.core.request import Request, Span
from spanlab.workloads.fresh_ids import FreshIds
from spanlab.workloads.selection import Selection, selected_output_tokens
from spanlab.workloads.source import workload
from spanlab.workloads.workload import Labelled, Workload, labelled_workload

ORDERS = ("same", "shuffled")


@dataclass
class RepeatedDocuments:
    """A cold request over fresh documents, then warm requests over the same documents.

    `documents`        documents of a prompt
    `document_tokens`  tokens of each document
    `system_tokens`    tokens of the system prompt
    `question_tokens`  tokens of the question, which is fresh in every request
    `repeats`          warm requests after each cold one
    `trials`           number of sets of fresh documents
    `orders`           orders of the documents in warm requests: same, shuffled; each has its own cold request
    `prepare`          every document is computed alone before the cold request
    `seed`             seed of the shuffled orders
    """

    documents: int = 4
    document_tokens: int = 500
    system_tokens: int = 9
    question_tokens: int = 64
    repeats: int = 5
    trials: int = 3
    orders: list[str] = field(default_factory=lambda: list(ORDERS))
    prepare: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for key in ("documents", "document_tokens", "system_tokens", "question_tokens", "repeats", "trials"):
            positive(f"workload.repeated_documents.{key}", getattr(self, key))
        not_negative("workload.repeated_documents.seed", self.seed)
        for order in self.orders:
            one_of("workload.repeated_documents.orders", order, ORDERS)


@workload("repeated_documents")
def modelled(repeated_documents: RepeatedDocuments, selection: Selection) -> Workload:
    """Return the requests with the selected output length."""
    length = "workload.repeated_documents.document_tokens to set the length"
    return requests_of(repeated_documents, selected_output_tokens("repeated_documents", selection, length))


def requests_of(options: RepeatedDocuments, output_tokens: int) -> Workload:
    """Return the requests by trial and order; each trial and order has its own cache salt, so cold requests are cold.

    Labels: `order` of warm requests, `kind` (prepare, cold or warm).
    """
    ids = FreshIds()
    requests = [request for trial in range(options.trials) for request in _trial(options, trial, ids, output_tokens)]
    prompt = options.system_tokens + options.documents * options.document_tokens + options.question_tokens
    detail = (
        f"{options.documents} documents of {options.document_tokens:,} tokens, prompts of {prompt:,}; "
        f"{options.trials} trials of 1 cold and {options.repeats} warm requests, orders: {', '.join(options.orders)}"
    )
    return labelled_workload("repeated documents", detail, requests)


def _trial(options: RepeatedDocuments, trial: int, ids: FreshIds, output_tokens: int) -> Iterator[Labelled]:
    """Yield the requests of one trial; all orders have the same documents and questions."""
    rng = np.random.default_rng([options.seed, trial])
    count = options.documents
    system = Span(ids.take(options.system_tokens))
    documents = [Span(ids.take(options.document_tokens), independent=True) for _ in range(count)]
    questions = [Span(ids.take(options.question_tokens)) for _ in range(options.repeats + 1)]
    shuffles = [rng.permutation(count).tolist() for _ in range(options.repeats)]
    original_order = list(range(count))
    for index, order in enumerate(options.orders):
        group = trial * len(options.orders) + index
        prompts = [(system, document) for document in documents] if options.prepare else []
        kinds = ["prepare"] * len(prompts) + ["cold"] + ["warm"] * options.repeats
        orders = [original_order, *(shuffles if order == "shuffled" else [original_order] * options.repeats)]
        for numbers, question in zip(orders, questions, strict=True):
            prompts.append((system, *(documents[number] for number in numbers), question))
        for kind, spans in zip(kinds, prompts, strict=True):
            length = 1 if kind == "prepare" else output_tokens
            request = Request(0, group, spans, output_len=length, cache_salt=f"{order} {trial}")
            yield Labelled(request, {"kind": kind, "order": order if kind == "warm" else ""})
