"""Tasks of questions with known answers, from local text and the hub."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from spanlab.kinds import check_fields, field
from spanlab.registry import Registry, not_negative, positive
from spanlab.workloads import reading, text
from spanlab.workloads.files import JsonRow, Label, read_csv, read_jsonl, shorten
from spanlab.workloads.text import RAG, option_line, split_passages
from spanlab.workloads.workload import ProvenanceKind

# ------------------------------------------------------------------------------
# Task: documents split into passages, and questions about them with known answers.
# ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a document.

    `answers`  gold references, equally correct; at least one.
    `choices`  the options of a multiple-choice question, which include the answer; empty for an
               open question.
    `gold`     numbers of the document's passages that the answer needs, the one that states it
               first; None if unknown.
    `stem`     start of the answer in the prompt; the gold answer continues it after a space.
    `ranking`  numbers of the passages that a file lists for this question, best first; None if it
               lists none.
    `label`    group of questions for reports; empty: all questions of the task.
    """

    text: str
    answers: tuple[str, ...]
    choices: tuple[str, ...] = ()
    gold: tuple[int, ...] | None = None
    stem: str = ""
    ranking: tuple[int, ...] | None = None
    label: str = ""


@dataclass(frozen=True, slots=True)
class Document:
    """A text in passages, and the questions about it."""

    name: str
    passages: tuple[str, ...]
    questions: tuple[Question, ...]


@dataclass(frozen=True, slots=True)
class Task:
    """Documents with questions.

    `name`          name in tables and figures.
    `nouns`         plural noun for its documents, such as FairytaleQA stories.
    `instruction`   instruction to the model.
    `left_out`      number of documents of the source that the task cannot use.
    """

    name: str
    kind: ProvenanceKind
    nouns: str
    instruction: str
    documents: tuple[Document, ...]
    left_out: int = 0


#: Functions that make a task; those with the parameter `path` read it from `workload.path`.
TASKS: Registry[Task] = Registry("workload.questions.task", given=("path",))

Item = TypeVar("Item")


def check_task(task: Task, source: str) -> Task:
    """Return the task; ValueError for an empty passage, or a document without passages, or a
    question without answers.

    `source`  setting that names the source of the task, the start of error messages
    """
    for document in task.documents:
        subject = f"{source} has the document {document.name!r}"
        if not document.passages:
            raise ValueError(f"{subject} without any passage; expected at least one")
        empty = _first(
            index for index, passage in enumerate(document.passages) if not passage.strip()
        )
        if empty is not None:
            raise ValueError(
                f"{subject} with an empty passage, number {empty}; expected text in each"
            )
        unknown = _first(
            question.text
            for question in document.questions
            if not any(map(str.strip, question.answers))
        )
        if unknown is not None:
            raise ValueError(
                f"{subject} with a question without a gold answer, {unknown[:60]!r}; expected one for each"
            )
    if not any(document.questions for document in task.documents):
        raise ValueError(f"{source} holds no question; expected at least one")
    return task


def one_line(text: str) -> str:
    """Return the text with all white space as single spaces, for lists with one text per line."""
    return " ".join(text.split())


def distinct(texts: Sequence[str]) -> tuple[str, ...]:
    """Return the distinct non-empty texts as single lines, in order of first appearance."""
    return tuple(dict.fromkeys(line for line in map(one_line, texts) if line))


def _first(items: Iterable[Item]) -> Item | None:
    return next(iter(items), None)


# ------------------------------------------------------------------------------
# Words of synthetic facts: given names, items to lend, cities.
# ------------------------------------------------------------------------------

