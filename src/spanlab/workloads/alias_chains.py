"""Two-hop questions about fictional things: one document defines an alias, another gives the alias a number."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spanlab.workloads.invented_words import WordGenerator

#: Verb forms: in a document, and in a question.
_RELATIONS = (("weighs", "weigh"), ("costs", "cost"), ("holds", "hold"), ("needs", "need"))

# Filler mentions no names, aliases or numbers. Lengths are 3, 4, 5, 6 words, so that they sum to any total from 3 up.
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

    `definition`, `usage`  indexes of the document that defines the alias and of the one that gives its number.
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


def alias_chains(count: int, document_words: int, distractors: int = 2, seed: int = 0) -> list[AliasChain]:
    """Make `count` questions, each with 2 + distractors documents of exactly `document_words` words, in shuffled order.

    A distractor is half of another chain with the same verb and unit, so that only the alias leads to the answer.
    No name occurs in two questions. For one seed, the first questions do not depend on `count`. Answers are numbers.
    `AliasQuestions` checks the ranges of the arguments.
    """
    rng = np.random.default_rng(seed)
    mint = WordGenerator(rng)
    filler = tuple(mint.fresh() for _ in range(_FILLER_WORDS))
    return [_chain(_facts(distractors, mint, rng), document_words, filler, rng) for _ in range(count)]


def _facts(distractors: int, mint: WordGenerator, rng: np.random.Generator) -> _Facts:
    verb, infinitive = _RELATIONS[int(rng.integers(len(_RELATIONS)))]
    unit = mint.fresh()
    names_and_aliases = [(mint.fresh(), mint.fresh()) for _ in range(1 + (distractors + 1) // 2)]
    numbers = rng.choice(NUMBERS, size=len(names_and_aliases), replace=False).tolist()
    sentence_pairs = [
        (f"The {name} is also called the {alias}.", f"The {alias} {verb} {number} {unit}.")
        for (name, alias), number in zip(names_and_aliases, numbers, strict=True)
    ]
    # A single sentence of a pair distracts more if it holds a number, so each pair's usage comes first.
    extra_sentences = [sentence for definition, usage in sentence_pairs[1:] for sentence in (usage, definition)][
        :distractors
    ]
    return _Facts(
        sentences=(*sentence_pairs[0], *extra_sentences),
        question=f"How many {unit} does the {names_and_aliases[0][0]} {infinitive}?",
        answer=str(numbers[0]),
        names=(unit, *(name for pair in names_and_aliases for name in pair)),
    )


def _chain(facts: _Facts, document_words: int, filler: tuple[str, ...], rng: np.random.Generator) -> AliasChain:
    order = rng.permutation(len(facts.sentences)).tolist()
    documents = tuple(_document(facts.sentences[number], document_words, filler, rng) for number in order)
    prompt = " ".join((*documents, facts.question))
    vocabulary = tuple(sorted(word for word in {*facts.names, *filler} if word in prompt))
    return AliasChain(documents, facts.question, facts.answer, order.index(0), order.index(1), vocabulary)


def _document(fact: str, length: int, filler: tuple[str, ...], rng: np.random.Generator) -> str:
    """Return `length` words: the fact at a random position among filler sentences."""
    sentences, missing = [], length - _length(fact)
    while missing:
        # The remaining words must be zero or enough for another sentence, because filler is never cut.
        fitting = [form for form in _FILLERS if _fillable(missing - _length(form))]
        form = fitting[int(rng.integers(len(fitting)))]
        drawn = rng.choice(len(filler), size=form.count("{}"), replace=False).tolist()
        sentences.append(form.format(*(filler[index] for index in drawn)))
        missing -= _length(form)
    sentences.insert(int(rng.integers(len(sentences) + 1)), fact)
    return " ".join(sentences)


def _length(sentence: str) -> int:
    return len(sentence.split())


def _fillable(count: int) -> bool:
    return count == 0 or count >= _SHORTEST
