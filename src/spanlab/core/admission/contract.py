"""What an admission rule is: it is asked how much of what a request has computed is kept.

It decides before room is made, so that what it refuses displaces nothing. It never decides what leaves.
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


class Computed(NamedTuple):
    """A prefix or span of which the first `stop` tokens are computed, and could be kept.

    `key`      under which it would be stored: equal tokens of different keys are not shared
    `tokens`   all of it, computed or not; of a prompt that has ended, with its output
    `request`  token ids, spans, session; not the length of the output, which no server knows
    """

    key: RootKey
    tokens: TokenString
    stop: int
    request: Request


class Admission(Protocol):
    """Decides what is kept; asked anew as more of a prompt is computed."""

    def admit(self, computed: Computed) -> int:
        """How many of the first `computed.stop` tokens are kept; what was kept before stays."""
        ...

    def ended(self, key: RootKey, tokens: TokenString) -> None:
        """A request that has ended has computed or read these tokens."""
        ...


class Rule:
    """An admission that remembers nothing."""

    def __init__(self, admit: Callable[[Computed], int]) -> None:
        self._admit = admit

    def admit(self, computed: Computed) -> int:
        return self._admit(computed)

    def ended(self, key: RootKey, tokens: TokenString) -> None:
        """Nothing is remembered."""


@dataclass(frozen=True)
class AdmissionFacts:
    """What an admission may know of its store: its budget, and the bytes of a token's KV."""

    budget: Budget
    token_bytes: int


#: `facts` are those of the store.
ADMISSIONS: Registry[Admission] = Registry("admission", given=("facts",))


@ADMISSIONS.register("always")
def always() -> Admission:
    """All that is computed is kept."""
    return Rule(lambda computed: computed.stop)
