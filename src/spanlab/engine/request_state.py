"""One admitted request on the device: pages of its cache spans, copies that replace them, recurrent
state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from spanlab.core.plan import TreeAllocation
from spanlab.core.repair import Repair
from spanlab.core.step import ScheduledSequence
from spanlab.core.tree import CacheSpan
from spanlab.engine.model import AttentionContext
from spanlab.engine.pages import NodePages, PageIds, PageList, bases, carried_rotation
from spanlab.engine.states import RunningState


class SpanView(NamedTuple):
    """Tokens `[start, stop)` of a cache span as attention reads them from `pages`; `shift` as
    `RequestState.shift`."""

    start: int
    stop: int
    pages: PageList
    shift: int


@dataclass(slots=True)
class SpanPages:
    """Pages of one cache span; page i holds its tokens [i · page_size, (i + 1) · page_size).

    `stored_pages`  number of leading pages that belong to the tree; the others are private to the
                    request
    `copy`          pages read instead of `pages` for tokens [0, copied); some or all of them are
                    private to the request
    """

    cache_span: CacheSpan
    base: int  # position of the first token
    pages: PageList
    stored_pages: int
    copy: PageList
    copied: int = 0


class RequestState:
    """Pages and recurrent state of a sequence, from its admission until it finishes or is
    preempted."""

    def __init__(
        self,
        sequence: ScheduledSequence,
        allocation: TreeAllocation,
        context: AttentionContext,
        nodes: NodePages,
        state: RunningState | None = None,
    ) -> None:
        self.allocation, self.state, self.key_layout = allocation, state, context.key_layout
        self._pool, self._nodes, table = context.pool, nodes, context.pages
        self.page_size = context.pool.shape.page_size
        self.tokens = np.asarray(sequence.request.tokens, np.int64)
        cache_spans = tuple(plan.cache_span for plan in allocation.plan.cache_spans)
        base_positions = bases(cache_spans, self.key_layout.positions == "overlapping")
        self.spans: list[SpanPages] = []
        for cache_span, base, node, plan in zip(
            cache_spans, base_positions, allocation.nodes, allocation.plan.cache_spans, strict=True
        ):
            # equal spans share one page list, so that updates apply to both
            shared_pages = None if plan.twin is None else self.spans[plan.twin].pages
            pages = (
                PageList(table, nodes.path(node, plan.stored))
                if shared_pages is None
                else shared_pages
            )
            self.spans.append(
                SpanPages(cache_span, base, pages, plan.stored // self.page_size, PageList(table))
            )
        self._private: list[PageIds] = []
        # prompt positions that a repair recomputes, once selected
        self.repaired: np.ndarray | None = None
        self._linked = set(allocation.links)
        for index, link in allocation.links.items():
            self.spans[index].copy.extend(nodes.path(link, link.depth))
            self.spans[index].copied = link.depth

    @property
    def running(self) -> RunningState:
        """The recurrent state of a request of a hybrid model."""
        assert self.state is not None, "a request of a hybrid model has a state"
        return self.state

    def repaired_by(self, rule: Repair) -> np.ndarray:
        """Prompt positions that a repair recomputes, increasing: selected by a probe, or else by
        `rule`."""
        if self.repaired is None:
            plan = self.allocation.plan
            self.repaired = np.array(rule.rows(plan.spans, plan.request.id), np.int64)
        return self.repaired

    def ensure_pages(self, index: int, stop: int) -> None:
        """Allocate the missing pages for tokens [0, stop) of a cache span."""
        missing = self.missing(index, stop)
        if missing:
            self.spans[index].pages.extend(self._pool.allocate(missing))

    def missing(self, index: int, stop: int) -> int:
        """Number of pages to allocate for tokens [0, stop) of a cache span."""
        return max(0, -(-stop // self.page_size) - len(self.spans[index].pages))

    def slots(self, index: int, rows: np.ndarray, in_copy: bool = False) -> np.ndarray:
        """Slots to which tokens `rows`, relative to the cache span's start, are written."""
        span_pages = self.spans[index]
        pages = span_pages.copy if in_copy else span_pages.pages
        slots: np.ndarray = (
            pages.ids[rows // self.page_size] * self.page_size + rows % self.page_size
        )
        return slots

    def views(self, index: int, stop: int) -> list[SpanView]:
        """Views of tokens [0, stop) of a cache span for rows of other cache spans."""
        span_pages = self.spans[index]
        cut = min(span_pages.copied, stop)
        rotated = self.key_layout.rotates_copies and span_pages.copied > 0
        copied_views = (
            [SpanView(0, cut, span_pages.copy, 0 if rotated else self.shift(index))] if cut else []
        )
        return (
            [*copied_views, SpanView(cut, stop, span_pages.pages, self.shift(index))]
            if stop > cut
            else copied_views
        )

    def own_views(self, index: int, stop: int) -> list[SpanView]:
        """Views for rows of the same cache span; a span computed alone does not read its repaired
        copy."""
        span_pages = self.spans[index]
        if index in self._linked:
            return [SpanView(0, stop, span_pages.pages, self.shift(index))]
        return self.views(index, stop)

    def shift(self, index: int) -> int:
        """Number of positions by which stored keys must still be rotated to their position in the
        prompt."""
        span_pages, key_layout = self.spans[index], self.key_layout
        rotated = key_layout.keys == "absolute" or (
            key_layout.keys == "local" and not span_pages.cache_span.independent
        )
        return 0 if rotated else span_pages.base

    def rotations(self, index: int, rows: np.ndarray) -> np.ndarray:
        """RoPE positions of stored keys of tokens `rows`, relative to the cache span's start."""
        span_pages = self.spans[index]
        return carried_rotation(self.key_layout, span_pages.cache_span, span_pages.base, rows)

    # -- copies ------------------------------------------------------------------------------------

    def uncopied(self) -> list[int]:
        """Spans that a method with copies must still copy before they are read."""
        pairs = zip(self.spans, self.allocation.plan.cache_spans, strict=True)
        return [
            index
            for index, (span_pages, plan) in enumerate(pairs)
            if span_pages.copied < plan.to_copy
        ]

    def copy_pages_of(self, index: int, rows: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Allocate private pages for copies of the pages with `rows`, or of all; return slots to
        copy from and to."""
        span_pages, length = self.spans[index], self.allocation.plan.cache_spans[index].to_copy
        ids = span_pages.pages.ids[: -(-length // self.page_size)].copy()
        touched = np.arange(len(ids)) if rows is None else np.unique(rows // self.page_size)
        pages = self._pool.allocate(len(touched))
        self._private.append(pages)
        ids[touched] = pages
        span_pages.copy.free()
        span_pages.copy.extend(ids)
        span_pages.copied = length
        inside = (touched[:, None] * self.page_size + np.arange(self.page_size)).ravel()
        inside = inside[inside < length]
        return self.slots(index, inside), self.slots(index, inside, in_copy=True)

    # -- pages passed to the tree or freed ---------------------------------------------------------

    def claim(self, index: int) -> None:
        """Register pages of nodes that the policy stores before their computation, so the same step
        can read them."""
        span_pages = self.spans[index]
        for node in self.allocation.nodes[index].path():
            if node in self._nodes:
                break
            self.ensure_pages(index, node.depth)
            self._nodes[node] = span_pages.pages.ids[
                node.start // self.page_size : node.depth // self.page_size
            ].copy()

    def adopt(self, index: int) -> None:
        """Pass pages of newly stored nodes to the tree, or use the pages that another request
        stored first."""
        span_pages, stored_pages = self.spans[index], self.spans[index].stored_pages
        for node in self.allocation.nodes[index].path():
            first, last = node.start // self.page_size, node.depth // self.page_size
            if last <= stored_pages:
                break
            pages = span_pages.pages.ids[first:last]
            if node not in self._nodes:
                self._nodes[node] = pages.copy()
            elif not np.array_equal(pages, self._nodes[node]):
                # pages that another request stored take the place of private ones, also in copies
                stored = self._nodes[node]
                private = span_pages.pages.ids[first : first + len(stored)].copy()
                span_pages.pages.replace(first, stored)
                for other in self.spans:
                    if other.pages is span_pages.pages:
                        # a page of the copy, or the page that is replaced
                        copied = other.copy.ids[first : first + len(stored)]
                        replaced = copied == private[: len(copied)]
                        other.copy.replace(first, np.where(replaced, stored[: len(copied)], copied))
                self._pool.free(private)
            span_pages.stored_pages = max(span_pages.stored_pages, last)
        if self.state is not None:
            self.state.adopt()

    def adopt_links(self) -> None:
        """Pass pages of newly stored repairs to the tree, or read the pages that another request
        stored first."""
        for index in self.allocation.links.keys() - self._linked:
            copy = self.spans[index].copy
            for node in self.allocation.links[index].path():
                first, last = node.start // self.page_size, node.depth // self.page_size
                private = copy.ids[first:last].copy()
                self._private = [pages[~np.isin(pages, private)] for pages in self._private]
                if node in self._nodes:
                    copy.replace(first, self._nodes[node])
                    self._pool.free(private)
                else:
                    self._nodes[node] = private
            self._linked.add(index)

    def free(self) -> None:
        """Free the request's private pages, page lists and recurrent state."""
        pairs = list(zip(self.spans, self.allocation.plan.cache_spans, strict=True))
        private = [
            span_pages.pages.ids[span_pages.stored_pages :]
            for span_pages, plan in pairs
            if plan.twin is None
        ]
        self._pool.free(np.concatenate([*private, *self._private]))
        for span_pages, plan in pairs:
            span_pages.copy.free()
            if plan.twin is None:
                span_pages.pages.free()
        if self.state is not None:
            self.state.free()
