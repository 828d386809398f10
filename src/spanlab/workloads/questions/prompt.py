"""Prompts of passages: one chat whose user's turn holds the passages and the question, each tokenised apart."""

from __future__ import annotations

from functools import cache

import numpy as np

from spanlab.core.request import Span, Tokens
from spanlab.queries import ChatTokenizer
from spanlab.queries.bos import check_bos, missing_bos
from spanlab.queries.layout import check_open_turn
from spanlab.workloads.prompts import lettered
from spanlab.workloads.questions.task import Question

_BLANK_LINE = "\n\n"
_HEADING = f"Passages:{_BLANK_LINE}"


class PromptWriter:
    """Spans of prompts by a tokenizer's chat template.

    `head`     what all prompts share: the instruction, and the user's turn up to its first passage.
    `passage`  the span of a text, the same wherever it stands; equal texts share one.
    """

    def __init__(self, tokenizer: ChatTokenizer, instruction: str, system: bool) -> None:
        """`system`: the instruction is a system message; else it opens the user's, for templates without that role."""
        roles = ["system", "user"] if system else ["user"]
        gaps = tokenizer.template.gaps(roles, open_turn=True)
        check_open_turn(tokenizer.template, roles, gaps)
        head = tokenizer.encode(f"{gaps[0]}{instruction}{gaps[1] if system else _BLANK_LINE}{_HEADING}")
        head = np.concatenate([missing_bos(int(head[0]), tokenizer), head])
        check_bos(np.concatenate([head, tokenizer.encode(gaps[-1])]), tokenizer)
        self.name, self._tokenizer, self._opening = tokenizer.name, tokenizer, gaps[-1]
        self.head = Span(head, reusable=True)
        self.passage = cache(self._passage)

    def _passage(self, text: str) -> Span:
        return Span(self._literal(f"{text}{_BLANK_LINE}"), independent=True)

    def question(self, question: Question) -> Span:
        """The question with its options, and the assistant's turn, opened with the stem."""
        asked = f"Question: {question.text}{lettered(question.choices)}"
        if any(special in asked + question.stem for special in self._tokenizer.special_texts):
            parts = (self._literal(asked), self._tokenizer.encode(self._opening), self._literal(question.stem))
            return Span(np.concatenate(parts))
        return Span(self._tokenizer.encode(f"{asked}{self._opening}{question.stem}"))

    def answer_tokens(self, question: Question) -> int:
        """Tokens of the longest gold answer as it continues the prompt, at least one."""
        space = " " if question.stem else ""
        return max(1, *(len(self._literal(space + answer)) for answer in question.answers))

    def _literal(self, text: str) -> Tokens:
        """Token ids of a text of others, in which special tokens are plain characters."""
        return self._tokenizer.encode_with_places(text, literal=True).tokens
