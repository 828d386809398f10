"""Layouts of prompts as spans: instruction, document and question, each tokenised separately."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spanlab.core.request import Tokens

# Part of every cache key and of every shape: raise it when any text or order in this file changes.
LAYOUT_VERSION = 1

Part = str | Tokens


@dataclass(frozen=True, slots=True)
class Question:
    """One question of a document; `answers` are the gold references, which are never part of a prompt."""

    text: str
    options: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()

    @property
    def answer(self) -> str | None:
        """The gold references, one per line, or None if they are unknown."""
        return "\n".join(self.answers) if self.answers else None


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """A text, or its token ids if we may not store the text, and its questions."""

    body: Part
    questions: tuple[Question, ...]


@dataclass(frozen=True, slots=True, eq=False)
class TurnMarks:
    """Token ids, each of shape (1,), of the special tokens that open and close a turn."""

    open: Tokens
    close: Tokens


@dataclass(frozen=True, slots=True)
class ReadingLayout:
    """Instruction (ordered), document (independent, reusable), question: for reading comprehension."""

    instruction: str
    heading: str
    independent: bool = True

    def opening(self, marks: TurnMarks | None) -> list[Part]:
        """Return the parts of the span that all requests share."""
        if marks is None:
            return [f"{self.instruction}\n\n{self.heading}\n"]
        return [marks.open, f"system\n{self.instruction}", marks.close, "\n", marks.open, f"user\n{self.heading}\n"]

    def separator(self, marks: TurnMarks | None) -> list[Part]:
        """Return the parts after a document if there are several."""
        return ["\n\n"]

    def document(self, body: Part, marks: TurnMarks | None) -> list[Part]:
        """Return the parts of the document span: only the text, so that the span does not depend on its position."""
        return [body]

    def question(self, question: Question, marks: TurnMarks | None) -> list[Part]:
        """Return the parts of the question span, up to the start of the answer."""
        question_text = f"\n\nQuestion: {question.text}{option_lines(question.options)}"
        if marks is None:
            return [f"{question_text}\nAnswer:"]
        return [question_text, marks.close, "\n", marks.open, "assistant\nAnswer:"]


@dataclass(frozen=True, slots=True)
class SystemLayout:
    """System prompt (ordered, reusable) and user query, without an instruction."""

    independent: bool = False

    def opening(self, marks: TurnMarks | None) -> list[Part]:
        """Return no parts, because the system prompt comes first."""
        return []

    def separator(self, marks: TurnMarks | None) -> list[Part]:
        """Return the parts after a system prompt if there are several: the end of its turn."""
        return ["\n\n"] if marks is None else [marks.close, "\n"]

    def document(self, body: Part, marks: TurnMarks | None) -> list[Part]:
        """Return the parts of the system prompt span; the query closes its turn, so a cut prompt stays well formed."""
        return [body] if marks is None else [marks.open, "system\n", body]

    def question(self, question: Question, marks: TurnMarks | None) -> list[Part]:
        """Return the parts of the query span, up to the start of the answer."""
        if marks is None:
            return [f"\n\nUser: {question.text}\nAssistant:"]
        return [marks.close, "\n", marks.open, f"user\n{question.text}", marks.close, "\n", marks.open, "assistant\n"]


@dataclass(frozen=True, slots=True)
class PassagesLayout:
    """System prompt (ordered, reusable), passages (independent), question: for retrieval-augmented answers.

    `passage_words`  most words of a passage; words are separated by white space.
    """

    instruction: str
    heading: str
    passage_words: int

    def system(self, marks: TurnMarks | None) -> list[Part]:
        """Return the parts of the system prompt, without the end of its turn."""
        return [self.instruction] if marks is None else [marks.open, f"system\n{self.instruction}"]

    def turn(self, marks: TurnMarks | None) -> list[Part]:
        """Return the parts between the system prompt and the first passage."""
        if marks is None:
            return [f"\n\n{self.heading}\n\n"]
        return [marks.close, "\n", marks.open, f"user\n{self.heading}\n\n"]

    def passage(self, text: str) -> list[Part]:
        """Return the parts of a passage span, with a final blank line that separates passages in any order."""
        return [f"{text}\n\n"]

    def question(self, question: Question, marks: TurnMarks | None) -> list[Part]:
        """Return the parts of the question span, up to the start of the answer."""
        if marks is None:
            return [f"Question: {question.text}\nAnswer:"]
        return [f"Question: {question.text}", marks.close, "\n", marks.open, "assistant\nAnswer:"]


Layout = ReadingLayout | SystemLayout

QUALITY = ReadingLayout(
    "You read an article and answer a multiple-choice question about it. Reply with the line of the right option.",
    "Article:",
)
NARRATIVEQA = ReadingLayout("You read a story and answer a question about it in a few words.", "Story:")
SYSTEM_PROMPTS = SystemLayout()
# 200 words are about 241 tokens, the mean length of passages in the RAGPulse trace.
RAG = PassagesLayout(
    "You answer questions from the passages that a search found. Reply in a few words; say so if they do not tell.",
    "Passages:",
    200,
)


def option_lines(options: Sequence[str]) -> str:
    """Return the options as lines that start with a letter, `A. …` first; empty without options."""
    return "".join(f"\n{option_line(index, option)}" for index, option in enumerate(options))


def option_line(index: int, option: str) -> str:
    """Return one option as in the prompt, which is also the form of the gold answer."""
    return f"{chr(ord('A') + index)}. {option}"
