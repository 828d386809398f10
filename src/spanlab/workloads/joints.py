"""Joints: tokens between the parts of a prompt with several documents, or with the question before the documents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from spanlab.core.request import Tokens


def _no_tokens() -> Tokens:
    return np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Joints:
    """Separator after each document, and the token counts at which a question is cut.

    `separator`          int32 token ids after each document.
    `question_overlap`   leading tokens of a question that the separator already contains.
    `answer_overlap`     leading tokens of the answer's opening that the separator already contains.
    `answer`             last tokens of a question: the answer's opening, which stays at the end of the prompt.
    """

    separator: Tokens = field(default_factory=_no_tokens)
    question_overlap: int = 0
    answer_overlap: int = 0
    answer: int = 0

    def counts(self) -> dict[str, int]:
        """Return the token counts that a shape stores."""
        overlaps = {"question_overlap": self.question_overlap, "answer_overlap": self.answer_overlap}
        return {"separator": len(self.separator), "answer": self.answer} | overlaps


#: A function, because few workloads need the joints and computing them may parse a tokenizer.
FindJoints = Callable[[], Joints]
