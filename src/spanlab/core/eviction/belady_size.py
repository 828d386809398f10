"""A clairvoyant by size: what takes the most memory until its next use leaves first.

Belady-Size in Berger et al., "Practical Bounds on Optimal Caching with Variable Object Sizes", POMACS 2 (2018): a rule
of thumb for entries of several sizes, where the best choice is NP-hard to find. Where what an entry saves grows with
its bytes, as the KV of tokens does, `belady` gives up less.
"""

from __future__ import annotations

from collections.abc import Callable

from spanlab.core.eviction.belady import Belady, future_paths
from spanlab.core.eviction.contract import EVICTION_ORDERS, FUTURE, EvictionFacts, EvictionOrder, Kind, T
from spanlab.core.eviction_queue import Key


@EVICTION_ORDERS.register("belady_size", needs=(FUTURE,))
def belady_size(facts: EvictionFacts) -> EvictionOrder:
    """The entry with the most bytes × requests until its next use, in order of arrival."""
    paths = future_paths(facts, "belady_size")

    def by_size(kind: Kind[T], rank: Callable[[T], Key]) -> Callable[[T], Key]:
        """The rank by the negative next use, depth and serial, with what is held until then in its place."""

        def held(entry: T) -> Key:
            last, *rest = rank(entry)
            return (paths.future.past + last) * kind.num_bytes(entry), *rest

        return held

    leaves = Belady(facts.leaves, by_size(facts.leaves, paths.rank_of_node), paths.follow)
    return EvictionOrder(facts.watched(leaves), Belady(facts.states, by_size(facts.states, paths.rank_of_state)))
