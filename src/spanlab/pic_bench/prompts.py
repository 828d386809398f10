"""What one trial asks: the same requests, in the same orders, for every arm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from spanlab.core.request import Request
from spanlab.pic_bench.texts import Texts
from spanlab.queries import ChatTokenizer, Group, Message, render

Order = Literal["same", "shuffled"]


def shuffles(seed: int, trial: int, documents: int, repeats: int) -> list[list[int]]:
    """The order of documents in each repeat of a trial: drawn from seed and trial alone."""
    rng = np.random.default_rng([seed, trial, 4])
    return [rng.permutation(documents).tolist() for _ in range(repeats)]


def ask(documents: Sequence[str], question: str, system: str) -> Group:
    """System prompt, documents that do not look at each other, question."""
    spans = Group("plus", tuple(Message("user", text) for text in documents))
    return Group("seq", (Message("system", system), spans, *([Message("user", question)] if question else [])))


@dataclass(frozen=True, eq=False)
class Trial:
    """Fresh documents of `words` words and what is asked about them.

    Request 0 has the documents as they were made, requests 1 … `repeats` either so again or shuffled; each has a
    question of its own, the same in both orders.
    """

    texts: Texts
    tokenizer: ChatTokenizer
    seed: int
    trial: int
    words: int
    count: int
    repeats: int
    question_words: int
    output_tokens: int

    def requests(self, order: Order) -> list[Request]:
        """The cold request and its repeats, ids from 0."""
        return self._same if order == "same" else self._shuffled

    @cached_property
    def alone(self) -> list[Request]:
        """One request of one output token for each document, without any other; ids follow those of `requests`."""
        return [
            render(ask([text], "", self.texts.system), self.tokenizer, self.repeats + 1 + number)
            for number, text in enumerate(self._documents)
        ]

    @cached_property
    def _documents(self) -> list[str]:
        return self.texts.documents(self.trial, self.count, self.words)

    @cached_property
    def _same(self) -> list[Request]:
        return self._asked([list(range(self.count))] * self.repeats)

    @cached_property
    def _shuffled(self) -> list[Request]:
        return self._asked(shuffles(self.seed, self.trial, self.count, self.repeats))

    def _asked(self, orders: list[list[int]]) -> list[Request]:
        return [self._ask(index, order) for index, order in enumerate([list(range(self.count)), *orders])]

    def _ask(self, index: int, order: list[int]) -> Request:
        question = self.texts.question(self.trial, index, self.question_words)
        query = ask([self._documents[number] for number in order], question, self.texts.system)
        return render(query, self.tokenizer, index, output_len=self.output_tokens)