_NAMES = """
Ada Agnes Alan Albert Alice Amelia Anna Arthur Aron Bella Ben Bruno Carla Carl Cecil Clara Colin Cora Daisy Daniel
David Diana Dora Edgar Edith Edwin Ella Elsa Emil Emma Eric Esther Eva Felix Flora Frank Frida George Gina Grace
Greta Hanna Harold Hector Helen Henry Hugo Ida Ines Irene Iris Ivan Jane Jasper Joan Jonas Julia Karl Kate Klara
Laura Lena Leo Lily Linda Louis Lucy Lukas Mara Marco Maria Martin Max Mira Nora Oliver Olga Oscar Paula Peter
Philip Rita Robert Rosa Ruth Simon Sofia Stella Theo Thomas Tina Tom Ursula Vera Victor Walter
"""
NAMES = tuple(_NAMES.split())
_ITEMS = """
anchor apron axe basket bell bicycle blanket boat bowl broom bucket camera candle canoe carpet chain chair chest
clock coat compass crown cup desk diary doll drum easel fan flag flute globe guitar hammer harp hat helmet kettle
kite knife ladder lamp lantern loom map mask mirror needle oar organ paddle piano pipe plough pot purse ring robe
rope saddle saw scarf shield shovel sled spade spoon stamp statue sword tent trumpet trunk umbrella vase violin
wagon wheel whistle
"""
ITEMS = tuple(_ITEMS.split())
_CITIES = """
Accra Amsterdam Athens Austin Baghdad Barcelona Beijing Berlin Bombay Boston Brussels Budapest Cairo Chicago Dallas
Delhi Denver Dublin Edinburgh Florence Geneva Glasgow Hamburg Havana Helsinki Houston Istanbul Jakarta Jerusalem
Lagos Leeds Lima Lisbon Liverpool London Madrid Manila Melbourne Miami Milan Montreal Moscow Munich Nairobi Naples
Oslo Oxford Paris Portland Prague Quebec Rome Santiago Seattle Shanghai Stockholm Sydney Tokyo Toronto Venice Vienna
Warsaw Washington Zurich
"""
CITIES = tuple(_CITIES.split())
#: Sentences without facts about the items.
REMARKS = (
    "The winter was long and the roads were icy.",
    "A letter takes three days when the weather is fine.",
    "The market opens early and closes at noon.",
    "Old friends meet again in spring.",
    "The bridge was painted green last year.",
    "It rained for a week, and then the sun came out.",
    "Bread is cheaper than it was in autumn.",
    "The children learned to swim in the lake.",
    "A new school was built behind the church.",
    "The train was late, so everybody had tea.",
    "Apples were stored in the cellar until March.",
    "The garden needs water twice a day.",
    "Nobody remembers who planted the big oak.",
    "The neighbours sang until late at night.",
    "A storm broke two windows of the library.",
    "The baker sleeps in the afternoon.",
    "Snow fell on the hills before the harvest was in.",
    "The river is too cold for swimming in May.",
    "Every guest brought a cake to the party.",
    "The cat sat by the fire and watched the door.",
    "A tall stranger asked for the way to the harbour.",
    "The museum is closed on Mondays.",
    "They counted the stars and fell asleep.",
    "The road along the coast is narrow and steep.",
)


# ------------------------------------------------------------------------------
# Synthetic facts in natural language: who keeps which thing in which city, and who lent it.
# ------------------------------------------------------------------------------

HOPS = (1, 2)
_FACTS_INSTRUCTION = "Answer the question from the passages alone, in a few words."


@dataclass
class Facts:
    """Collections of synthetic facts."""

    collections: int = field(25, positive, "documents without common facts")
    passages: int = field(6, positive, "passages of each collection")
    sentences: int = field(2, positive, "facts of each passage")
    remarks: int = field(3, not_negative, "sentences of each passage without facts")
    hops: list[int] = field(list(HOPS), None, "passages that a question needs: 1, 2")
    seed: int = field(0, not_negative, "seed of the facts")

    def __post_init__(self) -> None:
        check_fields(self, "workload.questions.facts")
        if not self.hops or not set(self.hops) <= set(HOPS) or len(set(self.hops)) < len(self.hops):
            raise ValueError(
                f"workload.questions.facts.hops={self.hops}: expected [1], [2] or [1,2]"
            )
        if 2 in self.hops and (self.passages < 2 or self.passages * self.sentences % 4):
            raise ValueError(
                f"workload.questions.facts.passages={self.passages} with sentences={self.sentences}: expected 2 "
                "passages or more and a multiple of 4 facts, for two hops"
            )
        people = self.loans * 2 if 2 in self.hops else self.loans
        if self.loans > len(CITIES) or people > len(NAMES):
            raise ValueError(
                f"workload.questions.facts.sentences={self.sentences} with passages={self.passages}: expected at most "
                f"{len(CITIES)} cities and {len(NAMES)} names in a collection, not {self.loans} and {people}"
            )

    @property
    def loans(self) -> int:
        """Number of loans of each collection; with two hops, a loan has a second sentence that
        names the lender."""
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

    Every item of a collection is lent twice, so that neither sentence of a loan determines the city
    alone.
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
    return Task("facts", "modelled", nouns, _FACTS_INSTRUCTION, tuple(documents))


