"""The shared prefixes of a set of prompts, as a compressed forest of units.

A unit is the smallest run of tokens that a cache stores and matches: a block, or for models with
recurrent layers a multiple of the kernel grid. Consecutive units with the same users form one node.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spanlab.core.request import Request
from spanlab.core.rules import StorageRules
from spanlab.core.token_string import TokenString, string_of
from spanlab.core.tree import CacheSpan, Node, PrefixTree, take_apart, token_runs, whole

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Forest:
    """Paths of all prompts through the nodes; prompt i owns paths `prompt_paths[i:i + 2]`.

    `lengths`       tokens of each node, shape (V,)
    `path_nodes`    nodes of all paths, from each cache span's start down, shape (P,)
    `path_starts`   path p is `path_nodes[path_starts[p]:path_starts[p + 1]]`
    `path_usable`   number of leading nodes of each path that the prompt may reuse
    `path_prompt`   number of leading nodes of each path in the prompt; the others are in its output
    `prompt_paths`  half-open ranges of paths, shape (prompts + 1,)
    `unit`          tokens per unit; every length is a multiple of it
    """

    lengths: Ints
    path_nodes: Ints
    path_starts: Ints
    path_usable: Ints
    path_prompt: Ints
    prompt_paths: Ints
    unit: int


def build_forest(prompts: Iterable[Request], rules: StorageRules) -> Forest:
    """Return the forest of these prompts in order; equal prompts have equal paths."""
    builder = _Builder(rules, PrefixTree(rules.unit))
    counts = [0, *(builder.add(prompt) for prompt in prompts)]
    forest = builder.forest(np.cumsum(counts))
    for root in builder.roots.values():
        take_apart(root)
    return forest


@dataclass
class _Path:
    end: Node
    limit: int  # tokens that may be reused
    prompt: int  # tokens of the prompt, in whole units


@dataclass
class _Builder:
    rules: StorageRules
    tree: PrefixTree
    roots: dict[Hashable, Node] = field(default_factory=dict)
    paths: list[_Path] = field(default_factory=list)

    def add(self, prompt: Request) -> int:
        """Add a prompt's paths; return their number."""
        cache_spans = self.rules.layout(prompt)
        before = len(self.paths)
        for cache_span in cache_spans:
            if not cache_span.storable:
                continue
            last = cache_span is cache_spans[-1]
            length, unit = cache_span.stop - cache_span.start, self.rules.unit
            key = self.rules.key(prompt, cache_span)
            if key not in self.roots:
                self.roots[key] = self.tree.new_root()
            usable = length - 1 if last and not self.rules.last_token else length
            limit = usable // unit * unit
            tokens = cache_span.tokens
            if last and self.rules.outputs and prompt.output is not None:
                tokens += string_of([prompt.output])
            node = self.roots[key]
            stops = limit, length // unit * unit, len(tokens) // unit * unit
            for stop in stops:
                node = self.tree.extend(node, tokens, stop, 0)
            self.paths.append(_Path(node, *stops[:2]))
        return len(self.paths) - before

    def forest(self, prompt_paths: Ints) -> Forest:
        """Number the nodes after the last split, and return the forest."""
        paths = paths_to(path.end for path in self.paths)
        owner = np.repeat(np.arange(len(self.paths)), np.diff(paths.starts))
        depth = paths.depth[paths.nodes]
        limits = np.array([(path.limit, path.prompt) for path in self.paths], np.int64).reshape(
            -1, 2
        )
        usable, of_prompt = (
            np.bincount(owner, depth <= limit[owner], len(limit)).astype(np.int64)
            for limit in limits.T
        )
        return Forest(
            lengths=paths.depth - paths.above,
            path_nodes=paths.nodes,
            path_starts=paths.starts,
            path_usable=usable,
            path_prompt=of_prompt,
            prompt_paths=prompt_paths.astype(np.int64),
            unit=self.rules.unit,
        )


class TreePaths(NamedTuple):
    """Path p visits `nodes[starts[p]:starts[p + 1]]`, from below a root down; nodes have numbers by
    their first visit.

    `first`           the first visit of each node, shape (nodes,)
    `above`, `depth`  half-open range of each node below its root, shape (nodes,)
    """

    nodes: Ints
    starts: Ints
    first: Ints
    above: Ints
    depth: Ints


