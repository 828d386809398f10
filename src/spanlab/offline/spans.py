"""Reuse at any position, and reuse by order: what the contents of a log allow beyond equal beginnings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np
from numpy.typing import NDArray

from spanlab.core.passages import greedy
from spanlab.offline.forest import Ints
from spanlab.offline.paths import Flags, Paths, build_paths
from spanlab.offline.stack import Distances, stack_distances


@dataclass(frozen=True)
class Contents:
    """Prompts as contents; request r consists of the pieces `starts[r]:starts[r + 1]`.

    `pieces`   int32 numbers of contents, `lengths` their tokens
    `opens`    whether a piece begins a span
    `free`     whether a piece is a span whose order among its neighbours does not matter
    """

    pieces: NDArray[np.int32]
    lengths: NDArray[np.int32]
    opens: Flags
    free: Flags
    starts: Ints

    def paths(self) -> Paths:
        """Whole prompts as paths."""
        return build_paths(self.pieces, self.lengths, self.starts)

    def seen_anywhere(self) -> Ints:
        """Tokens of each prompt in pieces that occurred before, in an earlier prompt or in the same one."""
        first = np.zeros(len(self.pieces), dtype=np.bool_)
        first[np.unique(self.pieces, return_index=True)[1]] = True
        return self._per_request(np.where(first, 0, self.lengths))

    def _per_request(self, values: Ints) -> Ints:
        upto = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
        return np.diff(upto[self.starts])

    def span_starts(self) -> Ints:
        """Where spans begin, and the end."""
        return np.append(np.flatnonzero(self.opens), len(self.pieces)).astype(np.int64)


@dataclass(frozen=True)
class SpanReuse:
    """Spans of all prompts, each stored once and found anywhere, under LRU.

    `distances`  of visits of `paths`, whose requests are spans
    `request`    the request of each span; `leads` marks the first span of a prompt, `ends` the last one
    """

    paths: Paths
    distances: Distances
    request: Ints
    leads: Flags
    ends: Flags

    def reused(self, capacity_tokens: float) -> Ints:
        """Tokens of each span that a cache of so many tokens holds; one token of a prompt is computed."""
        found = self.paths.per_request(self.distances.found(capacity_tokens))
        return np.minimum(found, self.paths.prompt_tokens - self.ends)

    def repaired(self, reused: Ints, first: int, share: float) -> Ints:
        """What is left of reused tokens where a repair computes again the first ones of each span, or a share.

        A span at the start of a prompt needs no repair.
        """
        again = np.minimum(reused, first) + np.floor(share * np.maximum(reused - first, 0)).astype(np.int64)
        return np.where(self.leads, reused, reused - again)


def span_reuse(contents: Contents) -> SpanReuse:
    """Every span as a path of its own."""
    starts = contents.span_starts()
    paths = build_paths(contents.pieces, contents.lengths, starts)
    request = np.searchsorted(contents.starts, starts[:-1], side="right") - 1
    tokens = paths.tokens
    distances = stack_distances(paths, tokens, np.zeros(paths.requests, dtype=np.int64))
    changes = request[1:] != request[:-1]
    leads, ends = np.append(True, changes), np.append(changes, True)
    return SpanReuse(paths, distances, request, leads, ends)


class _Served:
    """A tree of prompts as they were served, and how often each of its nodes was passed."""

    def __init__(self) -> None:
        self._behind: dict[tuple[int, int], tuple[int, int]] = {}  # (node, piece) to (node behind it, times)

    def times(self, node: int, pieces: Sequence[int], last: int) -> int:
        """How often `last` has stood behind `pieces` behind a node."""
        for piece in pieces:
            node = self._behind[node, piece][0]
        return self._behind.get((node, last), (0, 0))[1]

    def follow(self, node: int, piece: int) -> int:
        """Note that a piece stands behind a node; returns the node behind it."""
        behind, times = self._behind.get((node, piece), (len(self._behind) + 1, 0))
        self._behind[node, piece] = behind, times + 1
        return behind


def in_cached_order(contents: Contents) -> Contents:
    """The same prompts with free spans reordered, so that each follows the longest path that was served before.

    The walk is that of `spanlab.core.passages`. A log does not tell what was cached, so that the next span is the one
    that has stood behind those placed so far most often; the others keep their order.
    """
    order = np.arange(len(contents.pieces))
    pieces, starts, free = contents.pieces.tolist(), contents.starts.tolist(), contents.free.tolist()
    served = _Served()
    for first, stop in pairwise(starts):
        order[first:stop] = _walk(pieces, free, range(first, stop), served)
    return Contents(
        contents.pieces[order], contents.lengths[order], contents.opens[order], contents.free[order], contents.starts
    )


def _walk(pieces: list[int], free: list[bool], prompt: range, served: _Served) -> list[int]:
    """The places of a prompt's pieces in the order in which they are served."""
    node, placed = 0, []
    for moves, run in groupby(prompt, free.__getitem__):
        for at in _run(pieces, list(run), node, served) if moves else run:
            node = served.follow(node, pieces[at])
            placed.append(at)
    return placed


def _run(pieces: list[int], run: list[int], node: int, served: _Served) -> list[int]:
    """Places of free spans, those first that were served behind a node."""

    def ranks(before: list[int], left: list[int]) -> list[int]:
        path = [pieces[at] for at in before]
        return [served.times(node, path, pieces[at]) for at in left]

    return greedy(run, ranks)
