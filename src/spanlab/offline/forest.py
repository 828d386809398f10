"""The shared prefixes of a set of prompts, as a compressed forest of units.

A unit is the smallest run of tokens that a cache stores and matches: a block, or for models with recurrent
layers a multiple of the kernel grid. Consecutive units with the same users form one node.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from spanlab.core.cache_spans import CacheSpan
from spanlab.core.request import Request
from spanlab.core.reuse_rules import StorageRules
from spanlab.core.token_string import string_of
from spanlab.core.tree import Node, PrefixTree

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
    return builder.forest(np.cumsum(counts))


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
    numbers: dict[Node, int] = field(default_factory=dict)

    def add(self, prompt: Request) -> int:
        """Add a prompt's paths; return their number."""
        cache_spans = self.rules.layout(prompt)
        before = len(self.paths)
        for cache_span in cache_spans:
            if cache_span.storable:
                self._add_cache_span(prompt, cache_span, cache_span is cache_spans[-1])
        return len(self.paths) - before

    def _add_cache_span(self, prompt: Request, cache_span: CacheSpan, last: bool) -> None:
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

    def forest(self, prompt_paths: Ints) -> Forest:
        """Number the nodes after the last split, and return the forest."""
        nodes: list[int] = []
        starts, usable, of_prompt = [0], [], []
        for path in self.paths:
            steps = list(path.end.path())[::-1]
            nodes += [self.numbers.setdefault(node, len(self.numbers)) for node in steps]
            usable.append(sum([node.depth <= path.limit for node in steps]))
            of_prompt.append(sum([node.depth <= path.prompt for node in steps]))
            starts.append(len(nodes))
        lengths = [node.depth - node.start for node in self.numbers]
        return Forest(
            lengths=np.array(lengths, np.int64),
            path_nodes=np.array(nodes, np.int64),
            path_starts=np.array(starts, np.int64),
            path_usable=np.array(usable, np.int64),
            path_prompt=np.array(of_prompt, np.int64),
            prompt_paths=prompt_paths.astype(np.int64),
            unit=self.rules.unit,
        )
