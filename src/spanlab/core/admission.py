"""Admission: how many of a request's computed tokens are stored.

It decides before space is made, so that refused tokens displace nothing. It does not select what is evicted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from spanlab.checks import positive
from spanlab.checks import share as check_share
from spanlab.core.budget import Budget
from spanlab.core.ledger import Ledger
from spanlab.core.prefix_index import RootKey
from spanlab.core.request import Request
from spanlab.core.token_string import TokenString
from spanlab.registry import Registry


class ComputedPrefix(NamedTuple):
    """A prefix or span whose first `stop` tokens are computed and could be stored.

    `key`      under which it would be stored: equal tokens of different keys are not shared
    `tokens`   all of its tokens, computed or not; once the request has ended, with its output
    `request`  token ids, spans, session; not the length of the output, which no server has
    """

    key: RootKey
    tokens: TokenString
    stop: int
    request: Request


class Admission(Protocol):
    """Decides which tokens are stored; called again as more of a prompt is computed."""

    def admit(self, computed: ComputedPrefix) -> int:
        """Return how many of the first `computed.stop` tokens are stored; tokens stored before stay."""
        ...

    def ended(self, key: RootKey, tokens: TokenString) -> None:
        """Note the tokens that a finished request has computed or read."""
        ...


class Rule:
    """An admission that depends on the computed tokens only."""

    def __init__(self, admit: Callable[[ComputedPrefix], int]) -> None:
        self._admit = admit

    def admit(self, computed: ComputedPrefix) -> int:
        return self._admit(computed)

    def ended(self, key: RootKey, tokens: TokenString) -> None:
        """Record nothing."""


@dataclass(frozen=True)
class AdmissionFacts:
    """Facts of the store that an admission may read: its budget, and the bytes of a token's KV."""

    budget: Budget
    token_bytes: int


#: `facts` are those of the store.
ADMISSIONS: Registry[Admission] = Registry("admission", given=("facts",))


@ADMISSIONS.register("always")
def always() -> Admission:
    """All that is computed is kept."""
    return Rule(lambda computed: computed.stop)


@ADMISSIONS.register("bypass")
class Bypass:
    """Nothing is kept that would take more than a share of the store, or of which too little is known.

    Caches of objects of many sizes do so, as AdaptSize (Berger et al., NSDI 2017), whose admission probability falls
    with the size. Here both limits are fixed.

    `share`  of the store's bytes that one prefix or span may take
    `known`  share of its tokens that an earlier request must have had; 0 asks for nothing
    """

    def __init__(self, facts: AdmissionFacts, share: float = 0.1, known: float = 0.0) -> None:
        check_share("admission_options.share", share)
        check_share("admission_options.known", known)
        budget = facts.budget
        self._most = share * min(budget.kv_bytes, budget.total_bytes)
        self._token_bytes, self._known, self._touched = facts.token_bytes, known, Ledger()

    def admit(self, computed: ComputedPrefix) -> int:
        """Admit all computed tokens or none."""
        length = len(computed.tokens)
        if length * self._token_bytes > self._most:
            return 0
        touched = self._touched.lookup(computed.key, computed.tokens)[0] if self._known else 0
        return computed.stop if touched >= self._known * length else 0

    def ended(self, key: RootKey, tokens: TokenString) -> None:
        """Record the tokens, where the rule reads them."""
        if self._known:
            self._touched.computed(key, tokens, len(tokens))


@ADMISSIONS.register("min_length")
def min_length(tokens: int = 256) -> Admission:
    """A prefix or span that is shorter than `tokens` is not kept: it saves too little to be worth an entry."""
    positive("admission_options.tokens", tokens)
    return Rule(lambda computed: computed.stop if len(computed.tokens) >= tokens else 0)


@ADMISSIONS.register("second_touch")
class SecondTouch:
    """As much is kept as an earlier request that has ended computed or read.

    Tokens that are requested once displace nothing: the doorkeeper of TinyLFU (arXiv 1512.00727), for prefixes and
    spans. The record of touched tokens holds no KV, and is not limited here.
    """

    def __init__(self) -> None:
        self._touched = Ledger()  # not the ledger of causes, which a run may omit

    def admit(self, computed: ComputedPrefix) -> int:
        """Admit the beginning that was touched before."""
        return min(computed.stop, self._touched.lookup(computed.key, computed.tokens)[0])

    def ended(self, key: RootKey, tokens: TokenString) -> None:
        """Record the touched tokens."""
        self._touched.computed(key, tokens, len(tokens))