def paths_to(ends: Iterable[Node]) -> TreePaths:
    """Return the paths to these nodes of a tree that no longer changes."""
    nodes, starts = array("q"), [0]
    # by node in order of number: where `nodes` holds the path to it
    places: dict[Node, tuple[int, int]] = {}
    for node in ends:
        further, begin = list[Node](), len(nodes)
        while node.parent is not None and node not in places:
            further.append(node)
            node = node.parent
        if node.parent is not None:
            start, stop = places[node]
            nodes += nodes[start:stop]
        for new in reversed(further):
            nodes.append(len(places))
            places[new] = begin, len(nodes)
        starts.append(len(nodes))
    first = np.array([stop for _, stop in places.values()], np.int64) - 1
    above, depth = (
        np.array([getattr(node, name) for node in places], np.int64) for name in ("start", "depth")
    )
    return TreePaths(np.array(nodes, np.int64), np.array(starts, np.int64), first, above, depth)


# ------------------------------------------------------------------------------
# The reuses that the order of one run allows, and the slots in which each occupies memory.
#
# A *slot* is an admission: slot s lies between the first admission of request s and that of
# request s + 1, at the moment when all of prompt s is in memory. Requests are numbered by first
# admission.
# ------------------------------------------------------------------------------

Flags = NDArray[np.bool_]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ServiceOrder:
    """The order of first admissions.

    `prompts`      prompt of the forest of each request, in order of admission, shape (n,)
    `stored_until` last slot in which the request may still store tokens of its prompt, at least its
    own slot
    `finished`     last slot before the request finishes, in which it stores its output
    `counted`      requests whose reuse counts; others only fill the cache
    `reserved`     whether a request has memory for its whole prompt as soon as it is admitted
    """

    prompts: Ints
    stored_until: Ints
    finished: Ints
    counted: Flags
    reserved: bool = True


@dataclass(frozen=True)
class Admissions:
    """Requests of one run by first admission: times in one unit, shape (n,).

    `prompts`    prompt of the forest of each request
    `preempted`  requests that were preempted at least once
    `counted`    requests whose reuse counts
    """

    prompts: Ints
    admitted: Floats
    finished: Floats
    preempted: Flags
    counted: Flags


def service_order(run: Admissions, reserved: bool = True) -> ServiceOrder:
    """Return the service order of these admissions.

    A request with a reserved prompt stores it at once, unless it is preempted and computes its
    prompt again; any other request may store until it has finished.
    """
    own_slot = np.arange(len(run.prompts))
    last_slot = np.maximum(np.searchsorted(run.admitted, run.finished, side="left") - 1, own_slot)
    stored_until = np.where(run.preempted | (not reserved), last_slot, own_slot)
    return ServiceOrder(run.prompts, stored_until, last_slot, run.counted, reserved)


@dataclass(frozen=True)
class Reuses:
    """One row per node of each path that its request may reuse, in order of admission and depth.

    `first`, `stop`  half-open range of slots in which the node must stay in memory; it may be empty
    `tokens`         tokens of the node
    `depth`          tokens of the path up to the end of the node
    `path`           number of the path, increasing; a path's rows are in order of depth
    `prompt_tokens`  of each slot's request, in whole units and each unit once, shape (n,);
                     zero where prompts are not reserved
    `running`        1 where the slot's request is known to be in memory, else 0, shape (n,)
    `unit`           tokens per unit
    """

    first: Ints
    stop: Ints
    tokens: Ints
    depth: Ints
    path: Ints
    prompt_tokens: Ints
    running: Ints
    unit: int

    @property
    def slots(self) -> int:
        """Number of slots."""
        return len(self.prompt_tokens)

    @property
    def infinite_tokens(self) -> int:
        """Tokens that a cache of unlimited memory reuses."""
        return int(self.tokens.sum())


