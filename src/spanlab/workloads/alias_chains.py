"""Questions about invented things that two documents answer only together: a name in one, a number in the other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spanlab.workloads.invented_words import WordMint

#: As it stands in a document, and as a question asks for it.
_RELATIONS = (("weighs", "weigh"), ("costs", "cost"), ("holds", "hold"), ("needs", "need"))

# Filler says nothing of names, aliases or numbers. Three words, then one more each: any total from 3 up is a sum.
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
#: Every number in a prompt has two digits and stands there once, so none is part of another.
NUMBERS = range(10, 100)


@dataclass(frozen=True, slots=True)
class AliasChain:
    """One question with its documents and its only answer.

    `definition`, `usage`  which document says what the thing is also called, and which gives its number.
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


def alias_chains(count: int, words: int, distractors: int = 2, seed: int = 0) -> list[AliasChain]:
    """Make `count` questions, each with 2 + distractors documents of exactly `words` words, in shuffled order.

    A distractor is half of another chain with the same verb and unit, so that only following the alias leads to the
    answer. No name stands in two questions; fewer or more questions of one seed begin alike. Answers are numbers.
    """
    _check(count, words, distractors, seed)
    rng = np.random.default_rng(seed)
    mint = WordMint(rng)
    filler = tuple(mint.fresh() for _ in range(_FILLER_WORDS))
    return [_chain(_facts(distractors, mint, rng), words, filler, rng) for _ in range(count)]


def _facts(distractors: int, mint: WordMint, rng: np.random.Generator) -> _Facts:
    verb, infinitive = _RELATIONS[int(rng.integers(len(_RELATIONS)))]
    unit = mint.fresh()
    pairs = [(mint.fresh(), mint.fresh()) for _ in range(1 + (distractors + 1) // 2)]
    numbers = rng.choice(NUMBERS, size=len(pairs), replace=False).tolist()
    told = [
        (f"The {name} is also called the {alias}.", f"The {alias} {verb} {number} {unit}.")
        for (name, alias), number in zip(pairs, numbers, strict=True)
    ]
    # A lone half distracts more as a number than as a name, so each pair's usage comes first.
    others = [sentence for definition, usage in told[1:] for sentence in (usage, definition)][:distractors]
    return _Facts(
        sentences=(*told[0], *others),
        question=f"How many {unit} does the {pairs[0][0]} {infinitive}?",
        answer=str(numbers[0]),
        names=(unit, *(name for pair in pairs for name in pair)),
    )


def _chain(facts: _Facts, words: int, filler: tuple[str, ...], rng: np.random.Generator) -> AliasChain:
    order = rng.permutation(len(facts.sentences)).tolist()
    documents = tuple(_document(facts.sentences[which], words, filler, rng) for which in order)
    there = " ".join((*documents, facts.question))
    vocabulary = tuple(sorted(word for word in {*facts.names, *filler} if word in there))
    return AliasChain(documents, facts.question, facts.answer, order.index(0), order.index(1), vocabulary)


def _document(fact: str, words: int, filler: tuple[str, ...], rng: np.random.Generator) -> str:
    """The fact at a drawn place among sentences of filler, `words` words in all."""
    sentences, missing = [], words - _length(fact)
    while missing:
        # What is left must be nothing, or enough for another sentence: no filler is cut short.
        fitting = [form for form in _FILLERS if _fillable(missing - _length(form))]
        form = fitting[int(rng.integers(len(fitting)))]
        drawn = rng.choice(len(filler), size=form.count("{}"), replace=False).tolist()
        sentences.append(form.format(*(filler[which] for which in drawn)))
        missing -= _length(form)
    sentences.insert(int(rng.integers(len(sentences) + 1)), fact)
    return " ".join(sentences)


def _length(sentence: str) -> int:
    return len(sentence.split())


def _fillable(words: int) -> bool:
    return words == 0 or words >= _SHORTEST


def _check(count: int, words: int, distractors: int, seed: int) -> None:
    most = 2 * (len(NUMBERS) - 1)
    for key, value, low, high in (
        ("questions", count, 1, 1 << 12),
        ("words", words, SHORTEST_DOCUMENT, 1 << 24),
        ("distractors", distractors, 0, most),
        ("seed", seed, 0, (1 << 63) - 1),
    ):
        if not low <= value <= high:
            raise ValueError(f"{key}={value}: expected a whole number from {low} to {high}")
