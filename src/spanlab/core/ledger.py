"""The ledger: what was ever computed, refused and stored; it names the cause of every token that is not reused.

It observes a policy and decides nothing: without it, the same tokens are reused. A placement that learns reads its
observations here.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from spanlab.core.token_string import EMPTY, TokenString
from spanlab.core.tree import Node, PrefixTree


@dataclass(frozen=True, slots=True)
class _Roots:
    computed: Node
    refused: Node
    kept_since: Node


class _Trail:
    """How far the string that was followed last went into a tree; following the same one again starts there.

    A node of a ledger never leaves, and one that is split keeps its depth, so that what led to it still does.
    """

    __slots__ = ("_node", "_root", "_tokens")

    def __init__(self) -> None:
        self._root = self._node = PrefixTree().new_root()
        self._tokens = EMPTY

    def start(self, root: Node, tokens: TokenString, limit: int) -> Node:
        """A node within the first `limit` tokens of a string."""
        known = self._root is root and self._tokens is tokens and self._node.depth <= limit
        return self._node if known else root

    def note(self, root: Node, tokens: TokenString, node: Node, depth: int) -> None:
        """Remember where a string of `depth` tokens ended: at a node, or inside its edge."""
        if node.depth > depth:
            assert node.parent is not None, "the root ends at zero"
            node = node.parent
        self._root, self._tokens, self._node = root, tokens, node


class Ledger:
    """Remembers token sequences by key: sequences of different keys never meet."""

    def __init__(self) -> None:
        self._asked, self._noted = _Trail(), _Trail()
        self._computed, self._refused, self._kept_since = PrefixTree(), PrefixTree(), PrefixTree()
        self._roots: dict[Hashable, _Roots] = {}

    def known(self, key: Hashable, tokens: TokenString) -> tuple[int, int]:
        """Longest prefix that was ever computed, and longest that the store refused and has not taken since."""
        roots = self._roots.get(key)
        if roots is None:
            return 0, 0
        start = self._asked.start(roots.computed, tokens, len(tokens))
        node, computed = self._computed.match(start, tokens)
        self._asked.note(roots.computed, tokens, node, computed)
        if not self._refused.num_tokens:
            return computed, 0
        refused = self._refused.match(roots.refused, tokens)[1]
        return computed, refused if refused > self._kept_since.match(roots.kept_since, tokens)[1] else 0

    def computed(self, key: Hashable, tokens: TokenString, length: int) -> None:
        """Note that the first `length` tokens have been computed."""
        root = self._of(key).computed
        node = self._computed.extend(self._noted.start(root, tokens, length), tokens, length, 0)
        self._noted.note(root, tokens, node, length)

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