def find_reuses(forest: Forest, order: ServiceOrder) -> Reuses:
    """Return every reuse of units that an earlier admission had.

    A unit that occurs twice in one prompt is reusable at its second position, without memory.
    """
    paths, request = _gather(forest.prompt_paths, order.prompts)
    rows, path = _gather(forest.path_starts, paths)
    index = rows - forest.path_starts[paths[path]]
    node = forest.path_nodes[rows]
    depth = np.cumsum(forest.lengths[node])
    above = np.concatenate([[0], depth])[np.searchsorted(path, path, side="left")]
    usable, prompt = (
        index < limit[paths[path]] for limit in (forest.path_usable, forest.path_prompt)
    )
    visits = _Visits(node, request[path], path, depth - above, usable, prompt)
    until = np.where(visits.prompt, order.stored_until[visits.slot], order.finished[visits.slot])
    ready = _last_stored(visits, until, len(order.prompts))
    own_tokens = forest.lengths[visits.node] * visits.prompt * ~visits.need_no_memory(ready)
    running = np.full(len(order.prompts), int(order.reserved))
    prompt_tokens = np.bincount(visits.slot, own_tokens, len(running)).astype(np.int64) * running
    reusable = (ready >= 0) & visits.usable & order.counted[visits.slot]
    slot, tokens = visits.slot[reusable], forest.lengths[visits.node[reusable]]
    return Reuses(
        first=np.minimum(ready[reusable] + 1, slot),
        stop=slot,
        tokens=tokens,
        depth=visits.depth[reusable],
        path=visits.path[reusable],
        prompt_tokens=prompt_tokens,
        running=running,
        unit=forest.unit,
    )


@dataclass(frozen=True)
class _Visits:
    """Nodes of all requests' paths, in order of admission.

    `usable`  whether the request may reuse the node; `prompt`  whether it is in the prompt, not in the output
    """

    node: Ints
    slot: Ints
    path: Ints
    depth: Ints
    usable: Flags
    prompt: Flags

    def need_no_memory(self, ready: Ints) -> Flags:
        """Return the visits of nodes that this request, or an earlier running one, holds in any
        case."""
        return ready >= self.slot


def _gather(starts: Ints, chosen: Ints) -> tuple[Ints, Ints]:
    """Return the members of the chosen half-open ranges, and the index in `chosen` of each member's
    range."""
    sizes = starts[chosen + 1] - starts[chosen]
    owner = np.repeat(np.arange(len(chosen)), sizes)
    within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return starts[chosen][owner] + within, owner


def _last_stored(visits: _Visits, until: Ints, slots: int) -> Ints:
    """Return the last slot in which an earlier visit of the same node may have stored it; -1
    without one.

    `until`  last slot in which each visit may store its node
    """
    by_node = np.argsort(visits.node, kind="stable")
    node = visits.node[by_node]
    base = np.cumsum(np.concatenate([[0], node[1:] != node[:-1]])) * (slots + 1)
    latest = np.maximum.accumulate(base + until[by_node])
    ready = np.full(len(node), -1, np.int64)
    same = node[1:] == node[:-1]
    ready[by_node[1:][same]] = (latest[:-1] - base[1:])[same]
    return ready


# ------------------------------------------------------------------------------
# Storage rules of caches with unlimited memory: reuse of equal prefixes, or of equal spans at
# any position.
# ------------------------------------------------------------------------------


def prefix_rules(last_token: bool = False, outputs: bool = False) -> StorageRules:
    """Return rules for reuse of any prefix of an earlier prompt with the same salt, token by
    token."""
    return StorageRules(whole, salted_parent, 1, last_token, outputs)


def any_position_rules(last_token: bool = False, outputs: bool = False) -> StorageRules:
    """Return rules for reuse of independent spans at any position, and of ordered text by parent
    hash."""
    return StorageRules(_Anywhere(), salted_parent, 1, last_token, outputs)


def salted_parent(request: Request, cache_span: CacheSpan) -> Hashable:
    """Return the key of a cache span: spans with equal salts and parent hashes share."""
    return request.cache_salt, cache_span.parent_hash


@dataclass
class _Anywhere:
    """The cache spans of `isolated`, with numbers in place of parent hashes, which is faster."""

    parents: dict[tuple[int, bool, TokenString], int] = field(default_factory=dict)

    def __call__(self, request: Request) -> tuple[CacheSpan, ...]:
        cache_spans, parent = [], 0
        for start, stop, independent, tokens in token_runs(request):
            name = b"" if independent or not start else b"%d" % parent
            cache_spans.append(CacheSpan(start, stop, independent, tokens, name, start))
            parent = self.parents.setdefault((parent, independent, tokens), len(self.parents) + 1)
        return tuple(cache_spans)
