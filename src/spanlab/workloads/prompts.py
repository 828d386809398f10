"""How a prompt is laid out as spans: an instruction, a document, a question, each tokenised on its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spanlab.core.request import Tokens

# Part of every cache key and of every shape: raise it when any text or order in this file changes.
LAYOUT_VERSION = 1

Part = str | Tokens


@dataclass(frozen=True, slots=True)
class Question:
    """One question of a document; `answers` are the gold references, which no prompt ever holds."""

    text: str
    options: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()

    @property
    def answer(self) -> str | None:
        """The gold references, one a line, or None where they are unknown."""
        return "\n".join(self.answers) if self.answers else None


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """A text, or its token ids where the text is not ours to keep, and everything that is asked about it."""

    body: Part
    questions: tuple[Question, ...]


@dataclass(frozen=True, slots=True, eq=False)
class TurnMarks:
    """Token ids, each of shape (1,), that open and close a turn in a tokenizer that has such special tokens."""

    open: Tokens
    close: Tokens


@dataclass(frozen=True, slots=True)
class ReadingLayout:
    """Instruction (ordered), document (independent, reusable), question: for reading comprehension."""

    instruction: str
    heading: str
    independent: bool = True

    def opening(self, marks: TurnMarks | None) -> list[Part]:
        """Parts of the span that all requests share."""
        if marks is None:
            return [f"{self.instruction}\n\n{self.heading}\n"]
        return [marks.open, f"system\n{self.instruction}", marks.close, "\n", marks.open, f"user\n{self.heading}\n"]

    def separator(self, marks: TurnMarks | None) -> list[Part]:
        """Parts behind a document of several."""
        return ["\n\n"]

    def document(self, body: Part, marks: TurnMarks | None) -> list[Part]:
        """Parts of the document span: the text and nothing else, so that it means the same anywhere."""
        return [body]

    def question(self, question: Question, marks: TurnMarks | None) -> list[Part]:
        """Parts of the question span, up to the open answer."""
        asked = f"\n\nQuestion: {question.text}{lettered(question.options)}"
        if marks is None:
            return [f"{asked}\nAnswer:"]
        return [asked, marks.close, "\n", marks.open, "assistant\nAnswer:"]


@dataclass(frozen=True, slots=True)
class SystemLayout:
    """System prompt (ordered, reusable), user query: no instruction before them."""

    independent: bool = False

    def opening(self, marks: TurnMarks | None) -> list[Part]:
        """No parts: nothing stands before the system prompt."""
        return []

    def separator(self, marks: TurnMarks | None) -> list[Part]:
        """Parts behind a system prompt of several: the end of its turn."""
        return ["\n\n"] if marks is None else [marks.close, "\n"]

    def document(self, body: Part, marks: TurnMarks | None) -> list[Part]:
        """Parts of the system prompt span; its turn is closed by the query, so that a cut leaves it well formed."""
        return [body] if marks is None else [marks.open, "system\n", body]

    def question(self, question: Question, marks: TurnMarks | None) -> list[Part]:
        """Parts of the query span, up to the open answer."""
        if marks is None:
            return [f"\n\nUser: {question.text}\nAssistant:"]
        return [marks.close, "\n", marks.open, f"user\n{question.text}", marks.close, "\n", marks.open, "assistant\n"]


@dataclass(frozen=True, slots=True)
class PassagesLayout:
    """System prompt (ordered, reusable), passages (independent), question: for retrieval-augmented answers.

    `passage_words`  most words of a passage; white space parts words.
    """

    instruction: str
    heading: str
    passage_words: int

    def system(self, marks: TurnMarks | None) -> list[Part]:
        """Parts of the system prompt, whose turn is still open."""
        return [self.instruction] if marks is None else [marks.open, f"system\n{self.instruction}"]

    def turn(self, marks: TurnMarks | None) -> list[Part]:
        """Parts between the system prompt and the first passage."""
        if marks is None:
            return [f"\n\n{self.heading}\n\n"]
        return [marks.close, "\n", marks.open, f"user\n{self.heading}\n\n"]

    def passage(self, text: str) -> list[Part]:
        """Parts of a passage span; it brings its own blank line, so that passages in any order stay apart."""
        return [f"{text}\n\n"]

    def question(self, question: Question, marks: TurnMarks | None) -> list[Part]:
        """Parts of the question span, up to the open answer."""
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
# 200 words are about the 241 tokens that the passages of the RAGPulse trace have in the mean.
RAG = PassagesLayout(
    "You answer questions from the passages that a search found. Reply in a few words; say so if they do not tell.",
    "Passages:",
    200,
)


def lettered(options: Sequence[str]) -> str:
    """Options as lines, `A. …` first; empty without options."""
    return "".join(f"\n{option_line(index, option)}" for index, option in enumerate(options))


def option_line(index: int, option: str) -> str:
    """One option as it stands in the prompt, which is also the gold answer's form."""
    return f"{chr(ord('A') + index)}. {option}"
