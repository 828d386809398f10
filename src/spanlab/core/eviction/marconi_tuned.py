"""Marconi's score with an alpha that a replay of the first requests has chosen.

As in the paper (arXiv 2411.19379), alpha is 0 until the n-th request needs the first eviction. When 5 · n requests have
been admitted, they are served again under each alpha, and the one that saves most FLOPs stays. Nothing was evicted
before the n-th request, so its cache need not be copied. A replay serves whole prompts one after another and stores
KV; states, where there are any, are weighed by the same alpha.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from spanlab.core.cost import COST
from spanlab.core.eviction.contract import EVICTION_ORDERS, REQUESTS, EvictionFacts, EvictionOrder
from spanlab.core.eviction.marconi import Marconi
from spanlab.core.eviction_queue import Key
from spanlab.core.request import Request
from spanlab.core.tree import Node, PrefixTree, State

ALPHAS: tuple[float, ...] = tuple(np.linspace(0.0, 2.0, 21).round(1).tolist())


@EVICTION_ORDERS.register("marconi_tuned", needs=(REQUESTS, COST))
def marconi_tuned(facts: EvictionFacts, window: float = 5.0) -> EvictionOrder:
    """As marconi; alpha is chosen after `window` times as many requests as came before the first eviction."""
    if window <= 1:
        raise ValueError(f"eviction_options.window={window}: expected a number above one")
    states = Marconi(facts.states, 0.0)
    leaves = TunedLeaves(facts, states, window)
    return EvictionOrder(facts.watched(leaves), states, admitted=leaves.admitted)


class TunedLeaves(Marconi[Node]):
    """Leaves by their score; remembers requests until alpha is chosen."""

    def __init__(self, facts: EvictionFacts, states: Marconi[State], window: float) -> None:
        super().__init__(facts.leaves, 0.0)
        self._facts, self._states, self._window = facts, states, window
        self._requests: list[Request] = []
        self._first_eviction: int | None = None  # requests admitted by then
        self._chosen = False

    def admitted(self, request: Request) -> None:
        """Remember a request; after the last one of the window, choose alpha."""
        if self._chosen:
            return
        self._requests.append(request)
        first = self._first_eviction
        if first is not None and len(self._requests) >= self._window * first:
            self._chosen = True
            self.alpha = self._states.alpha = best_alpha(self._facts, self._requests)
            self._requests = []

    def lowest(self) -> tuple[Key, Node] | None:
        if self._first_eviction is None:
            self._first_eviction = len(self._requests)
        return super().lowest()


def best_alpha(facts: EvictionFacts, requests: list[Request]) -> float:
    """The alpha that saves most FLOPs; of equal ones, the least."""
    return max(ALPHAS, key=lambda alpha: (saved(facts, alpha, requests), -alpha))


def saved(facts: EvictionFacts, alpha: float, requests: list[Request]) -> float:
    """FLOPs that a cache like that of `facts` saves under one alpha."""
    replay = Replay(facts, alpha)
    return sum(facts.cost(0, replay.serve(request)) for request in requests)


class Replay:
    """A cache of prompts that are served one after another, with the time stamps of a store."""

    def __init__(self, facts: EvictionFacts, alpha: float) -> None:
        self._tree = PrefixTree(facts.tree.block_size, facts.tree.fixed_blocks)
        kind = replace(facts, tree=self._tree).leaves
        self._leaves = Marconi(kind, alpha)
        self._most = kind.capacity // max(1, facts.token_bytes)
        self._roots: dict[str, Node] = {}
        self._clock = 0

    def serve(self, request: Request) -> int:
        """Read what is found of a prompt and store the rest, if it fits; returns the tokens that it reuses."""
        tree, tokens, size = self._tree, request.string, self._tree.block_size
        root = self._roots.setdefault(request.cache_salt, tree.new_root())
        found, matched = tree.match(root, tokens)
        read = tree.extend(root, tokens, min(matched, len(tokens) - 1) // size * size, self._tick())
        self._use(found)
        if self._make_room(read, len(tokens) - read.depth):
            end = tree.extend(read, tokens, len(tokens) // size * size, self._tick())
            self._leaves.add([end])
            self._use(end)
        return read.depth

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _use(self, end: Node) -> None:
        now = self._tick()
        for node in end.path():
            node.used = now

    def _make_room(self, read: Node, tokens: int) -> bool:
        """Evict leaves beside what is read until so many more tokens fit; False where they never do."""
        for node in read.path():
            node.locks += 1
        victim = self._victim(tokens)
        while victim is not None:
            self._leaves.removed(victim)
            self._leaves.offer(self._tree.remove(victim))
            victim = self._victim(tokens)
        for node in read.path():
            node.locks -= 1
        self._leaves.offer(read)
        return self._tree.num_tokens + tokens <= self._most

    def _victim(self, tokens: int) -> Node | None:
        if self._tree.num_tokens + tokens <= self._most:
            return None
        lowest = self._leaves.lowest()
        return lowest[1] if lowest else None
