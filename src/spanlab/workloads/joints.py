"""What joins the parts of a prompt that holds several documents, or asks before it tells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from spanlab.core.request import Tokens


def _nothing() -> Tokens:
    return np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Joints:
    """What stands behind a document that is not the last part before its question, and where a question is cut.

    `separator`          int32 token ids behind each document.
    `question_overlap`   first tokens of a question that the separator has already.
    `answer_overlap`     first tokens of the answer's opening that the separator has already.
    `answer`             last tokens of a question: the answer's opening, which stays at the end of the prompt.
    """

    separator: Tokens = field(default_factory=_nothing)
    question_overlap: int = 0
    answer_overlap: int = 0
    answer: int = 0

    def counts(self) -> dict[str, int]:
        """The same in tokens, as a shape holds it."""
        overlaps = {"question_overlap": self.question_overlap, "answer_overlap": self.answer_overlap}
        return {"separator": len(self.separator), "answer": self.answer} | overlaps


#: Few workloads need the joints, and finding them may parse a tokenizer.
FindJoints = Callable[[], Joints]
