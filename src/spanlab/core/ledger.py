"""The ledger: what was ever computed, refused and stored; it names the cause of every token that is not reused.

It observes a policy and decides nothing: without it, the same tokens are reused. A placement that learns reads its
observations here.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from spanlab.core.token_string import TokenString
from spanlab.core.tree import Node, PrefixTree


@dataclass(frozen=True, slots=True)
class _Roots:
    computed: Node
    refused: Node
    kept_since: Node


class Ledger:
    """Remembers token sequences by key: sequences of different keys never meet."""

    def __init__(self) -> None:
        self._computed, self._refused, self._kept_since = PrefixTree(), PrefixTree(), PrefixTree()
        self._roots: dict[Hashable, _Roots] = {}

    def known(self, key: Hashable, tokens: TokenString) -> tuple[int, int]:
        """Longest prefix that was ever computed, and longest that the store refused and has not taken since."""
        roots = self._roots.get(key)
        if roots is None:
            return 0, 0
        computed = self._computed.match(roots.computed, tokens)[1]
        if not self._refused.num_tokens:
            return computed, 0
        refused = self._refused.match(roots.refused, tokens)[1]
        return computed, refused if refused > self._kept_since.match(roots.kept_since, tokens)[1] else 0

    def computed(self, key: Hashable, tokens: TokenString, length: int) -> None:
        """Note that the first `length` tokens have been computed."""
        self._computed.extend(self._of(key).computed, tokens, length, 0)

    def refused(self, key: Hashable, tokens: TokenString, length: int) -> None:
        """Note that the store had no room for the first `length` tokens."""
        self._refused.extend(self._of(key).refused, tokens, length, 0)

    def kept(self, key: Hashable, tokens: TokenString, length: int) -> None:
        """Note that the first `length` tokens have been stored."""
        if self._refused.num_tokens:
            self._kept_since.extend(self._of(key).kept_since, tokens, length, 0)

    def _of(self, key: Hashable) -> _Roots:
        roots = self._roots.get(key)
        if roots is None:
            roots = _Roots(self._computed.new_root(), self._refused.new_root(), self._kept_since.new_root())
            self._roots[key] = roots
        return roots


class NoLedger(Ledger):
    """Remembers nothing, for runs that need no causes: what the store does not hold counts as never seen."""

    def known(self, key: Hashable, tokens: TokenString) -> tuple[int, int]:
        """Nothing is known."""
        return 0, 0

    def computed(self, key: Hashable, tokens: TokenString, length: int) -> None:
        """Forget it."""

    def refused(self, key: Hashable, tokens: TokenString, length: int) -> None:
        """Forget it."""

    def kept(self, key: Hashable, tokens: TokenString, length: int) -> None:
        """Forget it."""
