"""Device pages of the nodes in the policy's prefix tree."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from spanlab.core.tree import Node
from spanlab.engine.pool import PageIds

_NONE = np.empty(0, np.int64)


class NodePages:
    """Page ids by tree node, updated when the tree splits or removes a node.

    `free`  called with the pages of a removed node
    """

    def __init__(self, page_size: int, free: Callable[[PageIds], None]) -> None:
        self._page_size, self._free = page_size, free
        self._pages: dict[Node, PageIds] = {}

    def __contains__(self, node: Node) -> bool:
        return node in self._pages

    def __getitem__(self, node: Node) -> PageIds:
        return self._pages[node]

    def __setitem__(self, node: Node, pages: PageIds) -> None:
        assert len(pages) * self._page_size == node.depth - node.start, "pages do not fit their node"
        self._pages[node] = pages

    def path(self, node: Node, stop: int) -> PageIds:
        """Pages of the first `stop` tokens of the path to `node`, in order; a node must end at `stop`."""
        parts = [self._pages[step] for step in node.path() if step.depth <= stop]
        return np.concatenate([_NONE, *reversed(parts)])

    def all(self) -> list[int]:
        """All pages of stored nodes."""
        return [page for pages in self._pages.values() for page in pages.tolist()]

    # -- tree callbacks -----------------------------------------------------------------------------------------------

    def split(self, upper: Node, lower: Node) -> None:
        """Divide a node's pages at the split; a node that is not registered yet has none."""
        if lower in self._pages:
            pages, cut = self._pages[lower], (upper.depth - upper.start) // self._page_size
            self._pages[upper], self._pages[lower] = pages[:cut], pages[cut:]

    def removed(self, node: Node) -> None:
        """Free the pages of a removed node."""
        self._free(self._pages.pop(node, _NONE))
