"""Made-up facts in natural words: who keeps what in which city, and who lent it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from spanlab.checks import not_negative, positive
from spanlab.workloads.questions.task import TASKS, Document, Question, Task
from spanlab.workloads.questions.words import CITIES, NAMES, REMARKS, THINGS

HOPS = (1, 2)
_INSTRUCTION = "Answer the question from the passages alone, in a few words."


@dataclass
class Facts:
    """Collections of made-up facts.

    `collections`  documents that share nothing
    `passages`     passages of each
    `sentences`    facts of each passage
    `remarks`      sentences of each passage that say nothing of them
    `hops`         passages that a question needs: 1, 2
    `seed`         of the facts
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
        """Things that are kept somewhere, in each collection; with two hops, one more sentence says who lent it."""
        count = self.passages * self.sentences
        return count // 2 if 2 in self.hops else count


@dataclass(frozen=True, slots=True)
class _Loan:
    """`borrower` keeps `thing`, which `owner` lent, in `city`."""

    owner: str
    borrower: str
    thing: str
    city: str

    @property
    def kept(self) -> str:
        """The sentence that says where the thing is, without its city."""
        return f"{self.borrower} keeps the {self.thing} in"

    @property
    def lent(self) -> str:
        """The sentence that says who has the thing."""
        return f"{self.owner} lent the {self.thing} to {self.borrower}."


@TASKS.register("facts")
def facts(facts: Facts | None = None) -> Task:
    """Collections of facts without contradiction, in all of them together.

    Every thing of a collection is lent twice, so that a city follows from neither sentence of a loan alone.
    """
    options = facts or Facts()
    people = _People(np.random.default_rng([options.seed, 0]))
    draw = np.random.default_rng([options.seed, 1])
    documents = tuple(_collection(number, options, people, draw) for number in range(options.collections))
    return Task("facts", "modelled", f"collections of made-up facts, seed {options.seed}", _INSTRUCTION, documents)


class _People:
    """Names that never lend, and never borrow, the same thing twice."""

    def __init__(self, draw: np.random.Generator) -> None:
        self._draw = draw
        self._used: set[tuple[str, str, str]] = set()

    def take(self, role: str, thing: str, busy: set[str]) -> str:
        """A name that is not busy in this collection and new to the thing in this role; it is busy then."""
        free = [name for name in NAMES if name not in busy and (role, thing, name) not in self._used]
        if not free:
            raise ValueError(
                f"workload.questions.facts.collections: expected fewer, for no name is left for the {thing}"
            )
        name = str(self._draw.choice(free))
        self._used.add((role, thing, name))
        busy.add(name)
        return name


def _collection(number: int, options: Facts, people: _People, draw: np.random.Generator) -> Document:
    loans = _loans(options, people, draw)
    keeps, lends = _places(len(loans), options, draw)
    sentences: list[list[str]] = [[] for _ in range(options.passages)]
    for at, loan in enumerate(loans):
        sentences[keeps[at]].append(f"{loan.kept} {loan.city}.")
        if 2 in options.hops:
            sentences[lends[at]].append(loan.lent)
    passages = tuple(_passage(facts, options.remarks, draw) for facts in sentences)
    asked = [question for at, loan in enumerate(loans) for question in _asked(loan, (keeps[at], lends[at]), options)]
    return Document(f"collection {number}", passages, tuple(asked))


def _passage(facts: list[str], remarks: int, draw: np.random.Generator) -> str:
    """Facts and remarks in an order of their own."""
    told = [*facts, *(REMARKS[at] for at in draw.integers(len(REMARKS), size=remarks))]
    return " ".join(told[at] for at in draw.permutation(len(told)))


def _places(loans: int, options: Facts, draw: np.random.Generator) -> tuple[list[int], list[int]]:
    """The passages of each loan's two sentences, never the same one; all passages get equally many sentences."""
    count = options.passages
    # The second half of the sentences begins at passage 0 again, or, of an odd number a passage, half-way.
    shift = 0 if options.sentences % 2 or 2 not in options.hops else int(draw.integers(1, count))
    keeps = [at % count for at in range(loans)]
    return keeps, [(loans + (at + shift) % loans) % count for at in range(loans)]


def _loans(options: Facts, people: _People, draw: np.random.Generator) -> list[_Loan]:
    count = options.loans
    things: Sequence[str] = draw.permutation(THINGS)[: -(-count // 2)].tolist()
    cities: Sequence[str] = draw.permutation(CITIES)[:count].tolist()
    busy: set[str] = set()
    loans = []
    for at, city in enumerate(cities):
        thing = things[at // 2]
        owner = people.take("lends", thing, busy) if 2 in options.hops else ""
        loans.append(_Loan(owner, people.take("keeps", thing, busy), thing, city))
    return loans


def _asked(loan: _Loan, places: tuple[int, int], options: Facts) -> list[Question]:
    """The questions about a loan, one for each number of hops."""
    one = Question(
        f"In which city does {loan.borrower} keep the {loan.thing}?",
        (loan.city,),
        gold=places[:1],
        stem=loan.kept,
        label="facts, 1 hop",
    )
    two = Question(
        f"In which city is the {loan.thing} that {loan.owner} lent?",
        (loan.city,),
        gold=places,
        stem=f"The {loan.thing} that {loan.owner} lent is in",
        label="facts, 2 hops",
    )
    return [question for hops, question in zip(HOPS, (one, two), strict=True) if hops in options.hops]
