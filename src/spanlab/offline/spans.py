"""Reuse of the contents of a log beyond equal prefixes: at any position, and by reordering."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np
from numpy.typing import NDArray

from spanlab.core.passages import greedy
from spanlab.offline.forest import Ints
from spanlab.offline.paths import Paths, build_paths
from spanlab.offline.reuses import Flags
from spanlab.offline.stack import Distances, stack_distances


@dataclass(frozen=True)
class Contents:
    """Prompts as contents; request r consists of the pieces `starts[r]:starts[r + 1]`.

    `pieces`   int32 numbers of contents, `lengths` their tokens
    `opens`    whether a piece is the first of a span
    `free`     whether a piece is a span that may be reordered among its neighbours
    """

    pieces: NDArray[np.int32]
    lengths: NDArray[np.int32]
    opens: Flags
    free: Flags
    starts: Ints

    def paths(self) -> Paths:
        """Return whole prompts as paths."""
        return build_paths(self.pieces, self.lengths, self.starts)

    def seen_anywhere(self) -> Ints:
        """Return the tokens of each prompt in pieces that occurred before, in an earlier prompt or in the same one."""
        first = np.zeros(len(self.pieces), dtype=np.bool_)
        first[np.unique(self.pieces, return_index=True)[1]] = True
        tokens = np.where(first, 0, self.lengths)
        before = np.concatenate([[0], np.cumsum(tokens, dtype=np.int64)])
        return np.diff(before[self.starts])

    def span_starts(self) -> Ints:
        """Return the start of each span, and the end of the last one."""
        return np.append(np.flatnonzero(self.opens), len(self.pieces)).astype(np.int64)


@dataclass(frozen=True)
class SpanReuse:
    """Spans of all prompts, each stored once and reusable at any position, under LRU.

    `distances`  stack distances of the visits of `paths`, whose requests are spans
    `request`    the request of each span; `leads` marks the first span of a prompt, `ends` the last one
    """

    paths: Paths
    distances: Distances
    request: Ints
    leads: Flags
    ends: Flags

    def reused(self, capacity_tokens: float) -> Ints:
        """Return the reused tokens of each span in a cache of that capacity; a prompt's last token is computed."""
        resident = self.paths.per_request(self.distances.resident_blocks(capacity_tokens))
        return np.minimum(resident, self.paths.prompt_tokens - self.ends)

    def repaired(self, reused: Ints, first: int, share: float) -> Ints:
        """Return the reused tokens less those that a repair computes: the `first` ones and a share of the others.

        A span at the start of a prompt needs no repair.
        """
        repaired = np.minimum(reused, first) + np.floor(share * np.maximum(reused - first, 0)).astype(np.int64)
        return np.where(self.leads, reused, reused - repaired)


def span_reuse(contents: Contents) -> SpanReuse:
    """Return the reuse of spans, each as a separate path."""
    starts = contents.span_starts()
    paths = build_paths(contents.pieces, contents.lengths, starts)
    request = np.searchsorted(contents.starts, starts[:-1], side="right") - 1
    tokens = paths.tokens
    distances = stack_distances(paths, tokens, np.zeros(paths.requests, dtype=np.int64))
    changes = request[1:] != request[:-1]
    leads, ends = np.append(True, changes), np.append(changes, True)
    return SpanReuse(paths, distances, request, leads, ends)


class _ServedTree:
    """A tree of prompts in served order, with the number of prompts through each node."""

    def __init__(self) -> None:
        self._children: dict[tuple[int, int], tuple[int, int]] = {}  # (node, piece) to (child node, count)

    def count(self, node: int, pieces: Sequence[int], last: int) -> int:
        """Return how often `last` has followed `pieces` below a node."""
        for piece in pieces:
            node = self._children[node, piece][0]
        return self._children.get((node, last), (0, 0))[1]

    def follow(self, node: int, piece: int) -> int:
        """Count a piece that follows a node; return its child node."""
        child, count = self._children.get((node, piece), (len(self._children) + 1, 0))
        self._children[node, piece] = child, count + 1
        return child


def in_cached_order(contents: Contents) -> Contents:
    """Return the prompts with free spans reordered, so that each follows the longest path that was served before.

    The algorithm is that of `spanlab.core.passages`. A log does not record what was cached, so the next span is the one
    that has most often followed the spans chosen so far; the others keep their order.
    """
    order = np.arange(len(contents.pieces))
    pieces, starts, free = contents.pieces.tolist(), contents.starts.tolist(), contents.free.tolist()
    served = _ServedTree()
    for first, stop in pairwise(starts):
        order[first:stop] = _served_order(pieces, free, range(first, stop), served)
    return Contents(
        contents.pieces[order], contents.lengths[order], contents.opens[order], contents.free[order], contents.starts
    )


def _served_order(pieces: list[int], free: list[bool], prompt: range, served: _ServedTree) -> list[int]:
    """Return the indices of a prompt's pieces in the order in which they are served."""
    node, order = 0, []
    for moves, run in groupby(prompt, free.__getitem__):
        for index in _reorder(pieces, list(run), node, served) if moves else run:
            node = served.follow(node, pieces[index])
            order.append(index)
    return order


def _reorder(pieces: list[int], run: list[int], node: int, served: _ServedTree) -> list[int]:
    """Return the indices of free spans, those first that most often followed a node."""

    def ranks(chosen: list[int], remaining: list[int]) -> list[int]:
        path = [pieces[index] for index in chosen]
        return [served.count(node, path, pieces[index]) for index in remaining]

    return greedy(run, ranks)
