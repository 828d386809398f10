"""Questions over invented words: chains of aliases whose answers are known."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np

from spanlab.core.request import Request
from spanlab.kinds import check_fields, field
from spanlab.queries.query import Group, Message
from spanlab.queries.render import ChatTokenizer, describe
from spanlab.registry import positive, within
from spanlab.workloads.load import WORKLOADS, Drawn, OfText, WithOutput
from spanlab.workloads.queries import tokenizer_of
from spanlab.workloads.selection import Selection
from spanlab.workloads.synthetic import ORDERS
from spanlab.workloads.workload import Labelled, Workload, labelled_workload, workload

# ------------------------------------------------------------------------------
# Numbered words that do not exist in English; different numbers give different words.
# ------------------------------------------------------------------------------

_ONSETS = "bdfhlmnprtvw"
_VOWELS = "aeiou"
_CODAS = "lmnrst"
_LAST_VOWELS = "aiou"
_ENDINGS = "qz"
#: Letters of each position: ve-lon-diq. All words have the same length, so no word is a substring
#: of another.
_LETTERS = (_ONSETS, _VOWELS, _ONSETS, _VOWELS, _CODAS, _ONSETS, _LAST_VOWELS, _ENDINGS)

WORDS = math.prod(map(len, _LETTERS))


def invented_word(number: int) -> str:
    """Return the word of eight letters for `number`, 0 ≤ number < WORDS: one letter per mixed-radix
    digit.

    Different numbers give different words; the lowest digit is the first letter.
    """
    assert 0 <= number < WORDS, "there is no word with this number"
    word = []
    for choices in _LETTERS:
        number, digit = divmod(number, len(choices))
        word.append(choices[digit])
    return "".join(word)


class WordGenerator:
    """Generator of distinct invented words; the same random state gives the same words."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._used: set[int] = set()

    def fresh(self) -> str:
        """Return a word that this generator has not returned before."""
        if len(self._used) > WORDS // 2:
            raise ValueError(
                f"names={len(self._used)}: expected at most {WORDS // 2} different names"
            )
        while (number := int(self._rng.integers(WORDS))) in self._used:
            pass
        self._used.add(number)
        return invented_word(number)


# ------------------------------------------------------------------------------
# Two-hop questions about fictional things: one document defines an alias, another gives the
# alias a number.
# ------------------------------------------------------------------------------

#: Verb forms: in a document, and in a question.
_RELATIONS = (("weighs", "weigh"), ("costs", "cost"), ("holds", "hold"), ("needs", "need"))

# Filler mentions no names, aliases or numbers. Lengths are 3, 4, 5, 6 words, so that they sum to
# any total from 3 up.
_FILLERS = (
    "Some {} sleep.",
    "Few {} like rain.",
    "Old {} grow near water.",
    "Many {} follow the quiet {}.",
)
_SHORTEST = 3
_FILLER_WORDS = 64
_LONGEST_FACT = 7

SHORTEST_DOCUMENT = _LONGEST_FACT + _SHORTEST
#: Every number in a prompt has two digits and occurs once, so no number is a substring of another.
NUMBERS = range(10, 100)
MOST_DISTRACTORS = 2 * (len(NUMBERS) - 1)


@dataclass(frozen=True, slots=True)
class AliasChain:
    """One question with its documents and its only answer.

    `definition`, `usage`  indexes of the document that defines the alias and of the one that gives
                           its number.
    `vocabulary`           every invented word of documents and question, sorted.
    """

    documents: tuple[str, ...]
    question: str
    answer: str
    definition: int
    usage: int
    vocabulary: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Facts:
    sentences: tuple[str, ...]  # the definition, the usage, then the distractors
    question: str
    answer: str
    names: tuple[str, ...]


def alias_chains(
    count: int, document_words: int, distractors: int = 2, seed: int = 0
) -> list[AliasChain]:
    """Make `count` questions, each with 2 + distractors documents of exactly `document_words`
    words, in shuffled order.

    A distractor is half of another chain with the same verb and unit, so that only the alias leads
    to the answer. No name occurs in two questions. For one seed, the first questions do not depend
    on `count`. Answers are numbers. `AliasQuestions` checks the ranges of the arguments.
    """
    rng = np.random.default_rng(seed)
    mint = WordGenerator(rng)
    filler = tuple(mint.fresh() for _ in range(_FILLER_WORDS))
    chains = []
    for _ in range(count):
        facts = _facts(distractors, mint, rng)
        order = rng.permutation(len(facts.sentences)).tolist()
        documents = tuple(
            _document(facts.sentences[number], document_words, filler, rng) for number in order
        )
        prompt = " ".join((*documents, facts.question))
        vocabulary = tuple(sorted(word for word in {*facts.names, *filler} if word in prompt))
        chains.append(
            AliasChain(
                documents, facts.question, facts.answer, order.index(0), order.index(1), vocabulary
            )
        )
    return chains


