"""Which pages of the device hold what the policy's tree says is stored."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from spanlab.core.tree import Node
from spanlab.engine.pool import PageIds

_NONE = np.empty(0, np.int64)


class NodePages:
    """Page ids by node of the tree; follows the tree as its edges split and its leaves leave.

    `give` takes back the pages of a node that has left.
    """

    def __init__(self, page_size: int, give: Callable[[PageIds], None]) -> None:
        self._page_size, self._give = page_size, give
        self._pages: dict[Node, PageIds] = {}

    def __contains__(self, node: Node) -> bool:
        return node in self._pages

    def __getitem__(self, node: Node) -> PageIds:
        return self._pages[node]

    def __setitem__(self, node: Node, pages: PageIds) -> None:
        assert len(pages) * self._page_size == node.depth - node.start, "pages do not fit their node"
        self._pages[node] = pages

    def path(self, node: Node, stop: int) -> PageIds:
        """The pages of the first `stop` tokens of the path to `node`, in order; a node ends there."""
        parts = [self._pages[step] for step in node.path() if step.depth <= stop]
        return np.concatenate([_NONE, *reversed(parts)])

    def all(self) -> list[int]:
        """Every page that holds something stored."""
        return [page for pages in self._pages.values() for page in pages.tolist()]

    # -- what the tree tells ------------------------------------------------------------------------------------------

    def split(self, upper: Node, lower: Node) -> None:
        """The pages go with their tokens; a node not yet entered here has none."""
        if lower in self._pages:
            pages, cut = self._pages[lower], (upper.depth - upper.start) // self._page_size
            self._pages[upper], self._pages[lower] = pages[:cut], pages[cut:]

    def removed(self, node: Node) -> None:
        """Its pages are free."""
        self._give(self._pages.pop(node, _NONE))
