"""Prompts of passages: a chat whose user turn has the passages and the question, each tokenised separately."""

from __future__ import annotations

from functools import cache

import numpy as np

from spanlab.core.request import Span, Tokens
from spanlab.queries import ChatTokenizer
from spanlab.queries.bos import check_bos, missing_bos
from spanlab.queries.layout import check_open_turn
from spanlab.workloads.prompts import option_lines
from spanlab.workloads.questions.task import Question

_BLANK_LINE = "\n\n"
_HEADING = f"Passages:{_BLANK_LINE}"


class PromptWriter:
    """Writer of prompt spans in a tokenizer's chat template.

    `head`     span that all prompts share: the instruction, and the user turn up to its first passage.
    `passage`  returns the span of a text, which does not depend on its position; equal texts share a span.
    """

    def __init__(self, tokenizer: ChatTokenizer, instruction: str, system: bool) -> None:
        """`system`: the instruction is a system message; else it opens the user message, if templates lack the role."""
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
        """Return the span of the question with its options, and of the assistant turn up to the stem."""
        question_text = f"Question: {question.text}{option_lines(question.choices)}"
        if any(special in question_text + question.stem for special in self._tokenizer.special_texts):
            parts = (self._literal(question_text), self._tokenizer.encode(self._opening), self._literal(question.stem))
            return Span(np.concatenate(parts))
        return Span(self._tokenizer.encode(f"{question_text}{self._opening}{question.stem}"))

    def answer_tokens(self, question: Question) -> int:
        """Return the tokens of the longest gold answer as a continuation of the prompt, at least one."""
        space = " " if question.stem else ""
        return max(1, *(len(self._literal(space + answer)) for answer in question.answers))

    def _literal(self, text: str) -> Tokens:
        """Tokenise untrusted text, in which special tokens are plain characters."""
        return self._tokenizer.encode_with_offsets(text, literal=True).tokens
