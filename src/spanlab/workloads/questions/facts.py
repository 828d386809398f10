"""Synthetic facts in natural language: who keeps which thing in which city, and who lent it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from spanlab.checks import not_negative, positive
from spanlab.workloads.questions.task import TASKS, Document, Question, Task
from spanlab.workloads.questions.words import CITIES, ITEMS, NAMES, REMARKS

HOPS = (1, 2)
_INSTRUCTION = "Answer the question from the passages alone, in a few words."


@dataclass
class Facts:
    """Collections of synthetic facts.

    `collections`  documents without common facts
    `passages`     passages of each collection
    `sentences`    facts of each passage
    `remarks`      sentences of each passage without facts
    `hops`         passages that a question needs: 1, 2
    `seed`         seed of the facts
    """

    collections: int = 25
    passages: int = 6
    sentences: int = 2
    remarks: int = 3
    hops: list[int] = field(default_factory=lambda: list(HOPS))
    seed: int = 0

    def __post_init__(self) -> None:
        for key in ("collections", "passages", "sentences"):
            positive(f"workload.questions.facts.{key}", getattr(self, key))
        for key in ("remarks", "seed"):
            not_negative(f"workload.questions.facts.{key}", getattr(self, key))
        if not self.hops or not set(self.hops) <= set(HOPS) or len(set(self.hops)) < len(self.hops):
            raise ValueError(f"workload.questions.facts.hops={self.hops}: expected [1], [2] or [1,2]")
        if 2 in self.hops and (self.passages < 2 or self.passages * self.sentences % 4):
            raise ValueError(
                f"workload.questions.facts.passages={self.passages} with sentences={self.sentences}: expected 2 "
                "passages or more and a multiple of 4 facts, for two hops"
            )
        self._check_words()

    def _check_words(self) -> None:
        people = self.loans * 2 if 2 in self.hops else self.loans
        if self.loans > len(CITIES) or people > len(NAMES):
            raise ValueError(
                f"workload.questions.facts.sentences={self.sentences} with passages={self.passages}: expected at most "
                f"{len(CITIES)} cities and {len(NAMES)} names in a collection, not {self.loans} and {people}"
            )

    @property
    def loans(self) -> int:
        """Number of loans of each collection; with two hops, a loan has a second sentence that names the lender."""
        count = self.passages * self.sentences
        return count // 2 if 2 in self.hops else count


@dataclass(frozen=True, slots=True)
class _Loan:
    """Loan: `borrower` keeps `item`, which `owner` lent, in `city`."""

    owner: str
    borrower: str
    item: str
    city: str

    @property
    def location_stem(self) -> str:
        """The sentence with the location of the item, without its city."""
        return f"{self.borrower} keeps the {self.item} in"

    @property
    def loan_sentence(self) -> str:
        """The sentence that names lender and borrower of the item."""
        return f"{self.owner} lent the {self.item} to {self.borrower}."


@TASKS.register("facts")
def facts(facts: Facts | None = None) -> Task:
    """Make collections of facts; no facts contradict each other, also across collections.

    Every item of a collection is lent twice, so that neither sentence of a loan determines the city alone.
    """
    options = facts or Facts()
    people = _People(np.random.default_rng([options.seed, 0]))
    draw = np.random.default_rng([options.seed, 1])
    documents = []
    for number in range(options.collections):
        try:
            documents.append(_collection(number, options, people, draw))
        except _NamesUsedError as error:
            raise ValueError(
                f"workload.questions.facts.collections={options.collections}: expected at most {number} with "
                f"seed={options.seed}, because no name is left for {error}"
            ) from error
    nouns = f"collections of made-up facts, seed {options.seed}"
    return Task("facts", "modelled", nouns, _INSTRUCTION, tuple(documents))


class _NamesUsedError(ValueError):
    """No unused name is left for an item."""


class _People:
    """Source of names; a name never lends, and never borrows, the same item twice."""

    def __init__(self, draw: np.random.Generator) -> None:
        self._draw = draw
        self._used: set[tuple[str, str, str]] = set()

    def take(self, role: str, item: str, busy: set[str]) -> str:
        """Draw a name that is not in `busy` and not yet used for the item in this role, and add it to `busy`."""
        free = [name for name in NAMES if name not in busy and (role, item, name) not in self._used]
        if not free:
            raise _NamesUsedError(f"the {item}")
        name = str(self._draw.choice(free))
        self._used.add((role, item, name))
        busy.add(name)
        return name


def _collection(number: int, options: Facts, people: _People, draw: np.random.Generator) -> Document:
    loans = _loans(options, people, draw)
    location_passages, loan_passages = _assign_passages(len(loans), options, draw)
    sentences: list[list[str]] = [[] for _ in range(options.passages)]
    for index, loan in enumerate(loans):
        sentences[location_passages[index]].append(f"{loan.location_stem} {loan.city}.")
        if 2 in options.hops:
            sentences[loan_passages[index]].append(loan.loan_sentence)
    passages = tuple(_passage(facts, options.remarks, draw) for facts in sentences)
    questions = [
        question
        for index, loan in enumerate(loans)
        for question in _questions_about(loan, (location_passages[index], loan_passages[index]), options)
    ]
    return Document(f"collection {number}", passages, tuple(questions))


def _passage(facts: list[str], remarks: int, draw: np.random.Generator) -> str:
    """Join facts and drawn remarks in random order."""
    sentences = [*facts, *(REMARKS[index] for index in draw.integers(len(REMARKS), size=remarks))]
    return " ".join(sentences[index] for index in draw.permutation(len(sentences)))


def _assign_passages(loans: int, options: Facts, draw: np.random.Generator) -> tuple[list[int], list[int]]:
    """Return the passages of each loan's two sentences: different ones, with equal numbers of sentences per passage."""
    count = options.passages
    # The second half of the sentences starts at passage 0 again, or half-way for an odd number per passage.
    shift = 0 if options.sentences % 2 or 2 not in options.hops else int(draw.integers(1, count))
    location_passages = [index % count for index in range(loans)]
    return location_passages, [(loans + (index + shift) % loans) % count for index in range(loans)]


def _loans(options: Facts, people: _People, draw: np.random.Generator) -> list[_Loan]:
    count = options.loans
    items: Sequence[str] = draw.permutation(ITEMS)[: -(-count // 2)].tolist()
    cities: Sequence[str] = draw.permutation(CITIES)[:count].tolist()
    busy: set[str] = set()
    loans = []
    for index, city in enumerate(cities):
        item = items[index // 2]
        owner = people.take("lends", item, busy) if 2 in options.hops else ""
        loans.append(_Loan(owner, people.take("keeps", item, busy), item, city))
    return loans


def _questions_about(loan: _Loan, passages: tuple[int, int], options: Facts) -> list[Question]:
    """Return the questions about a loan, one for each number of hops."""
    one_hop = Question(
        f"In which city does {loan.borrower} keep the {loan.item}?",
        (loan.city,),
        gold=passages[:1],
        stem=loan.location_stem,
        label="facts, 1 hop",
    )
    two_hops = Question(
        f"In which city is the {loan.item} that {loan.owner} lent?",
        (loan.city,),
        gold=passages,
        stem=f"The {loan.item} that {loan.owner} lent is in",
        label="facts, 2 hops",
    )
    return [question for hops, question in zip(HOPS, (one_hop, two_hops), strict=True) if hops in options.hops]
