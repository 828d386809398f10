"""Questions with known answers, over passages from a real retriever."""

from spanlab.workloads.questions import fairytaleqa, local, quality, squality
from spanlab.workloads.questions.facts import Facts
from spanlab.workloads.questions.kind import Questions

__all__ = ["Facts", "Questions", "fairytaleqa", "local", "quality", "squality"]