def _facts(distractors: int, mint: WordGenerator, rng: np.random.Generator) -> _Facts:
    verb, infinitive = _RELATIONS[int(rng.integers(len(_RELATIONS)))]
    unit = mint.fresh()
    names_and_aliases = [(mint.fresh(), mint.fresh()) for _ in range(1 + (distractors + 1) // 2)]
    numbers = rng.choice(NUMBERS, size=len(names_and_aliases), replace=False).tolist()
    sentence_pairs = [
        (f"The {name} is also called the {alias}.", f"The {alias} {verb} {number} {unit}.")
        for (name, alias), number in zip(names_and_aliases, numbers, strict=True)
    ]
    # A single sentence of a pair distracts more if it holds a number, so each pair's usage comes
    # first.
    extra_sentences = [
        sentence for definition, usage in sentence_pairs[1:] for sentence in (usage, definition)
    ][:distractors]
    return _Facts(
        sentences=(*sentence_pairs[0], *extra_sentences),
        question=f"How many {unit} does the {names_and_aliases[0][0]} {infinitive}?",
        answer=str(numbers[0]),
        names=(unit, *(name for pair in names_and_aliases for name in pair)),
    )


def _document(fact: str, length: int, filler: tuple[str, ...], rng: np.random.Generator) -> str:
    """Return `length` words: the fact at a random position among filler sentences."""
    sentences, missing = [], length - _length(fact)
    while missing:
        # The remaining words must be zero or enough for another sentence, because filler is never
        # cut.
        fitting = [
            form for form in _FILLERS if (left := missing - _length(form)) == 0 or left >= _SHORTEST
        ]
        form = fitting[int(rng.integers(len(fitting)))]
        drawn = rng.choice(len(filler), size=form.count("{}"), replace=False).tolist()
        sentences.append(form.format(*(filler[index] for index in drawn)))
        missing -= _length(form)
    sentences.insert(int(rng.integers(len(sentences) + 1)), fact)
    return " ".join(sentences)


def _length(sentence: str) -> int:
    return len(sentence.split())


# ------------------------------------------------------------------------------
# Questions about alias chains, with documents in the cached order and in a shuffled order.
# ------------------------------------------------------------------------------

_SYSTEM = "Answer from the documents, with a number alone."
_EARLIER = "What are these documents about?"


@dataclass
class AliasQuestions:
    """Fictional two-hop questions that need two documents; no training data contains their
    facts."""

    questions: int = field(16, within(1, 1 << 12), "number of questions")
    words: int = field(50, within(SHORTEST_DOCUMENT, 1 << 24), "words of each document")
    distractors: int = field(
        2, within(0, MOST_DISTRACTORS), "documents of a prompt that do not contribute to the answer"
    )
    orders: list[str] = field(
        list(ORDERS), ORDERS, "orders of the documents: same as in the earlier request, shuffled"
    )
    seed: int = field(0, within(0, (1 << 63) - 1), "seed of texts and orders")

    def __post_init__(self) -> None:
        check_fields(self, "workload.alias_questions")


@dataclass
@WORKLOADS.register("alias_questions")
class AliasQuestionsWorkload(Drawn, WithOutput, OfText):
    """Fictional questions that only two documents together answer, over documents in the same order
    and shuffled."""

    output_tokens: int | None = field(16, positive, "output tokens per request")
    alias_questions: AliasQuestions = field(
        AliasQuestions, None, "number and length of the questions"
    )


@workload("alias_questions")
def modelled(
    alias_questions: AliasQuestions, selection: Selection, tokenizer: str | Path | None = None
) -> Workload:
    """Return the requests with the selected output length; `tokenizer` None is the built-in
    tokenizer."""
    return requests_of(alias_questions, tokenizer_of(tokenizer), selection.output_tokens or 1)


def requests_of(options: AliasQuestions, tokenizer: ChatTokenizer, output_tokens: int) -> Workload:
    """Two requests for each question and order: an earlier one that caches the documents, then the
    question.

    Each pair has its own cache salt. Labels: `kind` (earlier or question), `order`.
    """
    chains = alias_chains(options.questions, options.words, options.distractors, options.seed)
    requests = []
    for (number, chain), order in product(enumerate(chains), options.orders):
        moved = chain.documents
        if order == "shuffled":
            rng = np.random.default_rng([options.seed, number, 5])
            places = list(range(len(moved)))
            # at least one document moves if there are two or more
            while len(moved) > 1 and places == sorted(places):
                places = rng.permutation(len(moved)).tolist()
            moved = tuple(chain.documents[index] for index in places)
        group = number * len(options.orders) + options.orders.index(order)
        for kind, documents, question, length in (
            ("earlier", chain.documents, _EARLIER, 1),
            ("question", moved, chain.question, output_tokens),
        ):
            # the documents do not attend to each other
            given = Group("plus", tuple(Message("user", text) for text in documents))
            query = Group("seq", (Message("system", _SYSTEM), given, Message("user", question)))
            spans = describe(query, tokenizer, measure_delta=False).request_spans
            answer = chain.answer if kind == "question" else None
            request = Request(
                0, group, spans, output_len=length, cache_salt=f"{order} {number}", answer=answer
            )
            labels = {"kind": kind, "order": order if kind == "question" else ""}
            requests.append(Labelled(request, labels))
    detail = (
        f"{len(chains)} fictional questions, {2 + options.distractors} documents of {options.words} words each, "
        f"orders: {', '.join(options.orders)}, {tokenizer.name} tokenizer"
    )
    return labelled_workload("alias chains", detail, requests)
