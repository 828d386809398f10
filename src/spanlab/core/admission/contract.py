"""The contract of an admission rule: how many of a request's computed tokens are stored.

It decides before space is made, so that refused tokens displace nothing. It does not select what is evicted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from spanlab.core.budget import Budget
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
