"""A forest of token prefixes: finds the longest stored prefix of a prompt.

An edge is used and evicted in one of two ways. With `block_size` alone, it is used and evicted as a
whole (radix). With `fixed_blocks`, its blocks are used and evicted one by one, as in a table of
blocks by hash chain. An edge then is a run of blocks that were stored and used together, so that a
long prompt costs as much as a short one.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import groupby
from operator import attrgetter
from typing import Generic, NamedTuple, Protocol, TypeVar

from spanlab.core.request import Request
from spanlab.core.token_string import EMPTY, TokenKey, TokenString, string_of

# ------------------------------------------------------------------------------
# The cache spans of a prompt: the key of each stored entry, and the context in which its KV is
# computed.
#
# A prefix cache has one cache span, the whole prompt. Position-independent caching has one for
# every independent span and one for every run of ordered text between them. The KV of a cache
# span is a function of its tokens and of the context that they attend to. The digest of this
# context is the *parent hash*. Cache spans with equal tokens and equal parent hashes are the
# same entry; entries with different parent hashes are never shared. So a document is reused
# wherever it stands, and the text behind it is not shared with another prompt.
# ------------------------------------------------------------------------------


class CacheSpan(NamedTuple):
    """Prompt tokens `[start, stop)`, stored as one entry.

    `independent`  a span that the workload marks as independent of the text before it; else ordered
                   text
    `tokens`       their ids
    `parent_hash`  digest of the context that their KV depends on; empty without such a context
    `context`      number of tokens from the prompt's beginning that they attend to; `start`: all
                   tokens before them
    `exact`        the entry under this key equals what computing it here, in full view of the
                   prompt, would give
    `storable`     False where their KV depends on more than tokens, so that it must not be matched
    """

    start: int
    stop: int
    independent: bool
    tokens: TokenString
    parent_hash: bytes
    context: int
    exact: bool = True
    storable: bool = True


Layout = Callable[[Request], tuple[CacheSpan, ...]]


class TokenRun(NamedTuple):
    """An independent span, or all ordered text up to the next one."""

    start: int
    stop: int
    independent: bool
    tokens: TokenString


def token_runs(request: Request) -> list[TokenRun]:
    """Return the prompt's independent spans and the runs of ordered text between them, without
    empty ones.

    The last token is always ordered text: the output starts from it, so it must attend to the whole
    prompt.
    """
    runs: list[TokenRun] = []
    position = 0
    spans = [span for span in request.spans if len(span.ids)]
    for independent, group in groupby(spans, key=attrgetter("independent")):
        arrays = [span.ids for span in group]
        for together in [[ids] for ids in arrays] if independent else [arrays]:
            start, position = position, position + sum([len(ids) for ids in together])
            runs.append(TokenRun(start, position, independent, string_of(together)))
    if runs and runs[-1].independent:
        start, stop, _, tokens = runs.pop()
        begin, last = stop - 1, tokens.cut(len(tokens) - 1, len(tokens))
        if start < begin:
            runs.append(TokenRun(start, begin, True, tokens.cut(0, len(tokens) - 1)))
        elif runs and not runs[-1].independent:
            begin, last = runs[-1].start, runs.pop().tokens + last
        runs.append(TokenRun(begin, stop, False, last))
    return runs


def whole(request: Request) -> tuple[CacheSpan, ...]:
    """Return one cache span for the whole prompt: prefix caching."""
    tokens = request.string
    return (CacheSpan(0, len(tokens), False, tokens, b"", 0),)


def isolated(request: Request) -> tuple[CacheSpan, ...]:
    """Compute independent spans alone, each like a prompt; ordered text attends to all tokens
    before it."""
    return _cut_prompt(request, b"", 0)


def conditioned(request: Request) -> tuple[CacheSpan, ...]:
    """Let independent spans attend to the prompt's opening text, not to each other (APE, arXiv
    2502.05431)."""
    head = next(iter(token_runs(request)), None)
    if head is None or head.independent:
        return isolated(request)
    return _cut_prompt(request, blake2b(head.tokens.tobytes(), digest_size=16).digest(), head.stop)


def _cut_prompt(request: Request, parent_hash: bytes, context: int) -> tuple[CacheSpan, ...]:
    """Return cache spans; independent ones have the hash `parent_hash` and attend to `context`
    tokens.

    The parent hash of ordered text covers all text before it and its span boundaries: with other
    boundaries, the same tokens have other KV.
    """
    cache_spans, before = [], blake2b(parent_hash, digest_size=16)
    for start, stop, independent, tokens in token_runs(request):
        if independent:
            cache_spans.append(
                CacheSpan(start, stop, True, tokens, parent_hash, context, exact=start == context)
            )
        else:
            cache_spans.append(
                CacheSpan(start, stop, False, tokens, before.digest() if start else b"", start)
            )
        before.update(b"%d,%d:" % (independent, stop - start))
        before.update(tokens.tobytes())
    return tuple(cache_spans)


def composable(request: Request) -> tuple[CacheSpan, ...]:
    """As `isolated`, for models with recurrent layers: a span stores a map of the state, text
    stores states.

    Spans have a separate parent hash, so that a document that begins a prompt as ordered text is
    another entry.
    """
    return _cut_prompt(request, b"span", 0)


def as_seen(request: Request) -> tuple[CacheSpan, ...]:
    """Store independent spans as first computed, behind the text of their first prompt (LMCache's
    chunks).

    They have a separate parent hash, so that no other layout matches them. Text behind such a span
    depends on a donor that no token identifies, and is not stored. It has a separate parent hash
    too; otherwise it would match a document of the same tokens.
    """
    cache_spans: list[CacheSpan] = []
    for start, stop, independent, tokens in token_runs(request):
        parent_hash = b"as seen" if independent else b"behind" if start else b""
        storable = independent or not start
        cache_spans.append(
            CacheSpan(
                start, stop, independent, tokens, parent_hash, start, not independent, storable
            )
        )
    return tuple(cache_spans)


def repeats(cache_spans: tuple[CacheSpan, ...]) -> dict[int, int]:
    """Map the index of each repeated span to that of the first equal span of the prompt.

    Spans are equal in tokens and parent hash. Only spans whose KV follows from both are included:
    an `as_seen` span has other KV at another position.
    """
    first_index: dict[tuple[bytes, TokenString], int] = {}
    duplicates = {}
    for index, cache_span in enumerate(cache_spans):
        alone = cache_span.exact or cache_span.context < cache_span.start
        if cache_span.independent and cache_span.storable and alone:
            earlier = first_index.setdefault((cache_span.parent_hash, cache_span.tokens), index)
            if earlier != index:
                duplicates[index] = earlier
    return duplicates


def without_tails(layout: Layout) -> Layout:
    """Return the same layout without storing text behind a span, for repairs that no parent hash
    identifies.

    Such text has attended to rows that another request, with the same parent hash, would have
    computed elsewhere.
    """

    def cut(request: Request) -> tuple[CacheSpan, ...]:
        cache_spans = layout(request)
        first = next(
            (index for index, cache_span in enumerate(cache_spans) if cache_span.independent),
            len(cache_spans),
        )
        behind = (
            cache_span if cache_span.independent else cache_span._replace(storable=False)
            for cache_span in cache_spans[first:]
        )
        return (*cache_spans[:first], *behind)

    return cut


LAYOUTS: dict[str, Layout] = {
    "whole": whole,
    "isolated": isolated,
    "conditioned": conditioned,
    "as_seen": as_seen,
}


class State:
    """A stored recurrent state: the state of all layers after the first `position` tokens of its
    node's path.

    In the tree of an independent span it is a map of states instead. `node` is None once it is
    removed from the store.
    """

    __slots__ = (
        "created",
        "in_heap",
        "locks",
        "node",
        "num_bytes",
        "position",
        "serial",
        "used",
        "uses",
    )

    def __init__(self, position: int, node: Node, serial: int, now: int, num_bytes: int) -> None:
        self.position, self.serial, self.num_bytes = position, serial, num_bytes
        self.node: Node | None = node
        self.created = self.used = now
        self.locks = self.uses = 0
        self.in_heap = False


def position_of(state: State) -> int:
    """Return the sort key of a state."""
    return state.position


class Node:
    """Tokens `[start, depth)` of a prefix, and the recurrent states at positions in `(start,
    depth]`.

    `key`     its first block, its key among its parent's children
    `states`  by position, increasing
    `lost`    positions whose state was stored once and has been removed, increasing
    `locks`   users of this node and of everything below it, so a locked node's ancestors are locked
              too
    """

    __slots__ = (
        "children",
        "created",
        "depth",
        "edge",
        "in_heap",
        "key",
        "locks",
        "lost",
        "parent",
        "serial",
        "start",
        "states",
        "used",
        "uses",
    )

    def __init__(
        self,
        key: TokenKey,
        edge: TokenString,
        start: int,
        depth: int,
        parent: Node | None,
        serial: int,
        now: int,
    ) -> None:
        self.key, self.edge, self.start, self.depth = key, edge, start, depth
        self.parent, self.serial = parent, serial
        self.children: dict[TokenKey, Node] = {}
        self.states: list[State] = []
        self.lost: list[int] = []
        self.created = self.used = now
        self.locks = self.uses = 0
        self.in_heap = False

    @property
    def root_name(self) -> bytes:
        """The name of a root, which is its key."""
        assert isinstance(self.key, bytes) and self.parent is None, "only roots have names"
        return self.key

    def path(self) -> Iterator[Node]:
        """This node and its ancestors below the root, deepest first."""
        node: Node | None = self
        while node is not None and node.parent is not None:
            yield node
            node = node.parent

    def deepest_state(self, limit: int) -> State | None:
        """Return the deepest state of this path at a position up to `limit`; None where there is
        none."""
        node: Node | None = self
        while node is not None:
            if node.states:
                within = bisect_right(node.states, limit, key=position_of)
                if within:
                    return node.states[within - 1]
            node = node.parent
        return None

    def deepest_loss(self, above: int, limit: int) -> int:
        """Return the deepest position of this path in (above, limit] whose state was removed, else
        `above`."""
        node: Node | None = self
        while node is not None and node.depth > above:
            within = bisect_right(node.lost, limit)
            if within:
                return max(above, node.lost[within - 1])
            node = node.parent
        return above


def unlocked_tokens(paths: Sequence[tuple[Node, int]]) -> int:
    """Return the number of unlocked tokens on the paths of nodes, each up to a depth.

    Paths may overlap, as where a prompt contains one document twice; shared tokens count once.
    """
    if len(paths) == 1:
        node, depth = paths[0]
        tokens = 0
        while node.parent is not None:
            if node.locks == 0 and node.start < depth:
                tokens += min(node.depth, depth) - node.start
            node = node.parent
        return tokens
    reach: dict[Node, int] = {}
    for end, depth in paths:
        for node in end.path():
            if node.locks == 0 and node.start < depth:
                reach[node] = max(reach.get(node, 0), min(node.depth, depth))
    return sum(stop - node.start for node, stop in reach.items())


class Watcher(Protocol):
    """An observer that keeps data for each node, such as device memory, and must follow changes of
    the tree."""

    def split(self, upper: Node, lower: Node) -> None:
        """Note that `upper` has just been split off the top of `lower`."""
        ...

    def removed(self, node: Node) -> None:
        """Note that `node` has been removed from the tree."""
        ...


class PrefixTree:
    """Finds and extends prefixes at block granularity, independently of bytes, budgets and
    eviction.

    It counts `num_tokens`, and `num_leaves`, the stored prefixes that no other one extends.

    `block_size`    tokens per block, the unit of matching: lengths returned are multiples of it.
    `fixed_blocks`  every block has its own age, so use and eviction go block by block too.
    """

    def __init__(self, block_size: int = 1, fixed_blocks: bool = False) -> None:
        self.block_size, self.fixed_blocks = block_size, fixed_blocks
        self._serial = 0
        self.num_tokens = self.num_leaves = 0
        self.watchers: list[Watcher] = []

    def new_root(self, name: bytes = b"") -> Node:
        """Return a new root with the key `name`; prefixes under different roots are never
        shared."""
        return Node(name, EMPTY, 0, 0, None, 0, 0)

    def match(self, start: Node, tokens: TokenString) -> tuple[Node, int]:
        """Return the deepest node that `tokens` reach from `start`, and the matched length in
        tokens.

        `tokens` contain those of `start`. The length is less than the node's depth when the match
        ends inside its edge. Changes nothing.
        """
        node, depth, block_size = start, start.depth, self.block_size
        last = len(tokens) - block_size  # behind it, no whole block begins
        while True:
            child = node.children.get(tokens.key(depth, block_size)) if depth <= last else None
            if child is None:
                return node, depth
            length = child.depth - depth
            if length > block_size:  # else the key has all tokens of the edge
                common = tokens.common(depth, child.edge)
                if common < length:
                    return child, depth + common // block_size * block_size
            node, depth = child, child.depth

    def extend(self, node: Node, tokens: TokenString, stop: int, now: int) -> Node:
        """Ensure that a node ends at `stop` below `node`, along `tokens`, and return it.

        `stop` is a multiple of the block size and lies within `tokens`.
        """
        block_size = self.block_size
        while node.depth < stop:
            depth = node.depth
            child = node.children.get(key := tokens.key(depth, block_size))
            if child is None:
                node = self._add_child(node, key, tokens.cut(depth, stop), now)
                continue
            length = child.depth - depth
            if length > block_size:  # else the key has all tokens of the edge
                common = min(tokens.common(depth, child.edge), stop - depth)
                if common < length:
                    lower = child
                    child = self.split(lower, depth + common // block_size * block_size)
                    if not self.fixed_blocks:
                        lower.used = child.used = now
            node = child
        return node

    def _add_child(self, parent: Node, key: TokenKey, edge: TokenString, now: int) -> Node:
        length = len(edge)
        self._serial += self._serials(length)
        child = Node(key, edge, parent.depth, parent.depth + length, parent, self._serial, now)
        if parent.children or parent.parent is None:
            self.num_leaves += 1
        self.num_tokens += length
        parent.children[key] = child
        return child

    def split(self, node: Node, depth: int) -> Node:
        """Split a node's edge at `depth`, strictly inside it; returns the new upper part.

        The lower part keeps its identity and its depth; states stay at their positions, in the part
        that contains them.
        """
        parent, edge, offset = node.parent, node.edge, depth - node.start
        assert parent is not None and node.start < depth < node.depth, (
            "a split lies strictly inside an edge"
        )
        # the serial number of an edge's part above `depth`; with fixed blocks, of its last block
        if self.fixed_blocks:
            serial = node.serial - self._serials(node.depth - depth)
        else:
            self._serial += 1
            serial = self._serial
        upper = Node(node.key, edge.cut(0, offset), node.start, depth, parent, serial, node.created)
        upper.used, upper.uses, upper.locks = node.used, node.uses, node.locks
        parent.children[upper.key] = upper
        node.key = edge.key(offset, self.block_size)
        node.edge = edge.cut(offset, len(edge))
        node.start = depth
        node.parent = upper
        upper.children[node.key] = node
        # move the states and losses above `depth` to the upper part of a split edge
        if node.states:
            above = bisect_right(node.states, depth, key=position_of)
            upper.states, node.states = node.states[:above], node.states[above:]
            for state in upper.states:
                state.node = upper
        if node.lost:
            above = bisect_right(node.lost, depth)
            upper.lost, node.lost = node.lost[:above], node.lost[above:]
        for watcher in self.watchers:
            watcher.split(upper, node)
        return upper

    def end_at(self, node: Node, depth: int) -> Node:
        """Return the node of a path that ends at `depth`, split off if needed; the path's end if it
        is higher."""
        while node.parent is not None and node.start >= depth:
            node = node.parent
        return self.split(node, depth) if node.depth > depth else node

    def unit_start(self, node: Node, position: int) -> int:
        """Return where the unit of eviction that contains a position begins: its block, or the
        whole edge."""
        return (
            (position - 1) // self.block_size * self.block_size if self.fixed_blocks else node.start
        )

    def _serials(self, tokens: int) -> int:
        """Return how many serial numbers a new edge takes: one per block with fixed blocks, else
        one."""
        return tokens // self.block_size if self.fixed_blocks else 1

    def remove(self, node: Node) -> Node:
        """Remove a childless node; returns its parent."""
        parent = node.parent
        assert parent is not None and not node.children, "only leaves are removed"
        del parent.children[node.key]
        node.parent = None
        if parent.children or parent.parent is None:
            self.num_leaves -= 1
        self.num_tokens -= node.depth - node.start
        for watcher in self.watchers:
            watcher.removed(node)
        return parent


def take_apart(root: Node) -> None:
    """Remove all nodes below a root whose tree is no longer used, so that their memory is free at
    once.

    A node and its children refer to each other, which only a collection would find.
    """
    pending = [root]
    while pending:
        node = pending.pop()
        pending.extend(node.children.values())
        node.children.clear()


# ------------------------------------------------------------------------------
# A queue of evictable entries, ordered by rank.
#
# A rank never decreases while its entry is stored. So the heap may hold stale ranks, which are
# corrected at its top.
# ------------------------------------------------------------------------------

Key = tuple[float, ...]


class Ranked(Protocol):
    """An entry of an eviction queue."""

    serial: int
    locks: int
    used: int
    uses: int
    in_heap: bool


T = TypeVar("T", bound=Ranked)


class EvictionQueue(Generic[T]):
    """Evictable entries, lowest rank first; stale ranks are corrected at the top of the heap.

    A rank ends in a serial number, so that no two entries have equal ranks.
    """

    def __init__(self, rank: Callable[[T], Key], may_leave: Callable[[T], bool]) -> None:
        self._rank, self._may_leave = rank, may_leave
        self._heap: list[tuple[Key, T]] = []

    def offer(self, item: T) -> None:
        """Add an entry, unless it is queued already or not evictable."""
        if not item.in_heap and self._may_leave(item):
            self.add([item])

    def add(self, items: Iterable[T]) -> None:
        """Add evictable entries that are not queued."""
        for item in items:
            item.in_heap = True
            heapq.heappush(self._heap, (self._rank(item), item))

    def used(self, items: Iterable[T]) -> None:
        """Do nothing: ranks are recomputed at the top of the heap."""

    def renewed(self, items: Iterable[T]) -> None:
        """Do nothing: ranks are recomputed at the top of the heap."""

    def removed(self, item: T) -> None:
        """Do nothing: removed entries are dropped at the top of the heap."""

    def lowest(self) -> tuple[Key, T] | None:
        """Return (rank, entry) of the lowest rank, which stays queued; None where no entry is
        evictable."""
        heap, rank = self._heap, self._rank
        while heap:
            key, item = heap[0]
            current = rank(item)
            if current != key:
                heapq.heapreplace(heap, (current, item))
            elif self._may_leave(item):
                return heap[0]
            else:
                heapq.heappop(heap)
                item.in_heap = False
        return None


def leaf_may_leave(node: Node) -> bool:
    """Whether a node is in the tree, unlocked and without children."""
    return not (node.children or node.locks or node.parent is None)


def state_may_leave(state: State) -> bool:
    """Whether a state is in the tree and unlocked."""
    return not state.locks and state.node is not None


# ------------------------------------------------------------------------------
# Lookup and storage of prefixes: one root per cache salt and parent hash.
# ------------------------------------------------------------------------------

RootKey = tuple[str, int, bytes]


def root_name(key: RootKey) -> bytes:
    """Return the name of a root; different keys have different names."""
    return repr(key).encode()


class PrefixIndex(Protocol):
    """Finds the stored prefix that a cache span may share, and the root under which it is
    stored."""

    def key(self, request: Request, cache_span: CacheSpan) -> RootKey:
        """Return the key of a cache span; only cache spans with equal keys may share entries."""
        ...

    def find(self, request: Request, cache_span: CacheSpan) -> tuple[Node, int]:
        """Return the node that the longest match ends in, and its length in tokens."""
        ...

    def insertion_root(self, request: Request, cache_span: CacheSpan) -> Node:
        """Return the root under which the entry of this cache span is stored."""
        ...

    def all(self) -> Iterable[Node]: ...


def shared_name(request: Request, cache_span: CacheSpan) -> bytes:
    """Return the name of a cache span's root in a `SharedIndex`."""
    return root_name(_shared_key(request, cache_span))


def _shared_key(request: Request, cache_span: CacheSpan) -> RootKey:
    return request.cache_salt, 0, cache_span.parent_hash


class SharedIndex:
    """One root per salt and parent hash: equal tokens with equal parent hashes share their
    nodes."""

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self._roots: dict[RootKey, Node] = {}

    def key(self, request: Request, cache_span: CacheSpan) -> RootKey:
        return _shared_key(request, cache_span)

    def find(self, request: Request, cache_span: CacheSpan) -> tuple[Node, int]:
        root = self._roots.get(self.key(request, cache_span))
        if root is None:
            return self._tree.new_root(), 0
        return self._tree.match(root, cache_span.tokens) if cache_span.storable else (root, 0)

    def insertion_root(self, request: Request, cache_span: CacheSpan) -> Node:
        key = self.key(request, cache_span)
        if key not in self._roots:
            self._roots[key] = self._tree.new_root(root_name(key))
        return self._roots[key]

    def all(self) -> Iterable[Node]:
        return self._roots.values()
