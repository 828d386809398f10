"""Prompts as paths through a trie of their contents: the shared prefixes of a log without token ids.

Consecutive pieces with the same prompts form one node, so that a path is short even for a long prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from spanlab.core.token_string import string_of
from spanlab.core.tree import Node, PrefixTree
from spanlab.offline.forest import Forest, Ints
from spanlab.offline.reuses import Flags


@dataclass(frozen=True)
class Paths:
    """Request r visits `nodes[starts[r]:starts[r + 1]]`, from the prompt's start down.

    `node_start`, `node_stop`  tokens of each node in its prompts, half-open, shape (nodes,)
    `pieces`                   pieces of each node, shape (nodes,)
    `prompt_tokens`            shape (requests,)
    """

    nodes: Ints
    starts: Ints
    node_start: Ints
    node_stop: Ints
    pieces: Ints
    prompt_tokens: Ints

    @property
    def requests(self) -> int:
        """Number of requests."""
        return len(self.starts) - 1

    @cached_property
    def owner(self) -> Ints:
        """The request of each visit."""
        return np.repeat(np.arange(self.requests), np.diff(self.starts))

    @cached_property
    def first(self) -> Flags:
        """Whether each visit is the first one of its node."""
        first = np.zeros(len(self.nodes), dtype=np.bool_)
        first[np.unique(self.nodes, return_index=True)[1]] = True
        return first

    @property
    def tokens(self) -> Ints:
        """Tokens of each node."""
        return self.node_stop - self.node_start

    def blocks(self, size: int) -> Ints:
        """Return the number of full blocks of `size` tokens that end in each node, by their last token."""
        return self.node_stop // size - self.node_start // size

    def per_request(self, values: Ints) -> Ints:
        """Return sums of values of visits by request."""
        return np.bincount(self.owner, values, self.requests).astype(np.int64)

    @cached_property
    def seen_tokens(self) -> Ints:
        """Longest prefix of each prompt that an earlier prompt had, in tokens."""
        return self.per_request(np.where(self.first, 0, self.tokens[self.nodes]))

    def forest(self, size: int) -> Forest:
        """Return the same paths in whole blocks, for bounds; at least one token of a prompt is computed.

        A node in which a prompt of whole blocks ends becomes two: that prompt cannot reuse the last block alone.
        """
        blocks, nodes, last = self.blocks(size), len(self.tokens), self.nodes[self.starts[1:] - 1]
        tail = np.zeros(nodes, dtype=np.int64)
        tail[last] = (self.node_stop[last] % size == 0) & (blocks[last] > 1)
        lengths = np.concatenate([blocks - tail, tail]) * size
        stop = np.concatenate([self.node_stop // size - tail, self.node_stop // size]) * size
        path_nodes = np.stack([self.nodes, self.nodes + nodes], axis=1).ravel()
        owner = np.repeat(self.owner, 2)
        visited = lengths[path_nodes] > 0
        usable = visited & (stop[path_nodes] < self.prompt_tokens[owner])
        return Forest(
            lengths=lengths,
            path_nodes=path_nodes[visited],
            path_starts=np.concatenate([[0], np.cumsum(visited)])[2 * self.starts],
            path_usable=np.bincount(owner, usable, self.requests).astype(np.int64),
            path_prompt=np.bincount(owner, visited, self.requests).astype(np.int64),
            prompt_paths=np.arange(self.requests + 1),
            unit=size,
        )


def build_paths(pieces: NDArray[np.int32], lengths: NDArray[np.int32], starts: Ints) -> Paths:
    """Return the paths of requests with pieces `pieces[starts[r]:starts[r + 1]]` of `lengths` tokens each."""
    tree, bounds = PrefixTree(), starts.tolist()
    root = tree.new_root()
    counts = np.diff(starts).tolist()
    strings = (string_of([pieces[start:stop]]) for start, stop in pairwise(bounds))
    ends = [tree.extend(root, string, count, 0) for string, count in zip(strings, counts, strict=True)]
    numbers: dict[Node, int] = {}
    nodes: list[int] = []
    firsts, path_starts = [], [0]
    for request, end in enumerate(ends):
        path = list(end.path())[::-1]
        firsts += [request] * sum(node not in numbers for node in path)
        nodes += [numbers.setdefault(node, len(numbers)) for node in path]
        path_starts.append(len(nodes))
    tokens_before = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    first_piece = starts[np.array(firsts, dtype=np.int64)]
    depth, above = (np.array([getattr(node, name) for node in numbers], dtype=np.int64) for name in ("depth", "start"))
    return Paths(
        nodes=np.array(nodes, dtype=np.int64),
        starts=np.array(path_starts, dtype=np.int64),
        node_start=tokens_before[first_piece + above] - tokens_before[first_piece],
        node_stop=tokens_before[first_piece + depth] - tokens_before[first_piece],
        pieces=depth - above,
        prompt_tokens=np.diff(tokens_before[starts]),
    )
