"""The future of a run: the prefixes of the requests to come, and the next request that uses each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from spanlab.core.cache_spans import CacheSpan, Layout
from spanlab.core.request import Request
from spanlab.core.token_string import TokenString
from spanlab.core.tree import Node, PrefixTree

NEVER = 1 << 62
RootName = Callable[[Request, CacheSpan], bytes]


class FuturePosition(NamedTuple):
    """A position on a path of future requests: within `node`, `depth` tokens from the start of the path."""

    node: Node
    depth: int


class Future:
    """A tree of the prefixes of requests in order of arrival, split wherever two of them diverge.

    An admitted request is no longer in the future. Requests are assumed to be admitted in order of arrival.

    `num_admitted`  number of admitted requests
    """

    def __init__(self, requests: Sequence[Request], layout: Layout, root_name: RootName, block_size: int) -> None:
        self._tree, self._block_size, self.num_admitted = PrefixTree(block_size), block_size, 0
        self._roots: dict[bytes, Node] = {}
        self._admitted = [False] * len(requests)
        self._number = {request.id: index for index, request in enumerate(requests)}
        self._users: dict[Node, list[int]] = {}  # future requests by node, the next one last
        ends = []
        for index, request in enumerate(requests):
            for cache_span in layout(request):
                if cache_span.storable:
                    ends.append((index, self._store(root_name(request, cache_span), cache_span.tokens)))
        for index, end in reversed(ends):
            for node in end.path():
                self._users.setdefault(node, []).append(index)

    def _store(self, root: bytes, tokens: TokenString) -> Node:
        start = self._roots.setdefault(root, self._tree.new_root())
        return self._tree.extend(start, tokens, len(tokens) // self._block_size * self._block_size, 0)

    def admitted(self, request: Request) -> None:
        """Remove an admitted request from the future."""
        assert request.id in self._number, "a clairvoyant order needs all requests of its run"
        number = self._number[request.id]
        self.num_admitted += not self._admitted[number]
        self._admitted[number] = True

    def root(self, name: bytes) -> FuturePosition | None:
        """The start of the paths under a root; None where no request has this root."""
        node = self._roots.get(name)
        return None if node is None else FuturePosition(node, 0)

    def next_use(self, position: FuturePosition | None) -> int:
        """The index of the next request that uses the prefix up to a position; `NEVER` without one."""
        if position is None:
            return NEVER
        users = self._users.get(position.node, [])
        while users and self._admitted[users[-1]]:
            users.pop()
        return users[-1] if users else NEVER

    def ancestor_at(self, position: FuturePosition | None, depth: int) -> FuturePosition | None:
        """The position at a smaller depth of the same path."""
        if position is None:
            return None
        node = position.node
        while node.start >= depth:
            assert node.parent is not None, "the root starts at zero"
            node = node.parent
        return FuturePosition(node, depth)

    def branch_points(self, position: FuturePosition, edge: TokenString) -> list[FuturePosition]:
        """Positions along an edge where future requests diverge, then the deepest match; empty where none matches."""
        points, (node, depth), start = list[FuturePosition](), position, position.depth
        while depth - start < len(edge):
            if depth == node.depth:
                child = node.children.get(edge.key(depth - start, self._block_size))
                if child is None:
                    break
                node = child
            remainder = node.edge.cut(depth - node.start, len(node.edge))
            common = edge.common(depth - start, remainder) // self._block_size * self._block_size
            if not common:
                break
            depth += common
            points.append(FuturePosition(node, depth))
            if depth < node.depth:
                break
        return points
