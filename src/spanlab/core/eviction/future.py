"""What will be asked for: every prefix of the requests to come, and which of them use it when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from spanlab.core.cache_spans import CacheSpan, Layout
from spanlab.core.request import Request
from spanlab.core.token_string import TokenString
from spanlab.core.tree import Node, PrefixTree

NEVER = 1 << 62
RootName = Callable[[Request, CacheSpan], bytes]


class Place(NamedTuple):
    """A position on a path of requests to come: within `node`, `depth` tokens from the start of the path."""

    node: Node
    depth: int


class Future:
    """The prefixes of requests in order of arrival, cut wherever two of them part.

    A request that has been admitted is past. Requests are assumed to be admitted in order of arrival.

    `past`  how many requests are
    """

    def __init__(self, requests: Sequence[Request], layout: Layout, root_name: RootName, block_size: int) -> None:
        self._tree, self._block_size, self.past = PrefixTree(block_size), block_size, 0
        self._roots: dict[bytes, Node] = {}
        self._admitted = [False] * len(requests)
        self._number = {request.id: at for at, request in enumerate(requests)}
        self._users: dict[Node, list[int]] = {}  # requests to come by node, the next one last
        ends = []
        for at, request in enumerate(requests):
            for cache_span in layout(request):
                if cache_span.storable:
                    ends.append((at, self._store(root_name(request, cache_span), cache_span.tokens)))
        for at, end in reversed(ends):
            for node in end.path():
                self._users.setdefault(node, []).append(at)

    def _store(self, root: bytes, tokens: TokenString) -> Node:
        if root not in self._roots:
            self._roots[root] = self._tree.new_root()
        stop = len(tokens) // self._block_size * self._block_size
        return self._tree.extend(self._roots[root], tokens, stop, 0)

    def admitted(self, request: Request) -> None:
        """A request has been admitted; what it finds is used now, and no later use."""
        assert request.id in self._number, "a clairvoyant is given all requests of its run"
        number = self._number[request.id]
        self.past += not self._admitted[number]
        self._admitted[number] = True

    def root(self, name: bytes) -> Place | None:
        """The start of the paths under a root; None where no request has it."""
        node = self._roots.get(name)
        return None if node is None else Place(node, 0)

    def next_use(self, place: Place | None) -> int:
        """The number of the next request that uses the tokens before a place; `NEVER` without one."""
        if place is None:
            return NEVER
        users = self._users.get(place.node, [])
        while users and self._admitted[users[-1]]:
            users.pop()
        return users[-1] if users else NEVER

    def above(self, place: Place | None, depth: int) -> Place | None:
        """The place at a lesser depth of the same path."""
        if place is None:
            return None
        node = place.node
        while node.start >= depth:
            assert node.parent is not None, "the root starts at zero"
            node = node.parent
        return Place(node, depth)

    def below(self, place: Place, edge: TokenString) -> list[Place]:
        """Places at which requests to come part along an edge, then the deepest one; none where no request takes it."""
        found, (node, depth), start = list[Place](), place, place.depth
        while depth - start < len(edge):
            if depth == node.depth:
                child = node.children.get(edge.key(depth - start, self._block_size))
                if child is None:
                    break
                node = child
            rest = node.edge.cut(depth - node.start, len(node.edge))
            common = edge.common(depth - start, rest) // self._block_size * self._block_size
            if not common:
                break
            depth += common
            found.append(Place(node, depth))
            if depth < node.depth:
                break
        return found
