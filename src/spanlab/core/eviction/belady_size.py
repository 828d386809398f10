"""Belady-Size: evict first the entry that occupies the most memory until its next use.

Belady-Size in Berger et al., "Practical Bounds on Optimal Caching with Variable Object Sizes", POMACS 2 (2018): a
heuristic for entries of several sizes, where the best choice is NP-hard. Where the saving of an entry grows with its
bytes, as for the KV of tokens, `belady` loses less.
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
        """The rank (negative next use, depth, serial), its first element replaced by -(bytes × requests until that)."""

        def sized_rank(entry: T) -> Key:
            negative_use, *ties = rank(entry)
            return (paths.future.num_admitted + negative_use) * kind.num_bytes(entry), *ties

        return sized_rank

    leaves = Belady(facts.leaves, by_size(facts.leaves, paths.rank_of_node), paths.follow)
    return EvictionOrder(facts.watched(leaves), Belady(facts.states, by_size(facts.states, paths.rank_of_state)))
