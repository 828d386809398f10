"""The ledger: prefixes that were ever computed, refused or stored, from which the causes of missed
reuse follow.

Tokens of the computed tree are marked (`Node.uses`) while they are stored, and after their eviction
until a request misses them: one eviction explains one miss. Tokens without a mark were not stored
since they were last computed.

It observes a policy and decides nothing: without it, the same tokens are reused. Learning
placements read its observations.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from spanlab.core.token_string import EMPTY, TokenString
from spanlab.core.tree import Node, PrefixTree


@dataclass(frozen=True, slots=True)
class _Roots:
    computed: Node
    refused: Node
    stored_since: Node


class _PathCursor:
    """The node that the last string reached in a tree; following the same string again starts
    there.

    Nodes of a ledger are never removed, and a split node keeps its depth, so the path to it stays
    valid.
    """

    __slots__ = ("_node", "_root", "_tokens")

    def __init__(self) -> None:
        self._root = self._node = PrefixTree().new_root()
        self._tokens = EMPTY

    def start(self, root: Node, tokens: TokenString, limit: int) -> Node:
        """Return a node on the path of a string, at most `limit` tokens deep."""
        continues = self._root is root and self._tokens is tokens and self._node.depth <= limit
        return self._node if continues else root

    def note(self, root: Node, tokens: TokenString, node: Node, depth: int) -> None:
        """Remember the deepest node that ends within a string of `depth` tokens."""
        if node.depth > depth:
            assert node.parent is not None, "the root ends at zero"
            node = node.parent
        self._root, self._tokens, self._node = root, tokens, node


class Ledger:
    """Records token sequences by key; sequences of different keys are separate."""

    def __init__(self) -> None:
        self._lookup_cursor, self._record_cursor = _PathCursor(), _PathCursor()
        self._computed, self._refused, self._stored_since = PrefixTree(), PrefixTree(), PrefixTree()
        self._roots: dict[Hashable, _Roots] = {}

    def lookup(self, key: Hashable, tokens: TokenString) -> tuple[int, int]:
        """Return the longest prefix ever computed, and the longest one refused and not stored
        since, in tokens."""
        roots = self._roots.get(key)
        if roots is None:
            return 0, 0
        start = self._lookup_cursor.start(roots.computed, tokens, len(tokens))
        node, computed = self._computed.match(start, tokens)
        self._lookup_cursor.note(roots.computed, tokens, node, computed)
        if not self._refused.num_tokens:
            return computed, 0
        refused = self._refused.match(roots.refused, tokens)[1]
        return computed, refused if refused > self._stored_since.match(roots.stored_since, tokens)[
            1
        ] else 0

    def evicted(self, key: Hashable, tokens: TokenString, above: int, upto: int) -> int:
        """Return how many of the tokens `[above, upto)`, none of which is stored, were evicted and
        not missed since."""
        return sum([stop - start for _, start, stop in self._marked(key, tokens, above, upto)])

    def missed(self, key: Hashable, tokens: TokenString, above: int, upto: int) -> None:
        """Record that a request computes the tokens `[above, upto)` again."""
        for node, start, stop in list(self._marked(key, tokens, above, upto)):
            if stop < node.depth:
                node = self._computed.split(node, stop)
            if start > node.start:
                self._computed.split(node, start)
            node.uses = 0

    def _marked(
        self, key: Hashable, tokens: TokenString, above: int, upto: int
    ) -> Iterator[tuple[Node, int, int]]:
        """Yield the marked nodes that tokens `[above, upto)` are in, deepest first, with their
        range of these."""
        roots = self._roots.get(key)
        if roots is None or above >= upto:
            return
        start = self._lookup_cursor.start(roots.computed, tokens, len(tokens))
        node, depth = self._computed.match(start, tokens)
        upto = min(upto, depth)
        for step in node.path():
            if step.depth <= above:
                return
            if step.uses and step.start < upto:
                yield step, max(step.start, above), min(step.depth, upto)

    def computed(self, key: Hashable, tokens: TokenString, length: int) -> None:
        """Record that the first `length` tokens have been computed."""
        root = self._roots_of(key).computed
        node = self._computed.extend(
            self._record_cursor.start(root, tokens, length), tokens, length, 0
        )
        self._record_cursor.note(root, tokens, node, length)

    def refused(self, key: Hashable, tokens: TokenString, length: int) -> None:
        """Record that the store had no space for the first `length` tokens."""
        self._refused.extend(self._roots_of(key).refused, tokens, length, 0)

    def stored(self, key: Hashable, tokens: TokenString, length: int) -> None:
        """Record that the first `length` tokens have been stored."""
        self.computed(key, tokens, length)
        root = self._roots_of(key).computed
        for node in self._record_cursor.start(root, tokens, length).path():
            node.uses = 1
        if self._refused.num_tokens:
            self._stored_since.extend(self._roots_of(key).stored_since, tokens, length, 0)

    def _roots_of(self, key: Hashable) -> _Roots:
        roots = self._roots.get(key)
        if roots is None:
            roots = _Roots(
                self._computed.new_root(), self._refused.new_root(), self._stored_since.new_root()
            )
            self._roots[key] = roots
        return roots


class NoLedger(Ledger):
    """A ledger that records nothing, for runs without causes: tokens that are not stored count as
    never seen."""

    def lookup(self, key: Hashable, tokens: TokenString) -> tuple[int, int]:
        """Return zeros."""
        return 0, 0

    def evicted(self, key: Hashable, tokens: TokenString, above: int, upto: int) -> int:
        """Return zero."""
        return 0

    def missed(self, key: Hashable, tokens: TokenString, above: int, upto: int) -> None:
        """Record nothing."""

    def computed(self, key: Hashable, tokens: TokenString, length: int) -> None:
        """Record nothing."""

    def refused(self, key: Hashable, tokens: TokenString, length: int) -> None:
        """Record nothing."""

    def stored(self, key: Hashable, tokens: TokenString, length: int) -> None:
        """Record nothing."""
