"""Marconi's score with an alpha that is chosen by replaying the first requests.

As in the paper (arXiv 2411.19379), alpha is 0 until the n-th request needs the first eviction. When 5 · n requests have
been admitted, they are replayed under each alpha, and the alpha that saves most FLOPs is used from then on. Nothing was
evicted before the n-th request, so the replay starts from an empty cache. It serves whole prompts one after another and
stores KV; the score of states uses the same alpha.
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
    """As `marconi`; alpha is chosen after `window` times as many requests as preceded the first eviction."""
    if window <= 1:
        raise ValueError(f"eviction_options.window={window}: expected a number above one")
    states = Marconi(facts.states, 0.0)
    leaves = TunedLeaves(facts, states, window)
    return EvictionOrder(facts.watched(leaves), states, admitted=leaves.admitted)


class TunedLeaves(Marconi[Node]):
    """Leaves by Marconi's score; records requests until alpha is chosen."""

    def __init__(self, facts: EvictionFacts, states: Marconi[State], window: float) -> None:
        super().__init__(facts.leaves, 0.0)
        self._facts, self._states, self._window = facts, states, window
        self._requests: list[Request] = []
        self._first_eviction: int | None = None  # requests admitted by then
        self._chosen = False

    def admitted(self, request: Request) -> None:
        """Record a request; after the last one of the window, choose alpha."""
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
    """Return the alpha that saves most FLOPs; the smallest among equals."""
    return max(ALPHAS, key=lambda alpha: (saved_flops(facts, alpha, requests), -alpha))


def saved_flops(facts: EvictionFacts, alpha: float, requests: list[Request]) -> float:
    """Return the FLOPs that a cache like that of `facts` saves under one alpha."""
    replay = Replay(facts, alpha)
    return sum(facts.cost(0, replay.serve(request)) for request in requests)


class Replay:
    """A cache that serves prompts one after another, with the time stamps of a store."""

    def __init__(self, facts: EvictionFacts, alpha: float) -> None:
        self._tree = PrefixTree(facts.tree.block_size, facts.tree.fixed_blocks)
        kind = replace(facts, tree=self._tree).leaves
        self._leaves = Marconi(kind, alpha)
        self._max_tokens = kind.capacity // max(1, facts.token_bytes)
        self._roots: dict[str, Node] = {}
        self._clock = 0

    def serve(self, request: Request) -> int:
        """Reuse the stored prefix of a prompt and store the suffix, if it fits; return the reused tokens."""
        tree, tokens, size = self._tree, request.string, self._tree.block_size
        root = self._roots.setdefault(request.cache_salt, tree.new_root())
        match_node, matched = tree.match(root, tokens)
        reused = tree.extend(root, tokens, min(matched, len(tokens) - 1) // size * size, self._tick())
        self._use(match_node)
        if self._make_room(reused, len(tokens) - reused.depth):
            end = tree.extend(reused, tokens, len(tokens) // size * size, self._tick())
            self._leaves.add([end])
            self._use(end)
        return reused.depth

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _use(self, end: Node) -> None:
        now = self._tick()
        for node in end.path():
            node.used = now

    def _make_room(self, reused: Node, tokens: int) -> bool:
        """Evict leaves outside the reused path until `tokens` more fit; return False where they cannot fit."""
        for node in reused.path():
            node.locks += 1
        victim = self._victim(tokens)
        while victim is not None:
            self._leaves.removed(victim)
            self._leaves.offer(self._tree.remove(victim))
            victim = self._victim(tokens)
        for node in reused.path():
            node.locks -= 1
        self._leaves.offer(reused)
        return self._tree.num_tokens + tokens <= self._max_tokens

    def _victim(self, tokens: int) -> Node | None:
        if self._tree.num_tokens + tokens <= self._max_tokens:
            return None
        lowest = self._leaves.lowest()
        return lowest[1] if lowest else None
