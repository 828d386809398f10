"""Quality: alias chains over documents, answered by every way of reuse and compared with full recompute."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from spanlab.core.request import Request
from spanlab.workloads.alias_chains import AliasChain, alias_chains
from spanlab.analysis.divergence import Divergence, divergence
from spanlab.pic_bench.decode import Decoded, decode
from spanlab.pic_bench.ground import Ground
from spanlab.pic_bench.prompts import Order, ask
from spanlab.queries import ChatTokenizer, render
from spanlab.settings import Strategy
from spanlab.settings.pic_bench import PicBench

REFERENCE = "flat"
FLOOR = "floor"
ORDERS: tuple[Order, ...] = ("same", "shuffled")

_SYSTEM = "Answer from the documents, with a number alone."
_EARLIER = "What are these documents about?"
_CHUNK = 64  # prompt tokens of a step in the floor's second recompute: sums in another order, nothing else


@dataclass(frozen=True, slots=True)
class Answer:
    """What one arm made of one question; divergences are from full recompute of the same prompt, on its tokens.

    `answer`  the text that the arm wrote on its own; empty where accuracy was not asked for
    """

    model: str
    question: int
    arm: str
    predictions: int
    kl: float
    top1: float
    greedy: bool
    answer: str
    gold: str

    @property
    def cell(self) -> tuple[str, int]:
        """What is done together."""
        return self.model, self.question

    @property
    def divergence(self) -> Divergence:
        """The same, as the evaluation's table takes it."""
        return Divergence(self.predictions, self.kl, self.top1, self.greedy)


def judged(settings: PicBench) -> dict[str, Strategy]:
    """Arms whose answers may differ from full recompute: those that reuse spans."""
    return {name: settings.arms[name] for name in settings.chosen() if settings.arms[name].spans is not None}


def names(settings: PicBench) -> list[str]:
    """Every row of the table: full recompute, then each arm, with documents as first seen and shuffled."""
    return [_name(arm, order) for arm in (REFERENCE, *judged(settings)) for order in ORDERS]


def rows_of(settings: PicBench) -> int:
    """Answers to one question: those of `names`, and the floor in both orders."""
    return len(names(settings)) + len(ORDERS)


def chains(settings: PicBench) -> list[AliasChain]:
    """The questions of a run."""
    quality = settings.quality
    return alias_chains(quality.questions, quality.words, quality.distractors, settings.seed)


@dataclass(frozen=True)
class Prompts:
    """One question's prompt in either order, and what was asked about the same documents before."""

    earlier: Request
    same: Request
    shuffled: Request


def prompts(settings: PicBench, tokenizer: ChatTokenizer, chain: AliasChain, number: int) -> Prompts:
    """Shuffled means that at least one document stands elsewhere."""
    documents = chain.documents
    order = list(range(len(documents)))
    rng = np.random.default_rng([settings.seed, number, 5])
    while len(order) > 1 and order == sorted(order):
        order = rng.permutation(len(documents)).tolist()
    length = settings.quality.output_tokens

    def asked(at: int, texts: list[str], question: str, output: int) -> Request:
        return render(ask(texts, question, _SYSTEM), tokenizer, at, output_len=output, answer=chain.answer)

    return Prompts(
        asked(0, list(documents), _EARLIER, 1),
        asked(1, list(documents), chain.question, length),
        asked(2, [documents[k] for k in order], chain.question, length),
    )


def answers(settings: PicBench, ground: Ground, number: int, chain: AliasChain) -> Iterator[Answer]:
    """All arms' answers to one question, each as soon as it is there."""
    asked = prompts(settings, ground.tokenizer, chain, number)
    _check_fits(settings, ground, asked.same)
    for order in ORDERS:
        yield from _Question(settings, ground, asked, number, chain.answer, order).answers()


def _check_fits(settings: PicBench, ground: Ground, request: Request) -> None:
    """Refuse a prompt that is longer than the model's context."""
    tokens, limit = request.num_tokens + request.output_len, ground.model.context
    if tokens > limit:
        quality = settings.quality
        raise ValueError(
            f"quality.words={quality.words} with quality.distractors={quality.distractors}: prompt and output of "
            f"{tokens:,} tokens; expected at most the {limit:,} positions of {ground.name}"
        )


class _Question:
    """One prompt in one order, recomputed in full once, by all arms."""

    def __init__(
        self, settings: PicBench, ground: Ground, asked: Prompts, number: int, gold: str, order: Order
    ) -> None:
        self._settings, self._ground, self._number, self._gold, self._order = settings, ground, number, gold, order
        self._earlier, self._request = asked.earlier, asked.same if order == "same" else asked.shuffled
        self._flat = settings.arms[settings.baseline]
        self._stop = _stop(ground.tokenizer)
        self._whole = _cut(self._decode(self._flat), self._stop)

    def answers(self) -> Iterator[Answer]:
        """Full recompute, its floor, and every arm that reuses spans."""
        whole = self._whole
        yield self._row(REFERENCE, whole, whole.tokens)
        yield self._row(FLOOR, decode(self._ground, self._flat, [], self._request, _CHUNK, whole.tokens), [])
        for arm, strategy in judged(self._settings).items():
            found = self._decode(strategy, whole.tokens)
            same = "accuracy" not in self._settings.outputs or _agrees(whole, found)
            yield self._row(arm, found, whole.tokens if same else self._decode(strategy).tokens)

    def _decode(self, strategy: Strategy, told: list[int] | None = None) -> Decoded:
        before = [self._earlier] if strategy.keep else []
        return decode(self._ground, strategy, before, self._request, self._settings.token_budget, told)

    def _row(self, arm: str, found: Decoded, tokens: list[int]) -> Answer:
        apart = divergence(self._whole.logits, found.logits)
        return Answer(
            self._ground.name,
            self._number,
            _name(arm, self._order),
            apart.predictions,
            apart.kl,
            apart.top1,
            _agrees(self._whole, found),
            self._text(tokens),
            self._gold,
        )

    def _text(self, tokens: list[int]) -> str:
        """What was written, up to where the model ended it."""
        if "accuracy" not in self._settings.outputs:
            return ""
        kept = tokens[: tokens.index(self._stop)] if self._stop in tokens else tokens
        return self._ground.tokenizer.decode(np.array(kept, np.int32)).strip()


def _agrees(whole: Decoded, found: Decoded) -> bool:
    """Whether greedy decoding would have written the same: at every position, after the same tokens, the same next."""
    chosen: list[int] = found.logits.argmax(1).tolist()
    return chosen == whole.tokens


def _cut(decoded: Decoded, stop: int | None) -> Decoded:
    """Up to the token that ends the answer, that one included."""
    if stop not in decoded.tokens:
        return decoded
    end = decoded.tokens.index(stop) + 1
    return replace(decoded, tokens=decoded.tokens[:end], logits=decoded.logits[:end])


def _stop(tokenizer: ChatTokenizer) -> int | None:
    return None if tokenizer.eos_token is None else tokenizer.tokenizer.token_to_id(tokenizer.eos_token)


def _name(arm: str, order: Order) -> str:
    return arm if order == "same" else f"{arm}-shuffled"