class _NamesUsedError(ValueError):
    """No unused name is left for an item."""


class _People:
    """Source of names; a name never lends, and never borrows, the same item twice."""

    def __init__(self, draw: np.random.Generator) -> None:
        self._draw = draw
        self._used: set[tuple[str, str, str]] = set()

    def take(self, role: str, item: str, busy: set[str]) -> str:
        """Draw a name that is not in `busy` and not yet used for the item in this role, and add it
        to `busy`."""
        free = [name for name in NAMES if name not in busy and (role, item, name) not in self._used]
        if not free:
            raise _NamesUsedError(f"the {item}")
        name = str(self._draw.choice(free))
        self._used.add((role, item, name))
        busy.add(name)
        return name


def _collection(
    number: int, options: Facts, people: _People, draw: np.random.Generator
) -> Document:
    count, passage_count = options.loans, options.passages
    items: Sequence[str] = draw.permutation(ITEMS)[: -(-count // 2)].tolist()
    cities: Sequence[str] = draw.permutation(CITIES)[:count].tolist()
    busy: set[str] = set()
    loans = []
    for index, city in enumerate(cities):
        item = items[index // 2]
        owner = people.take("lends", item, busy) if 2 in options.hops else ""
        loans.append(_Loan(owner, people.take("keeps", item, busy), item, city))
    # Each loan's two sentences stand in different passages, which have equal numbers of sentences:
    # the second half of the sentences starts at passage 0 again, or half-way for an odd number per
    # passage.
    single = options.sentences % 2 or 2 not in options.hops
    shift = 0 if single else int(draw.integers(1, passage_count))
    location_passages = [index % passage_count for index in range(count)]
    loan_passages = [(count + (index + shift) % count) % passage_count for index in range(count)]
    sentences: list[list[str]] = [[] for _ in range(options.passages)]
    for index, loan in enumerate(loans):
        sentences[location_passages[index]].append(f"{loan.location_stem} {loan.city}.")
        if 2 in options.hops:
            sentences[loan_passages[index]].append(loan.loan_sentence)
    passages = []
    for facts in sentences:
        numbers = draw.integers(len(REMARKS), size=options.remarks)
        texts = [*facts, *(REMARKS[index] for index in numbers)]
        passages.append(" ".join(texts[index] for index in draw.permutation(len(texts))))
    questions = [
        question
        for index, loan in enumerate(loans)
        for question in _questions_about(
            loan, (location_passages[index], loan_passages[index]), options
        )
    ]
    return Document(f"collection {number}", tuple(passages), tuple(questions))


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
    return [
        question
        for hops, question in zip(HOPS, (one_hop, two_hops), strict=True)
        if hops in options.hops
    ]


# ------------------------------------------------------------------------------
# FairytaleQA: short stories in sections, each with questions about one section or a few (arXiv
# 2203.13947).
# ------------------------------------------------------------------------------

KEY = "workload.path"
FAIRYTALEQA_EXPECTED = (
    "FairytaleQA: a folder with section-stories/ and questions/ as published, or a jsonl with doc_id, story, "
    "n_sections and questions[{question, answers, section}]"
)
_FAIRYTALEQA_INSTRUCTION = (
    "Answer the question about the story from the passages alone, in a few words."
)
_STORY, _QUESTIONS = "-story.csv", "-questions.csv"


@TASKS.register("fairytaleqa")
def fairytaleqa(path: Path) -> Task:
    """Read stories with their sections as passages; stories with ambiguous section boundaries are
    left out."""
    stories = list(_published_stories(path) if path.is_dir() else _jsonl_stories(path))
    documents = tuple(story for story in stories if story is not None)
    if not documents:
        raise ValueError(
            f"{KEY}={path} has no story with recognisable sections; expected {FAIRYTALEQA_EXPECTED}"
        )
    nouns = f"FairytaleQA stories, {path.name}"
    return Task(
        "fairytaleqa",
        "local text",
        nouns,
        _FAIRYTALEQA_INSTRUCTION,
        documents,
        len(stories) - len(documents),
    )


def _jsonl_stories(path: Path) -> Iterator[Document | None]:
    """Yield the stories of a jsonl in order; None if blank lines inside sections make their
    boundaries ambiguous."""
    for row in read_jsonl(path, KEY, FAIRYTALEQA_EXPECTED):
        sections = [section.strip() for section in row.field("story", str).split("\n\n")]
        if len(sections) != row.field("n_sections", int):
            yield None
            continue
        numbers = {str(index + 1): index for index in range(len(sections))}
        questions = []
        for entry in row.rows("questions"):
            text, section = (str(entry.field(name, Label)) for name in ("question", "section"))
            answers = distinct(entry.list_of("answers", str))
            gold = _fairytaleqa_gold(section, numbers, entry.location)
            questions.append(Question(text.strip(), answers, gold=gold))
        yield Document(str(row.field("doc_id")), tuple(sections), tuple(questions))


def _published_stories(folder: Path) -> Iterator[Document]:
    """Yield the stories of the published repository, each with a table of sections and a table of
    questions."""
    # The repository lists each story by origin and by split: use each name once.
    stories = {
        file.name.removesuffix(_STORY): file
        for file in sorted(folder.rglob(f"section-stories/**/*{_STORY}"))
    }
    questions = {
        file.name.removesuffix(_QUESTIONS): file
        for file in folder.rglob(f"questions/**/*{_QUESTIONS}")
    }
    for name, table in stories.items():
        if name not in questions:
            raise ValueError(
                f"{KEY}={folder} has {table.name} without {name}{_QUESTIONS}; expected {FAIRYTALEQA_EXPECTED}"
            )
        question_table = questions[name]
        sections = _table(table, ("section", "text"))
        numbers = {row["section"]: index for index, row in enumerate(sections)}
        rows = _table(question_table, ("question", "cor_section", "answer1"))
        texts = tuple(row["text"].strip() for row in sections)
        row_questions = []
        for row in rows:
            answers = [row.get(f"answer{number}") or "" for number in range(1, 7)]
            gold = _fairytaleqa_gold(row["cor_section"], numbers, f"{KEY}={question_table}")
            row_questions.append(Question(row["question"].strip(), distinct(answers), gold=gold))
        yield Document(name, texts, tuple(row_questions))


def _fairytaleqa_gold(sections: str, numbers: dict[str, int], location: str) -> tuple[int, ...]:
    names = [name.strip() for name in sections.split(",")]
    unknown = [name for name in names if name not in numbers]
    if unknown:
        raise ValueError(
            f"{location} has a question about section {unknown[0]!r} of {len(numbers)}; expected a section"
        )
    return tuple(dict.fromkeys(numbers[name] for name in names))


def _table(path: Path, columns: tuple[str, ...]) -> list[dict[str, str]]:
    return read_csv(path, columns, KEY, FAIRYTALEQA_EXPECTED, "utf-8-sig")


# ------------------------------------------------------------------------------
# SQuALITY: stories split into passages, with questions and answers of a paragraph (arXiv
# 2205.11465).
# ------------------------------------------------------------------------------

SQUALITY_EXPECTED = (
    "a SQuALITY jsonl with document and questions[{question_text, responses[{response_text}]}]"
)
_SQUALITY_INSTRUCTION = "Answer the question about the story from the passages, in one paragraph."


@TASKS.register("squality")
def stories(path: Path, passage_words: int = RAG.passage_words) -> Task:
    """Read the stories of a SQuALITY jsonl as passages of complete sentences; gold passages are
    unknown."""
    rows = read_jsonl(path, KEY, SQUALITY_EXPECTED)
    documents = []
    for number, row in enumerate(rows):
        passages = split_passages(row.field("document", str), passage_words)
        row_questions = tuple(map(_squality_question, row.rows("questions")))
        documents.append(Document(f"story {number}", tuple(passages), row_questions))
    return Task(
        "squality",
        "local text",
        f"SQuALITY stories, {path.name}",
        _SQUALITY_INSTRUCTION,
        tuple(documents),
    )


def _squality_question(row: JsonRow) -> Question:
    answers = [response.field("response_text", str) for response in row.rows("responses")]
    return Question(row.field("question_text", str).strip(), distinct(answers))


# ------------------------------------------------------------------------------
# QuALITY: articles split into passages, with multiple-choice questions and their options (arXiv
# 2112.08608).
# ------------------------------------------------------------------------------

_QUALITY_INSTRUCTION = (
    "Answer the question about the article from the passages. Reply with the text of the right "
    "option alone."
)


@TASKS.register("quality")
def articles(path: Path, passage_words: int = text.RAG.passage_words) -> Task:
    """Read the articles of a QuALITY jsonl as passages of complete sentences; gold passages are
    unknown."""
    rows = read_jsonl(path, reading.KEY, reading.QUALITY_EXPECTED)
    documents = []
    for number, article in enumerate(reading.articles(rows)):
        assert isinstance(article.body, str), "only text can be split"
        passages = tuple(split_passages(article.body, passage_words))
        documents.append(
            Document(
                f"article {number}", passages, tuple(map(_quality_question, article.questions))
            )
        )
    return Task(
        "quality",
        "local text",
        f"QuALITY articles, {path.name}",
        _QUALITY_INSTRUCTION,
        tuple(documents),
    )


def _quality_question(question: text.Question) -> Question:
    right = (
        option
        for index, option in enumerate(question.options)
        if option_line(index, option) in question.answers
    )
    return Question(
        question.text, tuple(map(one_line, right)), tuple(map(one_line, question.options))
    )


# ------------------------------------------------------------------------------
# Questions of a user: one JSON object per line, with the passages from the user's retrieval.
# ------------------------------------------------------------------------------

LOCAL_EXPECTED = (
    "JSON lines with question, answer (a text or a list) and passages (a list, best first), and where known options, "
    "gold (numbers of the passages that hold the answer, from 0) and document (a name)"
)
_FIELDS = ("question", "answer", "passages", "options", "gold", "document")
_LOCAL_INSTRUCTION = "Answer the question from the passages alone, in a few words."


@TASKS.register("local")
def questions(path: Path) -> Task:
    """Read the questions of a file, grouped by `document`, or else by equal passages."""
    rows = read_jsonl(path, KEY, LOCAL_EXPECTED)
    has_gold = [("gold" in row) for row in rows]
    if any(has_gold) and not all(has_gold):
        raise ValueError(
            f"{KEY}={path} has gold in some rows only; expected it in every row or none"
        )
    grouped: dict[tuple[str, ...], list[JsonRow]] = {}
    for row in rows:
        unknown = next((name for name in row if name not in _FIELDS), None)
        if unknown is not None:
            raise row.error(f"the unknown field {unknown!r}")
        document = (
            _texts(row, "passages") if row.get("document") is None else (str(row["document"]),)
        )
        grouped.setdefault(document, []).append(row)
    documents = []
    for number, members in enumerate(grouped.values()):
        passage_lists = [_texts(row, "passages") for row in members]
        texts = dict.fromkeys(text for passages in passage_lists for text in passages)
        places = {text: index for index, text in enumerate(texts)}
        parsed = tuple(
            _local_question(row, tuple(places[text] for text in passages))
            for row, passages in zip(members, passage_lists, strict=True)
        )
        name = str(members[0].get("document", f"document {number}"))
        documents.append(Document(name, tuple(places), parsed))
    nouns = f"documents of {path.name}"
    return Task(path.stem, "local text", nouns, _LOCAL_INSTRUCTION, tuple(documents))


def _local_question(row: JsonRow, ranking: tuple[int, ...]) -> Question:
    answer = row.field("answer")
    answers = distinct([answer] if isinstance(answer, str) else _texts(row, "answer"))
    choices = tuple(map(one_line, _texts(row, "options"))) if row.get("options") is not None else ()
    if choices and not set(answers) <= set(choices):
        wrong = next((text for text in answers if text not in choices), "")
        raise row.error(f"the answer {wrong!r}", "one of its options")
    gold = None
    if "gold" in row:
        positions = row["gold"] if isinstance(row["gold"], list) else [row["gold"]]
        if not positions:
            raise row.error("gold=[]", "at least one number of a passage, from 0")
        for position in positions:
            if type(position) is not int or not 0 <= position < len(ranking):
                raise row.error(
                    f"gold={shorten(position)} with {len(ranking)} passages", "their numbers from 0"
                )
        gold = tuple(ranking[position] for position in positions)
    text = row.field("question", str).strip()
    return Question(text, answers, choices, gold, ranking=tuple(dict.fromkeys(ranking)))


def _texts(row: JsonRow, name: str) -> tuple[str, ...]:
    return tuple(text.strip() for text in row.list_of(name, str))
