"""What stands before a prompt's shared text: nothing, or a system prompt that all, few, or no other requests share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spanlab.checks import not_negative, positive, share
from spanlab.core.request import Span, Tokens
from spanlab.workloads.fresh_ids import FreshIds
from spanlab.workloads.workload import Workload


@dataclass
class NoPreamble:
    """Requests without a preamble.

    `share`  of the requests
    """

    share: float = 1.0


@dataclass
class PreambleText:
    """One kind of preamble.

    `share`   of the requests
    `tokens`  length
    `text`    said over or cut to that length, {number} counting tenants, users or requests; text sources only;
              null: a text of ours
    """

    share: float = 0.0
    tokens: int | None = None
    text: str | None = None

    @property
    def length(self) -> int:
        """Tokens of each preamble; 0 where no request has one."""
        return self.tokens or 0


@dataclass
class CountedPreambles(PreambleText):
    """A kind of preamble with several texts, each asked equally often.

    `count`  tenants or users, each with a preamble of its own
    """

    count: int | None = None


class Drawn(NamedTuple):
    """The preamble of a request: its kind, and which of that kind."""

    kind: str
    number: int


#: Makes the token ids of a preamble, int32, shape (texts.length,).
Write = Callable[[Drawn, PreambleText], Tokens]


@dataclass
class Preamble:
    """What stands before the opening, the documents and the question of each prompt; the shares sum to one.

    `none`     nothing
    `fixed`    one system prompt for all requests
    `tenant`   one for each tenant
    `user`     one for each user, such as name, date and tools
    `request`  one for each request, such as a time stamp; nothing behind it is a prefix that another request has
    `seed`     of the draws: which request has which kind, tenant and user
    """

    none: NoPreamble = field(default_factory=NoPreamble)
    fixed: PreambleText = field(default_factory=PreambleText)
    tenant: CountedPreambles = field(default_factory=CountedPreambles)
    user: CountedPreambles = field(default_factory=CountedPreambles)
    request: PreambleText = field(default_factory=PreambleText)
    seed: int = 0

    def __post_init__(self) -> None:
        for name, chosen in self.shares().items():
            share(f"workload.preamble.{name}.share", chosen)
        if not math.isclose(sum(self.shares().values()), 1, abs_tol=1e-9):
            listed = ", ".join(f"{name} {chosen:g}" for name, chosen in self.shares().items() if chosen)
            raise ValueError(f"workload.preamble.*.share={listed or 0}: expected shares that sum to 1")
        for name, texts in self.texts().items():
            _check(f"workload.preamble.{name}", texts)
        not_negative("workload.preamble.seed", self.seed)
        if self.seed and self.is_absent:
            raise ValueError(f"workload.preamble.seed={self.seed} without a preamble: expected 0")

    def shares(self) -> dict[str, float]:
        """The share of each kind."""
        return {kind.name: getattr(self, kind.name).share for kind in fields(self) if kind.name != "seed"}

    def texts(self) -> dict[str, PreambleText]:
        """The kinds that add tokens."""
        return {name: getattr(self, name) for name in self.shares() if name != "none"}

    @property
    def is_absent(self) -> bool:
        """Whether no request has a preamble."""
        return not any(texts.share for texts in self.texts().values())

    @property
    def longest(self) -> int:
        """Tokens of the longest kind that is asked for."""
        return max(texts.length for texts in self.texts().values())

    def line(self) -> str:
        """The preambles in words."""
        parts = [f"{self.none.share:.4g} none"] if self.none.share else []
        parts += [_in_words(name, texts) for name, texts in self.texts().items() if texts.share]
        return f"preambles by share: {', '.join(parts)}, seed {self.seed}"


def with_preambles(workload: Workload, preamble: Preamble, write: Write | None = None) -> Workload:
    """The same prompts behind their preambles.

    `write`  makes token ids; None: ids that occur nowhere else in the workload.
    """
    if preamble.is_absent:
        return workload
    drawn = draw(preamble, len(workload.requests))
    spans = _spans(drawn, preamble.texts(), write or _fresh_ids(workload))
    requests = [
        replace(request, spans=(spans[found], *request.spans)) if found in spans else request
        for request, found in zip(workload.requests, drawn, strict=True)
    ]
    return workload.changed(requests, preamble.line())


def draw(preamble: Preamble, requests: int) -> list[Drawn]:
    """Kind and number of each request's preamble: exact shares, every tenant and user equally often, in random order.

    Each kind's numbers have a stream of random numbers of their own.
    """
    shares = preamble.shares()
    streams = [np.random.default_rng([preamble.seed, stream]) for stream in range(len(shares) + 1)]
    kinds = streams[-1].permutation(np.repeat(list(shares), stratified(list(shares.values()), requests)))
    numbers = np.zeros(requests, dtype=np.int64)
    for stream, (name, texts) in zip(streams, preamble.texts().items(), strict=False):
        mine = np.flatnonzero(kinds == name)
        numbers[mine] = stream.permutation(np.arange(len(mine)) % _different(name, texts, len(mine)))
    return [Drawn(kind, number) for kind, number in zip(kinds.tolist(), numbers.tolist(), strict=True)]


def stratified(shares: Sequence[float], total: int) -> NDArray[np.int64]:
    """Whole numbers in proportion to shares that sum to one, summing to `total`: the largest remainders are rounded up.

    int64, shape (shares,); each differs from its exact share by less than one.
    """
    exact = np.array(shares) * total
    counts = np.floor(exact + 1e-9).astype(np.int64)
    largest = np.argsort(counts - exact, kind="stable")
    counts[largest[: total - counts.sum()]] += 1
    return counts


def _different(name: str, texts: PreambleText, requests: int) -> int:
    """Different preambles of a kind that so many requests have."""
    if isinstance(texts, CountedPreambles):
        return texts.count or 1
    return 1 if name == "fixed" else max(1, requests)


def _spans(drawn: Sequence[Drawn], texts: Mapping[str, PreambleText], write: Write) -> dict[Drawn, Span]:
    """A span for each different preamble; nobody asks again for a prompt that begins with a request's own."""
    wanted = sorted({found for found in drawn if found.kind in texts})
    spans = {found: Span(write(found, texts[found.kind]), reusable=found.kind != "request") for found in wanted}
    first: dict[bytes, Drawn] = {}
    for found, span in spans.items():
        other = first.setdefault(span.tokens.tobytes(), found)
        if other != found:
            raise ValueError(
                f"workload.preamble.{found.kind}.text with tokens={texts[found.kind].length}: expected another text "
                f"for {found.kind} {found.number} than for {other.kind} {other.number}, as with {{number}} first"
            )
    return spans


def _fresh_ids(workload: Workload) -> Write:
    ids = FreshIds.beyond(workload.requests)
    return lambda found, texts: ids.take(texts.length)


def _in_words(name: str, texts: PreambleText) -> str:
    count = f" of {texts.count}" if isinstance(texts, CountedPreambles) else ""
    return f"{texts.share:.4g} {name}{count} ({texts.length:,} tokens)"


def _check(key: str, texts: PreambleText) -> None:
    """Refuse a kind with a share and without length or number, and one without a share and with either."""
    given = {name: getattr(texts, name) for name in ("tokens", "count", "text") if hasattr(texts, name)}
    for name, value in given.items():
        if texts.share == 0 and value is not None:
            raise ValueError(f"{key}.{name}={value} with {key}.share=0: expected null")
        if texts.share and name != "text" and value is None:
            raise ValueError(f"{key}.{name}=null with {key}.share={texts.share:g}: expected a number above zero")
        if name != "text":
            positive(f"{key}.{name}", value)
        elif value is not None and not value.strip():
            raise ValueError(f"{key}.text: expected words, or null")
