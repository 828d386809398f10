"""Where prefixes are looked up and stored: one root per cache salt and past."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from spanlab.core.request import Request
from spanlab.core.sections import Section
from spanlab.core.tree import Node, PrefixTree

RootKey = tuple[str, int, bytes]


class PrefixIndex(Protocol):
    """Finds what a section of a prompt may share, and says under which root it is stored."""

    def key(self, request: Request, section: Section) -> RootKey:
        """Sections with equal keys may share; others never do."""
        ...

    def find(self, request: Request, section: Section) -> tuple[Node, int]:
        """The node that the longest match ends in, and its length in tokens."""
        ...

    def insertion_root(self, request: Request, section: Section) -> Node:
        """The root under which this section's whole entry goes."""
        ...

    def all(self) -> Iterable[Node]: ...


class SharedIndex:
    """One root per salt and past: equal tokens after an equal past share their nodes."""

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self._roots: dict[RootKey, Node] = {}

    def key(self, request: Request, section: Section) -> RootKey:
        return request.salt, 0, section.past

    def find(self, request: Request, section: Section) -> tuple[Node, int]:
        root = self._roots.get(self.key(request, section))
        if root is None:
            return self._tree.new_root(), 0
        return self._tree.match(root, section.tokens) if section.storable else (root, 0)

    def insertion_root(self, request: Request, section: Section) -> Node:
        key = self.key(request, section)
        if key not in self._roots:
            self._roots[key] = self._tree.new_root()
        return self._roots[key]

    def all(self) -> Iterable[Node]:
        return self._roots.values()
