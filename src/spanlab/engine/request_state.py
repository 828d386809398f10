"""One admitted request on the device: the pages of its cache spans, the copies read in their place, its state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from spanlab.core.cache_spans import CacheSpan
from spanlab.core.repair import Repair
from spanlab.core.reuse import TreeAllocation
from spanlab.core.scheduled import Sequence
from spanlab.core.spans import SpanSettings
from spanlab.core.tree import Node
from spanlab.engine.key_layout import bases
from spanlab.engine.node_pages import NodePages
from spanlab.engine.page_table import PageList, PageTable
from spanlab.engine.pool import PageIds, PagePool
from spanlab.engine.running_state import RunningState


class SpanView(NamedTuple):
    """Tokens `[start, stop)` of a cache span as readers find them, in its `pages`; `shift` as `RequestState.shift`."""

    start: int
    stop: int
    pages: PageList
    shift: int


@dataclass(slots=True)
class SpanPages:
    """Where one cache span's tokens lie; page i holds its tokens [i · page, (i + 1) · page).

    `kept`    leading pages that belong to the tree; the others are the request's
    `copy`    pages read in place of `pages` for tokens [0, copied), some or all of them the request's own
    """

    cache_span: CacheSpan
    base: int  # position of the first token
    pages: PageList
    kept: int
    copy: PageList
    copied: int = 0


class RequestState:
    """The pages of a sequence, and its recurrent state if any, from its admission until it ends or is preempted."""

    def __init__(
        self,
        sequence: Sequence,
        allocation: TreeAllocation,
        pool: PagePool,
        nodes: NodePages,
        table: PageTable,
        key_layout: SpanSettings,
        state: RunningState | None = None,
    ) -> None:
        self.allocation, self._pool, self._nodes, self._key_layout = allocation, pool, nodes, key_layout
        self._table = table
        self.state = state
        self.page = pool.shape.page_size
        self.tokens = np.asarray(sequence.request.tokens, np.int64)
        cache_spans = tuple(plan.cache_span for plan in allocation.plan.cache_spans)
        at = bases(cache_spans, key_layout.positions == "overlapping")
        self.spans: list[SpanPages] = []
        for cache_span, base, node, plan in zip(
            cache_spans, at, allocation.nodes, allocation.plan.cache_spans, strict=True
        ):
            # a twin has the same list, which grows and changes for both
            twin = None if plan.twin is None else self.spans[plan.twin].pages
            pages = PageList(table, nodes.path(node, plan.stored)) if twin is None else twin
            self.spans.append(SpanPages(cache_span, base, pages, plan.stored // self.page, PageList(table)))
        self._private: list[PageIds] = []
        self.repaired: np.ndarray | None = None  # prompt positions that a repair computes again, once they are chosen
        self._linked = set(allocation.links)
        for index, link in allocation.links.items():
            self.spans[index].copy.extend(nodes.path(link, link.depth))
            self.spans[index].copied = link.depth

    @property
    def running(self) -> RunningState:
        """Its recurrent state, in a hybrid model."""
        assert self.state is not None, "a request of a hybrid model has a state"
        return self.state

    def repaired_by(self, rule: Repair) -> np.ndarray:
        """Prompt positions that a repair computes again, increasing: by its rule, unless a probe has chosen them."""
        if self.repaired is None:
            plan = self.allocation.plan
            self.repaired = np.array(rule.rows(plan.spans, plan.request.id), np.int64)
        return self.repaired

    def hold(self, index: int, stop: int) -> None:
        """Make sure that a cache span has pages for its tokens [0, stop)."""
        missing = self.missing(index, stop)
        if missing:
            self.spans[index].pages.extend(self._pool.take(missing))

    def missing(self, index: int, stop: int) -> int:
        """How many pages a cache span lacks for its tokens [0, stop)."""
        return max(0, -(-stop // self.page) - len(self.spans[index].pages))

    def slots(self, index: int, rows: np.ndarray, in_copy: bool = False) -> np.ndarray:
        """Slots of tokens `rows`, counted from the cache span's start, where they are to be written."""
        span_pages = self.spans[index]
        pages = span_pages.copy if in_copy else span_pages.pages
        slots: np.ndarray = pages.ids[rows // self.page] * self.page + rows % self.page
        return slots

    def views(self, index: int, stop: int) -> list[SpanView]:
        """The cache span's tokens [0, stop) as other cache spans read them."""
        span_pages = self.spans[index]
        cut = min(span_pages.copied, stop)
        rotated = self._key_layout.rotates_copies and span_pages.copied > 0
        found = [SpanView(0, cut, span_pages.copy, 0 if rotated else self.shift(index))] if cut else []
        return [*found, SpanView(cut, stop, span_pages.pages, self.shift(index))] if stop > cut else found

    def own_views(self, index: int, stop: int) -> list[SpanView]:
        """The same as its own later tokens read them: a span that is computed alone knows of no repair."""
        span_pages = self.spans[index]
        if index in self._linked:
            return [SpanView(0, stop, span_pages.pages, self.shift(index))]
        return self.views(index, stop)

    def shift(self, index: int) -> int:
        """By how many positions the stored keys of a cache span stand short of where they count as standing."""
        span_pages, key_layout = self.spans[index], self._key_layout
        rotated = key_layout.keys == "absolute" or (
            key_layout.keys == "local" and not span_pages.cache_span.independent
        )
        return 0 if rotated else span_pages.base

    # -- copies -------------------------------------------------------------------------------------------------------

    def uncopied(self) -> list[int]:
        """Spans that must be copied before they are read, where the method reads copies, and have not been."""
        if not self._key_layout.copies:
            return []
        parts = zip(self.spans, self.allocation.plan.cache_spans, strict=True)
        return [index for index, (span_pages, part) in enumerate(parts) if span_pages.copied < part.to_copy]

    def copy_span(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Give a span pages of its own; returns the slots to copy from and to, int64 [tokens]."""
        span_pages, count = self.spans[index], self.allocation.plan.cache_spans[index].to_copy
        span_pages.copy.free()
        span_pages.copy.extend(self._take(-(-count // self.page)))
        span_pages.copied = count
        rows = np.arange(count)
        return self.slots(index, rows), self.slots(index, rows, in_copy=True)

    def copy_pages_of(self, index: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Copy-on-write: own pages for those that hold `rows`; returns the slots of their tokens, from and to."""
        span_pages, length = self.spans[index], self.allocation.plan.cache_spans[index].to_copy
        ids, touched = span_pages.pages.ids[: -(-length // self.page)].copy(), np.unique(rows // self.page)
        ids[touched] = self._take(len(touched))
        span_pages.copy.free()
        span_pages.copy.extend(ids)
        span_pages.copied = length
        inside = (touched[:, None] * self.page + np.arange(self.page)).ravel()
        inside = inside[inside < length]
        return self.slots(index, inside), self.slots(index, inside, in_copy=True)

    def _take(self, count: int) -> PageIds:
        taken = self._pool.take(count)
        self._private.append(taken)
        return taken

    # -- what the tree takes over, and what is given back -------------------------------------------------------------

    def claim(self, index: int) -> None:
        """Enter pages for what the policy has stored before it is computed, so that the same step may read it."""
        span_pages = self.spans[index]
        for node in self.allocation.nodes[index].path():
            if node in self._nodes:
                break
            self.hold(index, node.depth)
            self._nodes[node] = span_pages.pages.ids[node.start // self.page : node.depth // self.page].copy()

    def adopt(self, index: int) -> None:
        """Hand pages to the nodes that have been stored since, or take over those that somebody else stored first."""
        span_pages, kept = self.spans[index], self.spans[index].kept
        for node in self.allocation.nodes[index].path():
            first, last = node.start // self.page, node.depth // self.page
            if last <= kept:
                break
            pages = span_pages.pages.ids[first:last]
            if node not in self._nodes:
                self._nodes[node] = pages.copy()
            elif not np.array_equal(pages, self._nodes[node]):
                self._replace(span_pages, first, self._nodes[node])
            span_pages.kept = max(span_pages.kept, last)
        if self.state is not None:
            self.state.adopt()

    def adopt_links(self) -> None:
        """Hand pages to the repairs that have been stored since, or read those that somebody else stored first."""
        for at in self.allocation.links.keys() - self._linked:
            for node in self.allocation.links[at].path():
                self._adopt_link(self.spans[at].copy, node)
            self._linked.add(at)

    def _adopt_link(self, copy: PageList, node: Node) -> None:
        first, last = node.start // self.page, node.depth // self.page
        own = copy.ids[first:last].copy()
        self._private = [pages[~np.isin(pages, own)] for pages in self._private]
        if node in self._nodes:
            copy.put(first, self._nodes[node])
            self._pool.give(own)
        else:
            self._nodes[node] = own

    def _replace(self, span_pages: SpanPages, first: int, pages: PageIds) -> None:
        """Read what somebody else stored, also where a partial copy goes on with it, and give our own back."""
        own = span_pages.pages.ids[first : first + len(pages)].copy()
        span_pages.pages.put(first, pages)
        for reader in self.spans:
            if reader.pages is span_pages.pages:
                copied = reader.copy.ids[first : first + len(pages)]  # each its own, or that of the same place
                put = np.where(copied == own[: len(copied)], pages[: len(copied)], copied)
                reader.copy.put(first, put)
        self._pool.give(own)

    def leave(self) -> None:
        """Give back everything that is the request's own."""
        parts = list(zip(self.spans, self.allocation.plan.cache_spans, strict=True))
        own = [span_pages.pages.ids[span_pages.kept :] for span_pages, part in parts if part.twin is None]
        self._pool.give(np.concatenate([*own, *self._private]))
        for span_pages, part in parts:
            span_pages.copy.free()
            if part.twin is None:
                span_pages.pages.free()
        if self.state is not None:
            self.state.leave()
