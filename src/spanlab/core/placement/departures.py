"""Where requests to come will leave what was asked for before them."""

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
    """How an arm cuts prompts.

    `layout`      cache spans of a prompt
    `root_name`   equal for cache spans that may share
    `unit`        tokens of which states stand at multiples, from the cache span's start
    `last_token`  True: the last prompt token may be reused too
    """

    layout: Layout
    root_name: Callable[[Request, CacheSpan], bytes]
    unit: int
    last_token: bool = False


class _Path(NamedTuple):
    """A cache span of a request: the node that it ends in, and what earlier requests have of it."""

    request: int
    start: int
    end: Node
    known: int


@dataclass
class Departures:
    """For every request of a run, in order of arrival: the longest prefix that an earlier one has, in whole units.

    A state at its end, which some earlier request computes, is all that the request needs to reuse it.
    """

    requests: Sequence[Request]
    form: CacheForm
    _number: dict[int, int] = field(init=False)
    _paths: list[list[_Path]] = field(init=False)
    _leaving: dict[Node, dict[int, list[int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._number = {request.id: at for at, request in enumerate(self.requests)}
        tree, roots = PrefixTree(self.form.unit), dict[bytes, Node]()
        self._paths = [self._grow(tree, roots, at) for at in range(len(self.requests))]
        for path in (path for paths in self._paths for path in paths if path.known):
            node = next(node for node in path.end.path() if node.start < path.known)
            self._leaving.setdefault(node, {}).setdefault(path.known, []).append(path.request)

    def _grow(self, tree: PrefixTree, roots: dict[bytes, Node], at: int) -> list[_Path]:
        """Add a request to the tree."""
        request, form, found = self.requests[at], self.form, []
        cache_spans = form.layout(request)
        for cache_span in cache_spans:
            if not cache_span.storable:
                continue
            root = roots.setdefault(form.root_name(request, cache_span), tree.new_root())
            computed = cache_span is cache_spans[-1] and not form.last_token
            usable = len(cache_span.tokens) - computed
            known = min(tree.match(root, cache_span.tokens)[1], usable) // form.unit * form.unit
            end = tree.extend(root, cache_span.tokens, len(cache_span.tokens) // form.unit * form.unit, 0)
            found.append(_Path(at, cache_span.start, end, known))
        return found

    def along(self, request: Request) -> dict[int, int]:
        """How many requests to come leave a request's prompt at each of its positions, as far as known before them."""
        assert request.id in self._number, "a clairvoyant is given all requests of its run"
        found: dict[int, int] = {}
        for path in self._paths[self._number[request.id]]:
            for node in path.end.path():
                for depth, users in self._leaving.get(node, {}).items():
                    later = len(users) - bisect_right(users, path.request)
                    if later:
                        found[path.start + depth] = found.get(path.start + depth, 0) + later
        return found
