"""Departures: positions where a future request diverges from all requests before it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from spanlab.core.request import Request
from spanlab.core.reuse_rules import StorageRules
from spanlab.core.tree import Node, PrefixTree


class _Path(NamedTuple):
    """A cache span of a request, from `start` in the prompt to its last node `end`.

    `shared`  length of its longest prefix that an earlier request has, in tokens
    """

    request: int
    start: int
    end: Node
    shared: int


class Departures:
    """For each request of a run, in order of arrival, the longest prefix of an earlier one, in whole units.

    The request can reuse this prefix if an earlier request, which computes it, leaves a state at its end.
    """

    def __init__(self, requests: Sequence[Request], rules: StorageRules) -> None:
        self._rules, self._tree = rules, PrefixTree(rules.unit)
        self._roots: dict[Hashable, Node] = {}
        self._number = {request.id: number for number, request in enumerate(requests)}
        self._paths = [self._add(number, request) for number, request in enumerate(requests)]
        self._leaving: dict[Node, dict[int, list[int]]] = {}
        for path in (path for paths in self._paths for path in paths if path.shared):
            node = next(node for node in path.end.path() if node.start < path.shared)
            self._leaving.setdefault(node, {}).setdefault(path.shared, []).append(path.request)

    def _add(self, number: int, request: Request) -> list[_Path]:
        """Add a request to the tree; return its cache spans."""
        rules, tree, paths = self._rules, self._tree, []
        cache_spans = rules.layout(request)
        for cache_span in cache_spans:
            if not cache_span.storable:
                continue
            root = self._roots.setdefault(rules.key(request, cache_span), tree.new_root())
            computes_last = cache_span is cache_spans[-1] and not rules.last_token
            usable = len(cache_span.tokens) - computes_last
            shared = min(tree.match(root, cache_span.tokens)[1], usable) // rules.unit * rules.unit
            end = tree.extend(root, cache_span.tokens, len(cache_span.tokens) // rules.unit * rules.unit, 0)
            paths.append(_Path(number, cache_span.start, end, shared))
        return paths

    def along(self, request: Request) -> dict[int, int]:
        """Return, by position of a request's prompt, the number of later requests that depart there."""
        assert request.id in self._number, "a clairvoyant placement needs all requests of its run"
        counts: dict[int, int] = {}
        for path in self._paths[self._number[request.id]]:
            for node in path.end.path():
                for depth, users in self._leaving.get(node, {}).items():
                    later = len(users) - bisect_right(users, path.request)
                    if later:
                        counts[path.start + depth] = counts.get(path.start + depth, 0) + later
        return counts
