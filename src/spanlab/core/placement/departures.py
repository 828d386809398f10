"""Departures: positions where a future request diverges from all requests before it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from spanlab.core.cache_spans import CacheSpan, Layout
from spanlab.core.request import Request
from spanlab.core.tree import Node, PrefixTree


@dataclass(frozen=True, slots=True)
class CacheForm:
    """How an arm divides prompts.

    `layout`      cache spans of a prompt
    `root_name`   equal for cache spans that may share
    `unit`        states are at multiples of so many tokens from the cache span's start
    `last_token`  True: the last prompt token may be reused too
    """

    layout: Layout
    root_name: Callable[[Request, CacheSpan], bytes]
    unit: int
    last_token: bool = False


class _Path(NamedTuple):
    """A cache span of a request, from `start` in the prompt to its last node `end`.

    `shared`  length of its longest prefix that an earlier request has, in tokens
    """

    request: int
    start: int
    end: Node
    shared: int


@dataclass
class Departures:
    """For each request of a run, in order of arrival, the longest prefix of an earlier one, in whole units.

    The request can reuse this prefix if an earlier request, which computes it, leaves a state at its end.
    """

    requests: Sequence[Request]
    form: CacheForm
    _number: dict[int, int] = field(init=False)
    _paths: list[list[_Path]] = field(init=False)
    _leaving: dict[Node, dict[int, list[int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._number = {request.id: number for number, request in enumerate(self.requests)}
        tree, roots = PrefixTree(self.form.unit), dict[bytes, Node]()
        self._paths = [self._add(tree, roots, number) for number in range(len(self.requests))]
        for path in (path for paths in self._paths for path in paths if path.shared):
            node = next(node for node in path.end.path() if node.start < path.shared)
            self._leaving.setdefault(node, {}).setdefault(path.shared, []).append(path.request)

    def _add(self, tree: PrefixTree, roots: dict[bytes, Node], number: int) -> list[_Path]:
        """Add a request to the tree; return its cache spans."""
        request, form, paths = self.requests[number], self.form, []
        cache_spans = form.layout(request)
        for cache_span in cache_spans:
            if not cache_span.storable:
                continue
            root = roots.setdefault(form.root_name(request, cache_span), tree.new_root())
            computes_last = cache_span is cache_spans[-1] and not form.last_token
            usable = len(cache_span.tokens) - computes_last
            shared = min(tree.match(root, cache_span.tokens)[1], usable) // form.unit * form.unit
            end = tree.extend(root, cache_span.tokens, len(cache_span.tokens) // form.unit * form.unit, 0)
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
